"""Who is busy, and whether a query may have a worker now or should wait."""

from typing import Any

import msgspec
import pytest

from headwater.router.admission import (
    UNACCEPTED_NS_MAX,
    AdmissionQueue,
    BlockedKey,
    LoadSnapshot,
    Now,
    Saturated,
    find_placement,
    first_token_s,
    is_saturated,
    saturated_workers,
    uncached_tokens,
)
from headwater.router.decide import recompute
from headwater.router.queue import BusyLimits, QueueLimits, QueueSettings
from headwater.router.state import RouterState
from headwater.schemas.events import BlocksStored, LoadReported, Role, WorkerChanged, WorkerDraining
from headwater.schemas.routing import Decision, RouteQuery, RouteRefused
from tests.support.data.examples import joined, packed, record
from tests.support.data.queries import changed, route_query
from tests.support.data.story import BLOCK_SIZE, reply_on
from tests.support.worlds.clock import WALL_NS


class Told:
    """A fold that is told things, and queries on it."""

    def __init__(self, **roles: Role) -> None:
        self.state = RouterState()
        for name, role in roles.items():
            event = msgspec.structs.replace(
                joined(name, 1, block_size=BLOCK_SIZE), role=role, pairs_with="x", total_blocks=100
            )
            self.log(event, name)

    def log(self, event: Any, writer: str = "r1") -> None:
        """One message."""
        told = record(self.state.position + 1, event, writer=writer, epoch=1, wall_ns=WALL_NS)
        self.state.apply(told)

    def choose(self, query: RouteQuery) -> Decision | RouteRefused:
        """As a router does."""
        return reply_on(self.state, query, wall_ns=WALL_NS)

    def give(self, worker: str, tokens: int) -> None:
        """A request of so many tokens to one worker."""
        name = f"given-{self.state.position}"
        made = self.choose(route_query(name, tokens, 1, pinned=worker))
        assert isinstance(made, Decision)
        self.log(made)

    def admit(self, query: RouteQuery, limits: BusyLimits) -> Decision | RouteRefused | Saturated:
        """What the queue asks."""
        loads = self.state.loads
        return find_placement(self.choose, loads, query, saturated_workers(loads, WALL_NS, limits))


ASKED = route_query("a", 64, 8, packed(1, 2, 3, 4), waits=True)
LIMITS = BusyLimits(prefill_tokens=1_000)


@pytest.mark.parametrize(
    ("limits", "tokens", "is_busy"),
    [
        (BusyLimits(0), 1_600, False),
        (BusyLimits(prefill_tokens=1_599), 1_600, True),
        (BusyLimits(prefill_tokens=1_600), 1_600, False),
        (BusyLimits(0, kv=0.9), 1_600, True),
        (BusyLimits(0, kv=1.0), 1_600, False),
        (BusyLimits(0, waiting=3), 0, True),
        (BusyLimits(0, waiting=4), 0, False),
    ],
)
def test_a_worker_above_any_limit_is_busy(limits: BusyLimits, tokens: int, is_busy: bool) -> None:
    """Exactly at it is not above it; 0 is no limit."""
    fleet = Told(w1="both")
    if tokens:
        fleet.give("w1", tokens)
    fleet.log(LoadReported(2, 4, 0, 100), "w1")
    assert is_saturated(fleet.state.loads.workers["w1"], WALL_NS, limits) == is_busy
    assert saturated_workers(fleet.state.loads, WALL_NS, limits) == (("w1.1",) if is_busy else ())


def test_a_decision_that_nobody_accepts_keeps_nobody_waiting_for_long() -> None:
    """Its answer was lost: it stops counting here long before it is voided."""
    fleet = Told(w1="both")
    fleet.give("w1", 1_600)
    worker = fleet.state.loads.workers["w1"]
    assert is_saturated(worker, WALL_NS + UNACCEPTED_NS_MAX, LIMITS)
    assert not is_saturated(worker, WALL_NS + UNACCEPTED_NS_MAX + 1, LIMITS)
    fleet.log(LoadReported(1, 0, 0, 100, accepted=tuple(worker.requests)), "w1")
    assert is_saturated(worker, WALL_NS + 100 * UNACCEPTED_NS_MAX, LIMITS), "the worker has it"


def test_nobody_is_busy_without_anything_to_do() -> None:
    """Whatever the limits: so whatever waits is served in the end."""
    fleet = Told(w1="both")
    assert not is_saturated(fleet.state.loads.workers["w1"], WALL_NS, BusyLimits(1, 1e-9, 1))


def test_busy_workers_are_left_out_while_another_can_take_it() -> None:
    """Even the one that has the prompt cached; the decision can be made again from its record."""
    fleet = Told(w1="both", w2="both")
    fleet.log(BlocksStored(0, packed(1, 2, 3, 4), 0), "w1")
    assert fleet.admit(ASKED, LIMITS).worker == "w1"  # type: ignore[union-attr]
    fleet.give("w1", 1_600)
    made = fleet.admit(ASKED, LIMITS)
    assert isinstance(made, Decision)
    assert (made.worker, made.constraints.exclude) == ("w2", ("w1.1",))
    assert recompute(fleet.state.index, fleet.state.loads, fleet.state.cold, made) == made


