"""A router that applies its decisions at once and a replay that reads them from the log agree in the end.

Decisions are made at one place and stored behind whatever the engines have written meanwhile: reports about the
very same requests, workers that come again or go. `Live` is the router, `Replay` the reader.
"""

from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.router.load import Loads
from headwater.router.state import apply_to_loads
from headwater.router.worker import UNACCEPTED_NS_MAX
from headwater.schemas.events import Event, LoadReported, WorkerDraining, WorkerLeft
from headwater.schemas.routing import Decision
from tests.support.data.examples import joined, record
from tests.support.worlds.clock import WALL_NS
from tests.unit.router.test_load import decision

WORKERS = ("w1", "w2")
STAGES = ("accepted", "prefilled", "finished")
STEPS_NS = st.sampled_from([0, 200_000_000, UNACCEPTED_NS_MAX])
"""Greatest pause between two events: none, some, or as long as an unaccepted request counts."""


class Fleet:
    """One order of events in the log, folded by a router that decides and by a replay."""

    rejoins = True
    """May a worker that left join again under the same epoch?"""

    def __init__(self, draw: Callable[[int], int], step_ns_max: int) -> None:
        self.draw = draw
        self.step_ns_max = step_ns_max
        self.live, self.replay = Loads(), Loads()
        self.under_way: list[Decision] = []
        self.stages: dict[tuple[str, int, str], int] = {}
        self.wall_ns = WALL_NS
        self.epochs = 0
        self.requests = 0
        self.position = 0
        self.left: dict[str, int] = {}

    def log(self, event: Event, writer: str = "w1", epoch: int = 1) -> None:
        """Both read an event that is none of this router's decisions."""
        self.position += 1
        message = record(self.position, event, writer=writer, epoch=epoch, wall_ns=self.wall_ns)
        for loads in (self.live, self.replay):
            apply_to_loads(loads, message, event)

    def decide(self, worker: str) -> None:
        """The router decides, and applies it at once; the log has it later."""
        known = self.live.workers.get(worker)
        if known is None:
            return
        self.requests += 1
        made = decision(
            f"r{self.requests}",
            worker=worker,
            epoch=known.epoch,
            tokens=1 + self.draw(99),
            cached=self.draw(3),
            at_s=(self.wall_ns - WALL_NS) / 1e9,
            position=self.position,
        )
        self.live.decide(made)
        self.under_way.append(made)
        self.stages[worker, known.epoch, made.request] = 0

    def store(self) -> None:
        """The log has the oldest decision under way: the replay reads it, the router skips it."""
        if self.under_way:
            made = self.under_way.pop(0)
            self.position += 1
            message = record(self.position, made, writer="r1", wall_ns=self.wall_ns)
            apply_to_loads(self.replay, message, made)

    def report(self, worker: str) -> None:
        """The engine tells the progress of some of its requests; each stage once, in order."""
        known = self.live.workers.get(worker)
        if known is None:
            return
        told: dict[str, list[str]] = {stage: [] for stage in STAGES}
        for (name, epoch, request), stage in self.stages.items():
            if (name, epoch) != (worker, known.epoch):
                continue
            reached = min(len(STAGES), stage + max(0, self.draw(5) - 2))
            for passed in STAGES[stage:reached]:
                told[passed].append(request)
            self.stages[name, epoch, request] = reached
        accepted, prefilled, finished = (tuple(told[stage]) for stage in STAGES)
        event = LoadReported(self.draw(9), 0, 0, 1000, accepted, prefilled, finished)
        self.log(event, worker, known.epoch)

    def turn(self) -> None:
        """Something happens."""
        self.wall_ns += self.draw(self.step_ns_max)
        worker = WORKERS[self.draw(1)]
        known = self.live.workers.get(worker)
        kind = self.draw(19)
        if known is None and self.rejoins and worker in self.left and kind < 10:
            # Its lease had lapsed, and it took it again: the same life.
            epoch = self.left.pop(worker)
            self.log(joined(worker, epoch), worker, epoch)
        elif known is None or kind == 0:
            self.epochs += 1
            self.log(joined(worker, self.epochs), worker, self.epochs)
        elif kind == 1:
            self.left[worker] = known.epoch
            self.log(WorkerLeft(worker, known.epoch, "lease lapsed"))
        elif kind == 2:
            self.log(WorkerDraining(worker, known.epoch))
        elif kind < 8:
            self.decide(worker)
        elif kind < 13:
            self.store()
        else:
            self.report(worker)

    def settle(self) -> None:
        """The log takes the rest."""
        while self.under_way:
            self.store()


