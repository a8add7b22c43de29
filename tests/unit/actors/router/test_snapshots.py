"""When a router takes snapshots, and that taking one disturbs neither the fold nor the answers."""

import asyncio
import threading
from contextlib import nullcontext
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from headwater.actors.router.follower import SnapshotKeeper
from headwater.actors.runtime.ports import MemoryBus, Ports, SnapshotReader
from headwater.events.memory import MemoryBlobs, MemoryLog, MemoryTable
from headwater.events.ports import Entry, LogUnavailable
from headwater.events.snapshot_store import Policy, Snapshot, SnapshotStore, Tail, due
from headwater.router.state import RouterState
from headwater.schemas.encoding import seal
from headwater.schemas.events import TrafficSplit, WorkerJoined
from headwater.schemas.subjects import pool_subject, snapshot_name
from tests.support.data.examples import batch
from tests.support.data.story import fold, story
from tests.support.ports.snapshots import StoppingBlobs
from tests.support.worlds.clock import ManualClock, running, settle
from tests.support.worlds.memory import memory_world
from tests.unit.events.test_store import everything

POLICY = Policy(fold_s=1.0, records=100, age_s=30.0, share=0.1)


@pytest.mark.parametrize(
    ("tail", "expected"),
    [
        (Tail(0, 9.0, 999.0), False),
        (Tail(1, 0.0, 29.9), False),
        (Tail(1, 0.0, 30.0), True),
        (Tail(1, 0.9, 5.0), False),
        (Tail(1, 1.0, 5.0), True),
        (Tail(99, 0.0, 5.0), False),
        (Tail(100, 0.0, 5.0), True),
        (Tail(1000, 9.0, 39.0, 4.0), False),
        (Tail(1000, 9.0, 40.0, 4.0), True),
        (Tail(1, 0.0, 40.0, 4.0), True),
    ],
)
def test_a_snapshot_is_due_by_fold_time_records_or_age_and_never_too_often(
    tail: Tail, expected: bool
) -> None:
    """Nothing new: never. One that took 4 s: not before 40 s are over."""
    assert due(POLICY, tail) is expected


@given(st.integers(0, 300), st.floats(0, 9), st.floats(0, 99), st.floats(0, 9))
def test_more_of_anything_but_cost_never_makes_it_less_due(
    records: int, fold_s: float, age_s: float, cost_s: float
) -> None:
    """A threshold that is passed stays passed."""
    if due(POLICY, Tail(records, fold_s, age_s, cost_s)):
        assert due(POLICY, Tail(records + 1, fold_s + 1, age_s + 1, cost_s))


async def test_a_snapshot_of_an_earlier_release_is_completed_from_the_log() -> None:
    """What that release did not read of the fleet's events: revisions, and the traffic split."""
    ports = memory_world(ManualClock())
    log = await ports.pool_log("p")
    events = (
        WorkerJoined("w1", 1, "m", "sim", "both", 16, 1_000, 256, revision="r1"),
        TrafficSplit("revision", {"r1": 1.0}, 0),
    )
    subject = pool_subject("ns", "p", "fleet", "w1")
    await log.append(Entry(subject, seal(batch(*events))))
    whole = RouterState()
    async for piece in log.read(0, follow=False):
        for record in piece.records:
            whole.apply(record)
    earlier = whole.snapshot()
    del earlier.facts["version"], earlier.facts["loads"]["splits"]
    del earlier.facts["loads"]["workers"]["w1"]["revision"]
    await SnapshotStore(ports.blobs, "p").save(earlier, log.bounds)
    with capture_logs() as logs:
        restored = await SnapshotReader(ports, "p").restore(log)
    assert restored is not None
    assert restored.digest() == whole.digest()
    assert [one["made_by"] for one in logs if one["event"] == "snapshot_completed"] == [1]


