"""The estimate that `kv` minimises: what is in it, and how it moves with what the log tells."""

import pytest

from headwater.router.cost import cost_weights, spare_capacity, utilization_of, weights_at
from headwater.router.decide import Evaluation, recompute, reevaluate
from headwater.router.state import RouterState
from headwater.router.worker import UNACCEPTED_NS_MAX
from headwater.schemas.events import BlocksStored, LoadReported, Role, WorkerJoined
from headwater.schemas.routing import Candidate, Decision, RouteQuery, Weights
from tests.support.data.examples import packed
from tests.support.data.queries import changed
from tests.support.data.story import fold, reply_on, tell

MS_A_TOKEN = 0.05
START_MS = 10.0
BLOCKS = 1_000
MS = 1_000_000


def took(tokens: int) -> float:
    """Milliseconds that a prompt with so many tokens to compute takes on these workers."""
    return START_MS + MS_A_TOKEN * tokens


def fleet(**roles: Role) -> RouterState:
    """Workers that were measured."""
    state = fold([])
    samples = tuple((tokens, round(1_000 * took(tokens))) for tokens in (100, 400, 1_600, 6_400, 12_800) * 8)
    for name, role in roles.items():
        joined = WorkerJoined(name, 1, "m", "sim", role, 16, BLOCKS, 256, pairs_with="sim", instance=name)
        tell(state, joined, writer=name)
        tell(state, LoadReported(0, 0, 0, BLOCKS, prefills=samples), writer=name)
    return state


