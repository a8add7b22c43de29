"""The load of a worker: what a decision adds, what progress takes away, and what is given up on."""

import msgspec
import pytest

from headwater.router import load
from headwater.router.load import Loads
from headwater.router.worker import UNACCEPTED_NS_MAX, Worker
from headwater.schemas.events import LoadReported, WorkerDraining, WorkerLeft
from headwater.schemas.routing import (
    NO_CONSTRAINTS,
    Candidate,
    Decision,
    DecisionVoided,
    Preferences,
    Weights,
)
from tests.support.data.examples import joined
from tests.support.worlds.clock import WALL_NS

SECOND_NS = 1_000_000_000


def decision(
    request: str,
    *,
    worker: str = "w1",
    epoch: int = 1,
    tokens: int = 100,
    cached: int = 0,
    at_s: float = 0,
    position: int = 0,
) -> Decision:
    """`request` goes to `worker`, which has `cached` blocks of its prompt; decided at a log position."""
    chosen = Candidate(worker, epoch, cached, 0, 0, 0, 0, 0.0)
    wall_ns = WALL_NS + round(at_s * SECOND_NS)
    blocks = tokens // 16
    return Decision(
        1,
        position,
        0,
        wall_ns,
        request,
        tokens,
        10,
        blocks,
        0,
        0,
        0,
        NO_CONSTRAINTS,
        Preferences("kv", 0.0),
        Weights(),
        0,
        worker,
        epoch,
        (chosen,),
    )


def report(
    loads: Loads,
    *,
    accepted: tuple[str, ...] = (),
    prefilled: tuple[str, ...] = (),
    finished: tuple[str, ...] = (),
    epoch: int = 1,
) -> None:
    """w1 tells how its requests got on."""
    loads.report("w1", epoch, LoadReported(1, 2, 3, 1000, accepted, prefilled, finished))


def fresh() -> tuple[Loads, Worker]:
    """One worker."""
    loads = Loads()
    assert loads.join(joined("w1", 1))
    report(loads)
    return loads, loads.workers["w1"]


def test_a_decision_adds_what_is_to_be_computed_and_held() -> None:
    """Uncached prompt tokens are to be computed, and all prompt blocks, the last in part, to be held."""
    loads, worker = fresh()
    loads.decide(decision("a", tokens=100, cached=2))
    assert (worker.prefill_tokens, worker.decode_blocks) == (100 - 32, 7)
    loads.decide(decision("b", tokens=16))
    assert (worker.prefill_tokens, worker.decode_blocks, len(worker.requests)) == (68 + 16, 8, 2)


def test_progress_takes_off_what_is_done() -> None:
    """A computed prompt is no prefill any more; an end gives back everything; repeats change nothing."""
    loads, worker = fresh()
    loads.decide(decision("a"))
    report(loads, accepted=("a",))
    assert (worker.prefill_tokens, worker.decode_blocks) == (100, 7)
    for _ in range(2):
        report(loads, prefilled=("a",))
        assert (worker.prefill_tokens, worker.decode_blocks) == (0, 7)
    report(loads, accepted=("a",))
    assert worker.prefill_tokens == 0, "an older stage does not take a newer one back"
    report(loads, finished=("a",))
    assert (worker.prefill_tokens, worker.decode_blocks, worker.requests) == (0, 0, {})
    assert loads.early == {}


def test_a_report_sets_the_engines_own_numbers() -> None:
    """Running, waiting and blocks are what the engine said last."""
    loads, worker = fresh()
    assert (worker.running, worker.waiting, worker.used_blocks, worker.total_blocks) == (1, 2, 3, 1000)
    loads.report("w1", 1, LoadReported(4, 5, 6, 7))
    assert (worker.running, worker.waiting, worker.used_blocks, worker.total_blocks) == (4, 5, 6, 7)


def test_the_age_of_reports_is_a_mean_over_the_latest_ones() -> None:
    """One that is very late counts for 2 s at most, and one from a clock that is ahead for nothing."""
    loads, worker = fresh()

    def report_late(*ages_ms: float) -> None:
        for age_ms in ages_ms:
            stored_ns = WALL_NS + round(age_ms * 1e6)
            loads.report("w1", 1, LoadReported(1, 2, 3, 1000), WALL_NS, stored_ns)

    report_late(240.0)
    assert worker.signal_age_ms == 240.0
    report_late(80.0)
    assert worker.signal_age_ms == 220.0
    report_late(60_000.0)
    assert worker.signal_age_ms == 220.0 + (2_000.0 - 220.0) / 8
    report_late(*[-5_000.0] * 100)
    assert worker.signal_age_ms < 0.1


@pytest.mark.parametrize(
    ("stages", "prefill", "blocks"),
    [
        (["accepted"], 100, 7),
        (["accepted", "prefilled"], 0, 7),
        (["prefilled"], 0, 7),
        (["accepted", "prefilled", "finished"], 0, 0),
        (["finished"], 0, 0),
    ],
)
def test_stages_that_come_before_their_decision_are_kept_for_it(
    stages: list[str], prefill: int, blocks: int
) -> None:
    """Writers are not in step: progress told early counts as soon as the decision is read."""
    loads, worker = fresh()
    for stage in stages:
        report(loads, **{stage: ("a",)})  # type: ignore[arg-type]
    assert loads.early.keys() == {"w1.1/a"}
    loads.decide(decision("a"))
    assert (worker.prefill_tokens, worker.decode_blocks) == (prefill, blocks)
    assert loads.early == {}
    report(loads, finished=("a",) if blocks else ())
    assert (worker.prefill_tokens, worker.decode_blocks, worker.requests) == (0, 0, {})