class Case:
    """A keeper over memory ports with a fold of 60 messages, all of them in the log."""

    def __init__(self, blobs: Any = None) -> None:
        self.clock = ManualClock()
        self.blobs = blobs or MemoryBlobs()
        self.log = MemoryLog(self.clock)
        self.records = story(3, 80)
        self.state = fold(self.records[:60])
        self.is_settled = True
        self.is_sound = True

        async def pool_log(_: str) -> MemoryLog:
            return self.log

        self.world = Ports(
            "ns",
            MemoryBus(),
            MemoryTable(self.clock),
            MemoryTable(self.clock),
            MemoryTable(self.clock),
            MemoryTable(self.clock),
            self.blobs,
            MemoryTable(self.clock),
            MemoryTable(self.clock),
            MemoryLog(self.clock),
            pool_log,
            self.clock,
            iter(f"id{number}" for number in range(999)).__next__,
        )
        self.keeper = self.another()

    def another(self) -> SnapshotKeeper:
        """A keeper as the next life of the router has it."""
        return SnapshotKeeper(self.world, "p", self, policy=POLICY)

    def pause(self) -> nullcontext[None]:
        """Nothing decides here."""
        return nullcontext()

    async def fold_on(self, until: int, seconds: float = 0.0) -> None:
        """Fold the story up to a position."""
        async with self.keeper.folding():
            fold(self.records[self.state.position : until], self.state)
            self.clock.now_s += seconds

    async def kept(self) -> list[int]:
        """Positions of the snapshots there are."""
        return await SnapshotStore(self.blobs, "p").positions()


@pytest.fixture
async def case() -> Case:
    """A log of 80 messages, 60 of them folded."""
    made = Case()
    for number, record in enumerate(made.records):
        await made.log.append(Entry(f"s{number}", seal(record.batch)))
    return made


async def test_what_was_saved_is_restored(case: Case) -> None:
    """State, digest and when it was made."""
    await case.keeper.save(case.log)
    restored = await case.another().restore(case.log)
    assert restored is not None
    assert restored.digest() == case.state.digest()
    found = await SnapshotStore(case.blobs, "p").newest(everything)
    assert found is not None
    assert (found.digest, found.made_ns) == (case.state.digest(), case.clock.wall_ns())


async def test_nothing_new_and_nothing_settled_is_not_saved(case: Case) -> None:
    """A state ahead of its log may not be kept; one that is kept already need not be."""
    case.is_settled = False
    await case.keeper.save(case.log)
    assert await case.kept() == []
    case.is_settled = True
    await case.keeper.save(case.log)
    case.state.loads.workers.clear()
    await case.keeper.save(case.log)
    found = await SnapshotStore(case.blobs, "p").newest(everything)
    assert found is not None
    assert found.facts["loads"]["workers"]


async def test_a_moment_without_decisions_under_way_is_waited_for(case: Case) -> None:
    """On a busy pool there is hardly one whenever a second is over."""
    case.is_settled = False
    async with running(case.keeper.run(case.log)):
        await case.clock.advance(30.5)
        assert await case.kept() == []
        case.is_settled = True
        await case.clock.advance(0.05)
        case.is_settled = False
        assert await saved_after(case, 1) == [60]


async def saved_after(case: Case, seconds: float) -> list[int]:
    """Positions kept after some seconds of the policy's run; threads get the time they need."""
    for _ in range(round(seconds)):
        # To the keeper's next turn and no further: time that passes while a thread works would count as its cost.
        await case.clock.advance(1.0 - case.clock.now_s % 1.0)
        while case.keeper._saving.locked():
            await asyncio.sleep(0.001)
    return await case.kept()


async def test_the_policy_is_followed(case: Case) -> None:
    """By age, then by the time that folding took, then not at all without news."""
    async with running(case.keeper.run(case.log)):
        await settle()
        assert await saved_after(case, 29) == []
        assert await saved_after(case, 1) == [60]
        assert await saved_after(case, 90) == [60]
        await case.fold_on(61, seconds=0.6)
        assert await saved_after(case, 2) == [60, 61]
        await case.fold_on(62, seconds=0.6)
        assert await saved_after(case, 2) == [60, 61]
        await case.fold_on(63, seconds=0.6)
        # The oldest one is a rung of the ladder.
        assert await saved_after(case, 1) == [60, 61, 63]