def test_with_all_busy_it_waits() -> None:
    """It is told what would be decided, from which the wait's place and deadline follow."""
    fleet = Told(w1="both", w2="both")
    fleet.log(BlocksStored(0, packed(1, 2, 3, 4), 0), "w1")
    for worker in ("w1", "w2"):
        fleet.give(worker, 1_600)
    verdict = fleet.admit(ASKED, LIMITS)
    assert isinstance(verdict, Saturated)
    assert uncached_tokens(verdict.fallback, fleet.state.loads) == 16, (
        "an engine computes the last block itself"
    )
    assert (
        first_token_s(verdict.fallback, queued=True) >= first_token_s(verdict.fallback, queued=False) >= 0.0
    )
    assert LoadSnapshot.of(fleet.state.loads).all_in({"w1.1", "w2.1"})
    assert isinstance(fleet.admit(ASKED, BusyLimits(0)), Decision)


def test_only_those_who_could_take_it_count() -> None:
    """A free worker that it may not have is no reason not to wait; one that drains takes nothing anyway."""
    fleet = Told(w1="both", w2="both", w3="both")
    fleet.give("w1", 1_600)
    pinned = changed(ASKED, pinned="w1")
    assert isinstance(fleet.admit(pinned, LIMITS), Saturated)
    without = changed(ASKED, exclude=("w2.1", "w3.1"))
    assert isinstance(fleet.admit(without, LIMITS), Saturated)
    for worker in ("w2", "w3"):
        fleet.log(WorkerDraining(worker, 1), worker)
    assert LoadSnapshot.of(fleet.state.loads).all_in({"w1.1"})
    assert isinstance(fleet.admit(ASKED, LIMITS), Saturated)


def test_where_nobody_could_ever_take_it_it_is_refused() -> None:
    """Waiting would not help."""
    fleet = Told(w1="both")
    fleet.give("w1", 1_600)
    unable = changed(ASKED, tier="gold")
    assert isinstance(fleet.admit(unable, LIMITS), RouteRefused)
    fleet.log(WorkerDraining("w1", 1), "w1")
    assert not LoadSnapshot.of(fleet.state.loads).all_in({"w1.1"}), "nobody takes requests at all"
    assert isinstance(fleet.admit(ASKED, LIMITS), RouteRefused)


def test_a_free_prefill_worker_does_not_decode_because_those_who_do_are_busy() -> None:
    """The prompt's KV would only wait there; with nobody to decode it does both, as ever."""
    fleet = Told(p1="prefill", d1="decode")
    fleet.give("d1", 1_600)
    long = route_query("a", 1_600, 8, b"", waits=True)
    assert isinstance(fleet.admit(long, LIMITS), Saturated)
    fleet.log(WorkerDraining("d1", 1), "d1")
    made = fleet.admit(long, LIMITS)
    assert isinstance(made, Decision)
    assert made.worker == "p1"
    fleet.give("p1", 1_600)
    assert isinstance(fleet.admit(long, LIMITS), Saturated)


def test_what_could_not_be_placed_is_not_tried_again_until_something_changed() -> None:
    """One of those who could take it is no longer busy, somebody new could, or somebody stands otherwise."""
    told = Told(w1="both", w2="both")
    told.give("w1", 1_600)
    pinned = changed(ASKED, pinned="w1")
    verdict = told.admit(pinned, LIMITS)
    assert isinstance(verdict, Saturated)
    fleet = LoadSnapshot.of(told.state.loads)
    stuck = BlockedKey.of(fleet, verdict)
    assert stuck.workers == {"w1.1"}
    assert stuck.still_blocks(fleet, {"w1.1"})
    assert not stuck.still_blocks(fleet, {"w2.1"})
    told.log(WorkerChanged("w2", 1, "ready", "both", ("adapter",)), "w2")
    assert not stuck.still_blocks(LoadSnapshot.of(told.state.loads), {"w1.1"})


# The admission queue as a whole, on a fold of events: deadlines of what it serves.


PREFILL_S = 2.0


class Router(Told):
    """Decides on a fold; each prefill takes `PREFILL_S`."""

    def choose(self, query: RouteQuery) -> Decision | RouteRefused:
        """See `admission.Router`."""
        made = super().choose(query)
        if isinstance(made, RouteRefused):
            return made
        slow = tuple(msgspec.structs.replace(one, prefill_ms=PREFILL_S * 1_000) for one in made.candidates)
        return msgspec.structs.replace(made, candidates=slow)

    def commit(self, decision: Decision) -> Decision:
        """See `admission.Router`."""
        self.log(decision)
        return decision


def query(deadline_ms: int) -> RouteQuery:
    """One that may wait."""
    return route_query("a", 64, 8, packed(1, 2, 3, 4), waits=True, deadline_ms=deadline_ms)


def test_time_in_the_queue_counts_against_the_deadline() -> None:
    """Of 5 s, 2 of them for the prefill: after 2 s it is served, after 3.5 s it is refused although a worker is free."""
    for waited_s, served in ((2.0, True), (3.5, False)):
        router = Router(w1="both")
        router.give("w1", 1_600)
        start = Now(10.0, WALL_NS)
        queue = AdmissionQueue(QueueSettings(BusyLimits(prefill_tokens=1_000), QueueLimits()), router, start)
        assert queue.offer(query(deadline_ms=5_000), start).reply is None
        requests = tuple(router.state.loads.workers["w1"].requests)
        router.log(LoadReported(0, 0, 0, 100, accepted=requests, prefilled=requests), "w1")
        now = Now(10.0 + waited_s, WALL_NS)
        queue.note_fold_advanced(now)
        [released], _ = queue.advance(now, 8)
        assert isinstance(released.reply, Decision) == served
        assert released.reason == ("" if served else "deadline")