def test_a_decision_that_nobody_accepted_stops_counting() -> None:
    """The edge died in between: after a while the worker is not held to be busy with it."""
    loads, worker = fresh()
    loads.decide(decision("lost", tokens=32))
    loads.decide(decision("taken", tokens=100))
    report(loads, accepted=("taken",))
    assert worker.promised(WALL_NS + UNACCEPTED_NS_MAX) == (132, 9), "not before its time"
    assert worker.promised(WALL_NS + UNACCEPTED_NS_MAX + 1) == (100, 7)
    assert worker.promised(WALL_NS + 100 * UNACCEPTED_NS_MAX) == (100, 7), "what was accepted may take long"
    listed = [(WALL_NS, 32), (WALL_NS, 100)]
    for late_ns, queue in ((UNACCEPTED_NS_MAX, listed), (UNACCEPTED_NS_MAX + 1, listed[1:])):
        assert worker.list_queue(WALL_NS + late_ns) == queue
        assert worker.queued_prompts(WALL_NS + late_ns) == len(queue)


@pytest.mark.parametrize(
    ("stage", "promised"), [("accepted", (32, 2)), ("prefilled", (0, 2)), ("finished", (0, 0))]
)
def test_a_late_acceptance_counts_after_all(stage: str, promised: tuple[int, int]) -> None:
    """A worker that was slow to say so, or whose clock is off, has the request: it counts as any other."""
    loads, worker = fresh()
    loads.decide(decision("late", tokens=32))
    much_later_ns = WALL_NS + 2 * UNACCEPTED_NS_MAX
    assert worker.promised(much_later_ns) == (0, 0)
    report(loads, **{stage: ("late",)})  # type: ignore[arg-type]
    assert worker.promised(much_later_ns) == promised
    report(loads, finished=("late",) if stage != "finished" else ())
    assert worker.promised(WALL_NS) == worker.promised(much_later_ns) == (0, 0)
    assert loads.early == {}


def test_a_decision_that_nobody_accepts_is_voided() -> None:
    """What was promised for it is free again; one that was accepted meanwhile, or in another life, stays."""
    loads, worker = fresh()
    for request in ("lost", "accepted"):
        loads.decide(decision(request, tokens=32))
    report(loads, accepted=("accepted",))
    for request in ("lost", "accepted", "unheard-of"):
        loads.void(DecisionVoided(request, "w1", 1))
        loads.void(DecisionVoided(request, "w1", 7))
    assert worker.requests.keys() == {"accepted"}
    assert worker.unaccepted == {}
    assert (worker.prefill_tokens, worker.decode_blocks) == (32, 2)


def test_a_decision_that_is_read_twice_counts_once() -> None:
    """Nothing is added again, and nothing is left over after its end."""
    loads, worker = fresh()
    loads.decide(decision("a"))
    loads.decide(decision("a"))
    assert worker.promised(WALL_NS) == (100, 7)
    report(loads, accepted=("a",), prefilled=("a",), finished=("a",))
    assert (worker.promised(WALL_NS), worker.requests) == ((0, 0), {})


def test_early_stages_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decisions that are never recorded do not fill the memory: the oldest early stage goes first."""
    monkeypatch.setattr(load, "EARLY_MAX", 3)
    loads, _ = fresh()
    for number in range(5):
        report(loads, accepted=(f"r{number}",))
    assert list(loads.early) == ["w1.1/r2", "w1.1/r3", "w1.1/r4"]


def test_lives_of_workers_do_not_mix() -> None:
    """Only a newer epoch joins; decisions, drains and leaves of another epoch change nothing."""
    loads, _ = fresh()
    loads.decide(decision("a"))
    assert not loads.join(joined("w1", 1))
    assert loads.workers["w1"].requests.keys() == {"a"}
    assert loads.join(joined("w1", 3, block_size=32))
    worker = loads.workers["w1"]
    assert (worker.epoch, worker.block_size, worker.requests, worker.prefill_tokens) == (3, 32, {}, 0)
    loads.decide(decision("b", epoch=1))
    loads.drain(WorkerDraining("w1", 1))
    report(loads, epoch=1, finished=("z",))
    assert not loads.leave(WorkerLeft("w1", 1, ""))
    assert (worker.requests, worker.draining, worker.running, loads.early) == ({}, False, 0, {})
    loads.drain(WorkerDraining("w1", 3))
    assert worker.draining
    assert loads.leave(WorkerLeft("w1", 3, ""))
    assert not loads.leave(WorkerLeft("w1", 3, ""))
    assert loads.workers == {}


def test_workers_do_not_share_their_requests() -> None:
    """Two workers, two ledgers, also after going through a snapshot's plain types."""
    loads, _ = fresh()
    loads.join(joined("w2", 2))
    loads.decide(decision("a", worker="w2", epoch=2))
    again = msgspec.convert(msgspec.to_builtins(loads), Loads)
    assert again == loads
    again.decide(decision("b"))
    assert again.workers["w1"].requests.keys() == {"b"}
    assert again.workers["w2"].requests.keys() == {"a"}
    assert loads.workers["w1"].requests == {}