class SlowState(RouterState):
    """Taking its snapshot lasts until it is allowed to end."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go_on = threading.Event(), threading.Event()

    def snapshot(self, loads: Any = None, made_ns: int = 0) -> Snapshot:
        """See `RouterState.snapshot`."""
        self.begun.set()
        assert self.go_on.wait(30)
        return super().snapshot(loads, made_ns)


async def begun(state: SlowState) -> None:
    """Return when the thread reads the table."""
    while not state.begun.is_set():
        await asyncio.sleep(0.001)


async def test_decisions_go_on_while_the_table_is_read_and_the_fold_waits(case: Case) -> None:
    """What is kept is the moment of the cut, whatever was decided since."""
    case.state = state = fold(case.records[:60], SlowState())
    assert isinstance(state, SlowState)
    digest = state.digest()
    saving = asyncio.create_task(case.keeper.save(case.log))
    await begun(state)
    state.loads.workers.clear()
    folding = asyncio.create_task(case.fold_on(61))
    await settle()
    assert not folding.done()
    state.go_on.set()
    await asyncio.gather(saving, folding)
    found = await SnapshotStore(case.blobs, "p").newest(everything)
    assert found is not None
    assert RouterState.restore(found).digest() == found.digest == digest
    assert (found.position, state.position) == (60, 61)


async def test_a_cancelled_snapshot_lets_the_fold_go_on_only_when_nobody_reads(case: Case) -> None:
    """The thread can not be cancelled: until it ends the table must not change."""
    case.state = state = fold(case.records[:60], SlowState())
    assert isinstance(state, SlowState)
    saving = asyncio.create_task(case.keeper.save(case.log))
    await begun(state)
    saving.cancel()
    folding = asyncio.create_task(case.fold_on(61))
    await settle()
    assert not folding.done()
    state.go_on.set()
    await asyncio.gather(saving, folding, return_exceptions=True)
    assert saving.cancelled()
    assert state.position == 61
    assert await case.kept() == []


async def test_a_store_that_fails_stops_nobody_and_is_tried_again() -> None:
    """The router goes on without a snapshot, and the next turn saves it."""
    case = Case(StoppingBlobs(MemoryBlobs(), 1, LogUnavailable("gone")))
    for number, record in enumerate(case.records):
        await case.log.append(Entry(f"s{number}", seal(record.batch)))
    await case.keeper.save(case.log)
    assert await case.kept() == []
    await case.keeper.save(case.log)
    assert await case.kept() == [60]


async def test_a_wrong_count_of_rows_is_told_and_stops_nobody(case: Case) -> None:
    """A fault in the index costs the snapshot, not the router."""
    case.state.index.rows += 1
    await case.keeper.save(case.log)
    assert await case.kept() == []


async def test_only_snapshots_that_the_log_continues_are_restored(case: Case) -> None:
    """Not one whose tail is purged, nor one beyond the end of the log; and damage means folding from the start."""
    await case.keeper.save(case.log)
    case.log.purge(61)
    assert await case.another().restore(case.log) is not None
    case.log.purge(62)
    assert await case.another().restore(case.log) is None
    empty = MemoryLog(case.clock)
    assert await case.another().restore(empty) is None
    await case.blobs.put(snapshot_name("p", 60), b"garbage")
    assert await case.another().restore(case.log) is None


async def test_a_snapshot_of_something_else_is_no_state(case: Case) -> None:
    """Readable, but not a router's: told, and the log is folded instead."""
    await SnapshotStore(case.blobs, "p").save(Snapshot(60, {"rows": 1}, {}))
    assert await case.another().restore(case.log) is None