@given(st.randoms(use_true_random=False), st.integers(1, 120), STEPS_NS)
def test_deciding_at_once_and_reading_it_later_come_to_the_same(
    draw: object, turns: int, step_ns_max: int
) -> None:
    """For any interleaving of decisions, their storage, reports, joins, drains and leaves."""
    fleet = Fleet(lambda most: draw.randint(0, most), step_ns_max)  # type: ignore[attr-defined]
    for _ in range(turns):
        fleet.turn()
    fleet.settle()
    assert fleet.live == fleet.replay
    assert msgspec.json.encode(fleet.live, order="sorted") == msgspec.json.encode(
        fleet.replay, order="sorted"
    )


@given(st.randoms(use_true_random=False), st.integers(1, 60), STEPS_NS)
def test_they_agree_while_decisions_are_still_under_way(draw: object, turns: int, step_ns_max: int) -> None:
    """The replay with the missing decisions added is the router's state: that is what a check recomputes on."""
    fleet = Fleet(lambda most: draw.randint(0, most), step_ns_max)  # type: ignore[attr-defined]
    for _ in range(turns):
        fleet.turn()
        caught_up = msgspec.convert(msgspec.to_builtins(fleet.replay), Loads)
        for made in fleet.under_way:
            caught_up.decide(made)
        assert caught_up == fleet.live


@pytest.mark.parametrize("stages", [(), ("accepted",), ("accepted", "prefilled"), ("accepted", "finished")])
@pytest.mark.parametrize("stored", ["before", "between", "behind"])
def test_time_makes_no_difference(stages: tuple[str, ...], stored: str) -> None:
    """Accepted in time, late or never, with the decision stored before, between or behind the reports."""
    fleet = Fleet(lambda _: 0, 0)
    fleet.log(joined("w1", 1))
    fleet.decide("w1")
    if stored == "before":
        fleet.store()
    fleet.wall_ns += UNACCEPTED_NS_MAX + 1
    fleet.log(LoadReported(0, 0, 0, 1000))
    if stored == "between":
        fleet.store()
    for stage in stages:
        accepted, prefilled, finished = (("r1",) if stage == one else () for one in STAGES)
        fleet.log(LoadReported(1, 0, 0, 1000, accepted, prefilled, finished))
    fleet.settle()
    assert fleet.live == fleet.replay
    counted = fleet.live.workers["w1"].promised(fleet.wall_ns)
    assert counted == ((0, 0) if stages in ((), ("accepted", "finished")) else (counted[0], 1))
    assert fleet.live.early == {}


@pytest.mark.parametrize("lost", [10, 2_000])
def test_many_lost_requests_do_not_part_them(lost: int) -> None:
    """However many were never accepted: what is given up is the same for both, at once or read later."""
    fleet = Fleet(lambda _: 0, 0)
    fleet.log(joined("w1", 1))
    for _ in range(lost):
        fleet.decide("w1")
    for _ in range(lost):
        fleet.store()
    for _ in range(20):
        fleet.wall_ns += UNACCEPTED_NS_MAX + 1
        fleet.decide("w1")
        last = f"r{fleet.requests}"
        fleet.log(LoadReported(1, 0, 0, 1000, (last,)))
        fleet.settle()
        assert fleet.live == fleet.replay
