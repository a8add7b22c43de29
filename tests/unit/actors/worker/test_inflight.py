"""The requests in flight: counted over all incarnations, reported by the one that accepted them."""

import asyncio

import msgspec
import pytest

from headwater.actors.worker.handoffs import Handoffs
from headwater.actors.worker.inflight import Inflight, Progress
from headwater.engines.engine import EngineLoad, Pinned, Step
from headwater.schemas.events import BlocksCleared, KvGap
from headwater.schemas.hashing import pack_tokens
from headwater.schemas.inference import GenerateRequest, Sampling
from tests.support.worlds.clock import ManualClock, settle


class Engine:
    """An idle engine."""

    def load(self) -> EngineLoad:
        """See `Engine.load`."""
        return EngineLoad(0, 0, 0, 16)

    def is_waiting(self, request: str) -> bool:
        """None waits."""
        return False


def made() -> tuple[Inflight, Handoffs]:
    """Nothing is in flight."""
    clock = ManualClock()
    handoffs = Handoffs("w1", clock, "returned")
    handoffs.begin_incarnation(1)
    return Inflight(clock, Engine(), handoffs), handoffs


def request(name: str) -> GenerateRequest:
    """A request of eight tokens."""
    return GenerateRequest(name, "e1", 1, pack_tokens([1] * 8), Sampling(4))


def test_each_change_is_reported_once() -> None:
    inflight, _ = made()
    inflight.accept(request("a"), fetches=False)
    inflight.accept_embedding("b")
    assert inflight.changed.is_set()
    assert (inflight.names, inflight.reported, len(inflight)) == (["a", "b"], ["a", "b"], 2)
    inflight.record_first_step(request("a"), Step((1,), cached_tokens=4))
    assert inflight.take_progress() == Progress(("a", "b"), ("a",), (), (4,))
    assert inflight.take_progress() == Progress()
    inflight.finish_embedding("b")
    inflight.finish(request("a"), Step((), "stop"), 3)
    assert inflight.take_progress().finished == ("b", "a")
    assert (len(inflight), inflight.ended) == (0, 2)


def test_names_are_known_for_a_while_after_their_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a copy of a message is noticed; not for ever, and not before they are accepted."""
    monkeypatch.setattr("headwater.actors.worker.inflight.ENDED_MAX", 2)
    inflight, _ = made()
    assert not inflight.knows("a")
    for name in ("a", "b", "c"):
        inflight.accept_embedding(name)
        assert inflight.knows(name)
        inflight.finish_embedding(name)
    assert [inflight.knows(name) for name in ("a", "b", "c")] == [False, True, True]


def test_answers_that_ended_by_themselves_are_reported_with_their_limit() -> None:
    """Each once, with its prompt and tenant; neither a cancelled one nor a prefill leg tells how long answers are."""
    inflight, _ = made()
    for name in ("stopped", "full", "cancelled", "leg"):
        inflight.accept(request(name), fetches=False)
    inflight.finish(msgspec.structs.replace(request("stopped"), tenant=7), Step((), "stop"), 2)
    inflight.finish(request("full"), Step((), "length"), 4)
    inflight.finish(request("cancelled"), Step((), "abort"), 3)
    inflight.finish(msgspec.structs.replace(request("leg"), leg="prefill"), Step((), "length"), 0)
    progress = inflight.take_progress()
    assert progress.outputs == ((4, 2), (4, 4))
    assert progress.answered == ((8, 7), (8, 0))
    assert inflight.take_progress() == Progress()


def test_a_request_of_an_earlier_incarnation_counts_and_is_not_reported() -> None:
    """For the log it ended with its incarnation; the engine still has it."""
    inflight, _ = made()
    inflight.accept(request("old"), fetches=False)
    inflight.accept_embedding("pooled")
    inflight.begin_incarnation()
    inflight.accept(request("new"), fetches=True)
    assert (len(inflight), inflight.reported) == (3, ["new"])
    assert inflight.is_current("new")
    assert not inflight.is_current("old")
    inflight.finish(request("old"), Step((), "stop"), 3)
    inflight.finish_embedding("pooled")
    assert inflight.take_progress() == Progress(("new",))
    assert (inflight.names, inflight.ended) == (["new"], 2)


async def test_drained_waits_for_requests_and_hand_offs() -> None:
    inflight, handoffs = made()
    await inflight.drained()
    inflight.accept(request("a"), fetches=False)
    handoffs.offer(request("p"), Pinned(b"kv", 30.0), "h1")
    drained = asyncio.ensure_future(inflight.drained())
    also = asyncio.ensure_future(inflight.drained())
    inflight.finish(request("a"), Step((), "stop"), 3)
    await settle()
    assert not drained.done(), "the hand-off is kept"
    handoffs.abandon()
    inflight.note_closed_handoffs()
    await asyncio.gather(drained, also)


async def test_a_drain_ends_by_time_or_by_a_word() -> None:
    inflight, _ = made()
    inflight.accept(request("a"), fetches=False)
    abandoned = asyncio.Event()
    assert not await inflight.drained_within(0.01, abandoned)
    waiting = asyncio.ensure_future(inflight.drained_within(None, abandoned))
    await settle()
    abandoned.set()
    assert not await waiting
    inflight.finish(request("a"), Step((), "stop"), 3)
    assert await inflight.drained_within(1.0, asyncio.Event())


def test_kv_events_are_counted_with_their_gaps_and_their_time() -> None:
    clock = ManualClock()
    inflight = Inflight(clock, Engine(), Handoffs("w1", clock, "returned"))
    assert inflight.kv_stats() == {
        "kv_events_total": 0,
        "kv_gaps_total": 0,
        "kv_dropped_total": 0,
        "kv_event_at_s": 0.0,
    }
    inflight.note_kv_events([BlocksCleared(), KvGap(3)])
    stats = inflight.kv_stats()
    assert (stats["kv_events_total"], stats["kv_gaps_total"]) == (2, 1)
    assert stats["kv_event_at_s"] == clock.wall_ns() / 1e9 > 0