def ask(
    state: RouterState,
    tokens: int = 1_600,
    *,
    at_ms: int = 0,
    name: str = "q-0-1",
    weights: Weights | None = None,
    first: int = 1,
    **fields: object,
) -> Decision:
    """What is decided for a prompt of this many tokens, the first block being number `first`."""
    hashes = packed(*range(first, first + tokens // 16))
    query = changed(RouteQuery(name, tokens, 10, hashes), **fields)
    decision = reply_on(state, query, wall_ns=at_ms * MS, weights=weights or Weights())
    assert isinstance(decision, Decision), decision
    assert recompute(state.index, state.loads, state.cold, decision) == decision
    return decision


def of(decision: Decision, worker: str) -> Candidate:
    """One candidate."""
    return next(one for one in decision.candidates if one.worker == worker)


def give(state: RouterState, worker: str, tokens: int, *, at_ms: int = 0, name: str = "busy") -> None:
    """A prompt of its own for a worker."""
    first = 1_000_000 + 10_000 * len(state.loads.workers[worker].requests)
    state.loads.decide(ask(state, tokens, at_ms=at_ms, name=name, first=first, pinned=worker))


def test_the_cost_is_what_it_says() -> None:
    """Queue, own prompt, what requests that run, are queued and are to come lose, and memory, each by its weight."""
    state = fleet(w1="both", w2="both")
    give(state, "w1", 3_200)
    tell(state, LoadReported(1, 0, 700, BLOCKS), writer="w2")
    decision = ask(state, weights=Weights(crowding=0.3, memory=50.0, arrivals=8.0, queued=0.4))
    own = took(1_600)
    w1, w2 = of(decision, "w1"), of(decision, "w2")
    assert w1.prefill_ms == pytest.approx(own) == w2.prefill_ms
    # The two are computed together: the start is paid once.
    assert w1.queue_ms == pytest.approx(MS_A_TOKEN * 3_200)
    assert w2.queue_ms == 0.0
    held = {"w1": 200 + 100, "w2": 700 + 100}
    for one, requests in ((w1, 1), (w2, 0)):
        later = 8.0 / 1000 * ((one.queue_ms + own) ** 2 - one.queue_ms**2) / 2
        penalties = (
            own * 0.3 * requests
            # Of the queued prompt, which is the only request: what 1,600 tokens add to its step.
            + 0.4 * requests * MS_A_TOKEN * 1_600
            + 50.0 * held[one.worker] / BLOCKS
            + later
        )
        assert one.score == pytest.approx(one.queue_ms + own + penalties)
    assert decision.worker == "w2"


def test_the_delay_of_running_requests_counts_more_where_workers_are_idle() -> None:
    """Up to ten times as much in a large fleet; as it is where two fifths are in use, and among few workers."""
    weights = cost_weights(Weights(crowding=0.1, crowding_spare=9.0))
    assert weights_at(weights, 0.0) == weights
    assert weights_at(weights, 1.0) == weights._replace(crowding=1.0)
    assert spare_capacity(0.4, 1_000) == spare_capacity(1.0, 1_000) == 0.0
    assert spare_capacity(0.0, 1_000) == pytest.approx(1.0, abs=0.02)
    assert spare_capacity(0.0, 16) == 2 * spare_capacity(0.2, 16) == 0.5
    assert spare_capacity(0.0, 15) == 0.0
    assert [
        utilization_of(tokens, blocks, 100) for tokens, blocks in ((0, 0), (0, 25), (1, 0), (0, 130))
    ] == [0.0, 0.25, 1.0, 1.0]


def test_workers_without_kv_blocks_are_decided_on() -> None:
    """A fold may hold some: a report of theirs is not checked as their joining is. None of their capacity is spare."""
    assert utilization_of(0, 0, 0) == 1.0
    roles: dict[str, Role] = {f"w{number:02}": "both" for number in range(20)}
    state = fleet(**roles)
    for worker in state.loads.workers.values():
        worker.total_blocks = 0
    state.loads.columns.touched.update(state.loads.workers)
    for estimate in (True, False):
        assert ask(state, weights=Weights(estimate=estimate)).spare == 0.0


def test_a_prefix_spreads_sooner_while_workers_are_idle() -> None:
    """Its holder runs requests that a prompt delays; the same worker is chosen once the others are in use, too."""
    roles: dict[str, Role] = {f"w{number:02}": "both" for number in range(40)}
    state = fleet(**roles)
    weights = Weights(crowding=0.1, crowding_spare=9.0, memory=0.0, arrivals=0.0)

    def cost_of_first() -> tuple[float, float]:
        decision = ask(state, weights=weights)
        found = reevaluate(state.index, state.loads, state.cold, decision)
        assert isinstance(found, Evaluation)
        return found.candidates[0].score, decision.spare

    alone, spare = cost_of_first()
    assert 0.7 < spare <= 40 / 56
    give(state, "w00", 1_600, name="running")
    report = LoadReported(1, 0, 0, BLOCKS, ("running",), ("running",))
    tell(state, report, writer="w00")
    delayed, spare = cost_of_first()
    assert delayed - alone == pytest.approx(0.1 * (1 + 9 * spare) * took(1_600))
    for number in range(1, 40):
        give(state, f"w{number:02}", 1_600, name=f"r{number}")
    busy, spare = cost_of_first()
    assert spare == 0.0
    assert busy - alone == pytest.approx(0.1 * took(1_600))


def test_only_prompts_that_are_not_computed_are_delayed() -> None:
    """Two are queued, then one is computed and decodes: the same worker costs less by what one of them would lose."""
    state = fleet(w1="both")
    weights = Weights(crowding=0.0, memory=0.0, arrivals=0.0, queued=1.0)
    for name in ("first", "second"):
        give(state, "w1", 1_600, name=name)
    two = of(ask(state, weights=weights), "w1")
    assert two.score == pytest.approx(two.queue_ms + two.prefill_ms + 2 * MS_A_TOKEN * 1_600)
    report = LoadReported(2, 0, 0, BLOCKS, ("first", "second"), ("first",))
    tell(state, report, writer="w1")
    one = of(ask(state, weights=weights), "w1")
    assert one.score == pytest.approx(one.queue_ms + one.prefill_ms + MS_A_TOKEN * 1_600)


def test_a_lost_decision_delays_nobody() -> None:
    """A prompt that its worker should have accepted long ago is not queued there."""
    state = fleet(w1="both")
    give(state, "w1", 1_600, at_ms=0)
    weights = Weights(crowding=0.0, memory=0.0, arrivals=0.0, queued=1.0)
    late_ms = 2 * UNACCEPTED_NS_MAX // MS
    found = of(ask(state, at_ms=late_ms, weights=weights), "w1")
    assert found.score == pytest.approx(found.prefill_ms)


def test_a_queue_gets_shorter_with_time_and_never_less_than_nothing() -> None:
    """What it computes now is done by so much; one report that is missing does not make a worker free for ever."""
    state = fleet(w1="both")
    give(state, "w1", 6_400, at_ms=1_000)
    whole = MS_A_TOKEN * 6_400
    seen = [of(ask(state, at_ms=at), "w1").queue_ms for at in (0, 1_000, 1_100, 1_300, 9_000)]
    assert seen == pytest.approx([whole, whole, whole - 100, whole - 300, 0.0])
    give(state, "w1", 6_400, at_ms=1_000, name="more")
    # The first one may be over; the second one is not computed before it is told so.
    assert of(ask(state, at_ms=9_000), "w1").queue_ms == pytest.approx(whole - START_MS)
    told = LoadReported(2, 0, 0, BLOCKS, ("busy", "more"), ("busy",))
    tell(state, told, writer="w1", wall_ns=9_000 * MS)
    assert of(ask(state, at_ms=9_050), "w1").queue_ms == pytest.approx(whole - 50)


def test_a_cached_prefix_is_worth_the_time_that_it_saves() -> None:
    """And a wait for it no more than that, with what computing it again would push out."""
    state = fleet(w1="both", w2="both")
    blocks = BlocksStored(0, packed(*range(1, 101)))
    tell(state, blocks, writer="w1")
    give(state, "w1", 800)
    decision = ask(state)
    assert decision.worker == "w1"
    assert of(decision, "w1").prefill_ms == pytest.approx(took(16), rel=0.2)
    give(state, "w1", 9_600, name="long")
    assert ask(state).worker == "w2"


def test_one_worker_that_was_not_measured_learns_from_those_of_its_engine() -> None:
    """Of another engine nothing is known: then all costs are in blocks."""
    state = fleet(w1="both", w2="both")
    for name, engine in (("w3", "sim"), ("w4", "other")):
        joined = WorkerJoined(name, 1, "m", engine, "both", 16, BLOCKS, 256)
        tell(state, joined, writer=name)
        times = [one.prefill_ms for one in ask(state).candidates]
        assert times == pytest.approx([took(1_600) if engine == "sim" else 0.0] * len(times))
    assert all(one.prefill_ms == 0.0 for one in ask(state, weights=Weights(estimate=False)).candidates)


def test_a_hand_over_costs_the_time_to_move_what_is_missing() -> None:
    """A prefill worker's cost has the move to the best decode worker in it; the decode leg has its own."""
    state = fleet(p="prefill", d1="decode", d2="decode")
    tell(state, BlocksStored(0, packed(*range(1, 51))), writer="d2")
    weights = Weights(local_tokens=0, apart=True, transfer=0.2, memory=0.0, arrivals=0.0)
    decision = ask(state, weights=weights)
    assert (decision.worker, decision.leg) == ("p", "prefill")
    block = MS_A_TOKEN * 16
    assert of(decision, "p").transfer_ms == pytest.approx(0.2 * 50 * block)
    assert of(decision, "p").score == pytest.approx(took(1_600) + 0.2 * 50 * block)
    behind = ask(state, name="q-0-2", weights=weights, leg="decode", pairs_with="sim")
    assert behind.worker == "d2"
    assert of(behind, "d1").transfer_ms == pytest.approx(0.2 * 100 * block)


def measured(state: RouterState, worker: str, slowness: float, lengths: tuple[int, ...], count: int) -> None:
    """A worker reports times of prompts, `slowness` times as long as those of the others."""
    for number in range(count):
        tokens = lengths[number % len(lengths)]
        sample = (tokens, round(1_000 * slowness * took(tokens)))
        report = LoadReported(0, 0, 0, BLOCKS, prefills=(sample,))
        tell(state, report, writer=worker)


def test_a_worker_that_computed_only_short_prompts_is_no_faster_with_long_ones() -> None:
    """Its engine's times are known from other workers; its own measurements of other lengths do not replace them."""
    state = fleet(w1="both", w2="both")
    joined = WorkerJoined("w3", 1, "m", "sim", "both", 16, BLOCKS, 256, pairs_with="sim", instance="w3")
    tell(state, joined, writer="w3")
    # Disturbed so that a line through them falls.
    measured(state, "w3", 1.3, (30,), 10)
    measured(state, "w3", 0.9, (70,), 10)
    decision = ask(state, 12_800)
    assert of(decision, "w3").prefill_ms == pytest.approx(took(12_800), rel=0.3)


@pytest.mark.parametrize("slowness", [2.0, 0.5])
def test_a_worker_of_another_speed_is_known_after_some_dozen_prompts(slowness: float) -> None:
    """Its times are estimated by its own pace, and those of the others stay what they are."""
    state = fleet(w1="both", w2="both")
    for _ in range(15):
        measured(state, "w1", 1.0, (400, 1_600, 6_400), 12)
        measured(state, "w2", slowness, (400, 1_600, 6_400), 12)
    decision = ask(state, 3_200)
    assert of(decision, "w1").prefill_ms == pytest.approx(took(3_200), rel=0.1)
    assert of(decision, "w2").prefill_ms == pytest.approx(slowness * took(3_200), rel=0.1)
    assert decision.worker == ("w1" if slowness > 1 else "w2")


def test_a_new_worker_is_estimated_like_the_others_when_all_became_slower() -> None:
    """Part of the change is in their paces: a worker that joins now must not look faster than they are."""
    state = fleet(w1="both", w2="both")
    for _ in range(20):
        measured(state, "w1", 2.0, (400, 1_600, 6_400), 12)
        measured(state, "w2", 2.0, (400, 1_600, 6_400), 12)
    joined = WorkerJoined("w3", 1, "m", "sim", "both", 16, BLOCKS, 256, pairs_with="sim", instance="w3")
    tell(state, joined, writer="w3")
    decision = ask(state, 3_200)
    assert of(decision, "w3").prefill_ms == pytest.approx(2 * took(3_200), rel=0.1)
