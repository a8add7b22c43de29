"""A process that cannot store what it says knows it, tells it, and knows when it is over."""

import asyncio
from typing import Any

import prometheus_client
import pytest

from headwater.actors.edge.saga.workers import WorkerRegistry
from headwater.actors.runtime.lease import RENEW_S, RETRY_S, TTL_S, take
from headwater.actors.runtime.ports import CHECK_PERIOD_S, HINT, STALLED_S, Persistence
from headwater.events.chain import Chains
from headwater.events.memory import MemoryLog
from headwater.events.ports import AppendResult, Entry
from headwater.events.writer import Writer, WriterFenced
from headwater.schemas.events import KvGap
from tests.support.worlds.clock import ManualClock, SkippingClock, running, settle
from tests.support.worlds.edge import LoopTasks
from tests.support.worlds.memory import memory_world
from tests.unit.actors.runtime.conftest import KEY, FaultyTable, held, stored
from tests.unit.events.test_writer import SUBJECT, FaultyLog, begun, read, told, writer

PROBE_S = 0.01
"""Of the event loop's time, which no clock of a test moves."""


class FrozenLog(MemoryLog):
    """The memory log, which answers nothing until it is `thawed`."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock)
        self.thawed = asyncio.Event()
        self.asked = asyncio.Event()

    async def append(self, *entries: Entry, deadline_s: float = 5.0) -> AppendResult:
        """See `Log.append`."""
        self.asked.set()
        await self.thawed.wait()
        return await super().append(*entries, deadline_s=deadline_s)


class Source:
    """A writer that has been stalled for as long as a test says."""

    def __init__(self, stalled_s: float) -> None:
        self.stalled_s = stalled_s


def watching(source: Source) -> Persistence:
    """The persistence of an actor with one writer."""
    made = Persistence(ManualClock(), Notes())
    made.watch("log", source)
    return made


class Notes:
    """A logger that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str, dict[str, Any]]] = []

    def error(self, event: str, **more: Any) -> None:
        """Keep an error."""
        self.told.append(("error", event, more))

    def info(self, event: str, **more: Any) -> None:
        """Keep a message."""
        self.told.append(("info", event, more))


def metric(what: str) -> float | None:
    """The gauge of one thing that is stored."""
    return prometheus_client.REGISTRY.get_sample_value("headwater_log_stalled_seconds", {"what": what})


async def is_stored(one: Writer) -> None:
    """Wait, at the event loop's pace, until the writer has stored something more."""
    before = one.position
    async with asyncio.timeout(20):
        while one.position == before:
            await asyncio.sleep(PROBE_S / 5)


async def test_an_append_without_an_answer_counts_its_seconds(clock: ManualClock) -> None:
    """From its first try, however often it is tried; nothing once it is stored, and nothing while there is none."""
    log = FaultyLog(clock, ["unavailable"] * 5)
    one = writer(log, clock)
    async with running(one.run()):
        await clock.advance(60)
        assert one.stalled_s == 0.0, "nothing is to be stored"
        one.offer(KvGap(0))
        await clock.advance(1.0)
        assert 0.9 < one.stalled_s < 1.0
        await clock.advance(1.0)
        assert 1.9 < one.stalled_s < 2.0
        await clock.advance(10)
        assert one.stalled_s == 0.0
        await one.flush()
    assert told(await read(log)) == [0]


async def test_a_log_that_says_nothing_counts_like_one_that_fails(clock: ManualClock) -> None:
    """A server whose store is frozen answers no publish at all."""
    log = FrozenLog(clock)
    one = writer(log, clock)
    async with running(one.run()):
        one.offer(KvGap(0))
        await clock.advance(30)
        assert one.stalled_s == pytest.approx(30, abs=0.1)
        log.thawed.set()
        await one.flush()
        assert one.stalled_s == 0.0


async def test_an_idle_writer_appends_to_know_whether_it_could() -> None:
    """Empty messages at their places in the chain; what is offered between them is stored as ever."""
    clock = SkippingClock()
    log = MemoryLog(clock)
    one = Writer(log, SUBJECT, "w1", 3, clock, probe_s=PROBE_S)
    async with running(one.run()):
        await is_stored(one)
        await is_stored(one)
        one.offer(KvGap(7))
        await one.flush()
        await is_stored(one)
    records = await read(log)
    assert told(records) == [7]
    assert len([record for record in records if not record.batch.events]) >= 3
    assert [record.batch.seq for record in records] == list(range(1, len(records) + 1))
    chains = Chains()
    assert [chains.follow(record) for record in records] == [(True, None)] * len(records)


async def test_an_idle_writer_notices_a_log_that_takes_nothing(clock: ManualClock) -> None:
    """Although nobody has anything to store."""
    log = FrozenLog(clock)
    one = Writer(log, SUBJECT, "w1", 3, clock, probe_s=PROBE_S)
    async with running(one.run()):
        async with asyncio.timeout(20):
            await log.asked.wait()
        await clock.advance(STALLED_S)
        assert one.stalled_s >= STALLED_S
        assert one.offer(KvGap(1)), "what comes meanwhile waits"
        log.thawed.set()
        await settle()
        await clock.advance(1.0)
        await one.flush()
    assert told(await read(log)) == [1]


async def test_a_writer_that_was_not_told_to_probe_appends_nothing() -> None:
    """The writers of a worker have something to say each second anyway."""
    clock = SkippingClock()
    log, other = MemoryLog(clock), MemoryLog(clock)
    probing = Writer(other, SUBJECT, "w1", 3, clock, probe_s=PROBE_S)
    async with running(writer(log, clock).run()), running(probing.run()):
        for _ in range(3):
            await is_stored(probing)
    assert await read(log) == []


async def test_a_probe_of_a_life_that_is_over_ends_the_writer() -> None:
    """An idle process learns that another has taken its place."""
    clock = SkippingClock()
    log = MemoryLog(clock)
    one = Writer(log, SUBJECT, "w1", 3, clock, probe_s=PROBE_S)
    async with running(one.run()) as task:
        await is_stored(one)
        await begun(log, clock, 4, 1)
        async with asyncio.timeout(20):
            with pytest.raises(WriterFenced):
                await task


def test_what_is_a_hiccup_is_not_told() -> None:
    """Only what takes as long as no append takes by itself."""
    log, lease = Source(0.0), Source(STALLED_S - 0.1)
    made = Persistence(ManualClock(), Notes())
    made.watch("log", log)
    made.watch("lease", lease)
    assert made.stalled() == {}
    assert not made.is_stalled
    log.stalled_s = STALLED_S
    assert made.stalled() == {"log": STALLED_S}
    assert made.is_stalled
    lease.stalled_s = 60.04
    assert made.stalled() == {"log": STALLED_S, "lease": 60.0}


def test_a_further_life_takes_the_place_of_the_one_before() -> None:
    """Its writer is looked at; that of the dead life is not."""
    made = Persistence(ManualClock(), Notes())
    made.watch("log", Source(100.0))
    made.watch("log", Source(0.0))
    assert made.stalled() == {}


async def test_changes_are_told_once_with_what_to_do(clock: ManualClock) -> None:
    """In the log as an error, when it begins and when it is over; in a metric all the time."""
    notes = Notes()
    source = Source(0.0)
    made = Persistence(clock, notes)
    made.watch("test log", source)
    async with running(made.run()):
        await clock.advance(10 * CHECK_PERIOD_S)
        assert notes.told == []
        assert metric("test log") == 0.0
        source.stalled_s = STALLED_S + 1
        await clock.advance(10 * CHECK_PERIOD_S)
        assert notes.told == [
            ("error", "persistence_stalled", {"what": "test log", "for_s": STALLED_S + 1, "hint": HINT})
        ]
        assert metric("test log") == STALLED_S + 1
        source.stalled_s = 0.0
        await clock.advance(10 * CHECK_PERIOD_S)
        assert notes.told[1:] == [("info", "persistence_resumed", {"what": "test log"})]
        assert metric("test log") == 0.0
        source.stalled_s = STALLED_S
        await clock.advance(CHECK_PERIOD_S)
        assert [event for _, event, _ in notes.told[2:]] == ["persistence_stalled"], (
            "a second time is told again"
        )


async def test_a_lease_says_whether_its_holder_can_persist(table: FaultyTable) -> None:
    """With the next renewal, in both directions; it is the same incarnation all the while."""
    lease = await held(table)
    log = Source(0.0)
    lease.persistence = watching(log)

    async def says() -> bool:
        said = await stored(table)
        assert (said.epoch, said.incarnation) == (lease.epoch, "i1")
        return said.stalled

    async with running(lease.hold()):
        await table.clock.advance(2 * RENEW_S)
        assert not await says()
        log.stalled_s = STALLED_S
        await table.clock.advance(RENEW_S)
        assert await says()
        log.stalled_s = 0.0
        await table.clock.advance(RENEW_S)
        assert not await says()


async def test_a_lease_whose_store_is_away_counts_its_seconds(table: FaultyTable) -> None:
    """From the first renewal without an answer, over all further tries; nothing once one is answered."""
    lease = await held(table)
    async with running(lease.hold()):
        await table.clock.advance(5 * RENEW_S)
        assert lease.stalled_s == 0.0
        table.script = ["unavailable"] * 1000
        await table.clock.advance(3 * TTL_S)
        assert 3 * TTL_S - RENEW_S <= lease.stalled_s <= 3 * TTL_S
        table.script = []
        await table.clock.advance(RETRY_S)
        assert lease.stalled_s == 0.0


async def test_a_lease_that_another_took_is_no_stalled_store(table: FaultyTable) -> None:
    """The store has answered: there is nothing for an operator to mend."""
    lease = await held(table)
    async with running(lease.hold()) as holding:
        await table.clock.advance(RENEW_S / 2)
        await table.delete(KEY)
        await held(table, "i2")
        await table.clock.advance(RENEW_S)
        assert holding.done()
    await table.clock.advance(10 * STALLED_S)
    assert lease.stalled_s == 0.0


async def test_a_writer_whose_life_is_over_is_not_stalled(clock: ManualClock) -> None:
    """The log has answered; the next life may wait for its lease as long as it takes."""
    log = MemoryLog(clock)
    one = writer(log, clock)
    async with running(one.run()) as task:
        await begun(log, clock, 4, 1)
        one.offer(KvGap(0))
        await clock.advance(1.0)
        with pytest.raises(WriterFenced):
            await task
    await clock.advance(10 * STALLED_S)
    assert one.stalled_s == 0.0


async def test_an_edge_knows_who_in_the_fleet_cannot_persist(clock: ManualClock) -> None:
    """Workers and routers that say it in their leases, until they say otherwise or their lease ends."""
    world = memory_world(clock)
    tasks = LoopTasks()
    fleet = WorkerRegistry(world, "e1", tasks.spawn)
    logs = {"w1": Source(STALLED_S), "r1": Source(STALLED_S), "w2": Source(0.0)}
    async with running(fleet.watch_leases()):
        leases = {
            "w1": await take(world.leases, "worker", "w1", clock, pool="p"),
            "r1": await take(world.leases, "router", "r1", clock, pool="p"),
            "w2": await take(world.leases, "worker", "w2", clock, pool="p"),
        }
        for name, lease in leases.items():
            lease.persistence = watching(logs[name])
        async with running(leases["w1"].hold()), running(leases["r1"].hold()), running(leases["w2"].hold()):
            await clock.advance(RENEW_S)
            assert fleet.stalled == {"worker w1", "router r1"}
            logs["w1"].stalled_s = 0.0
            await clock.advance(RENEW_S)
            assert fleet.stalled == {"router r1"}
            await leases["r1"].release()
            await settle()
            assert fleet.stalled == set()
    await tasks.cancel()


def _measured(name: str, what: str) -> float:
    return prometheus_client.REGISTRY.get_sample_value(f"headwater_log_{name}", {"what": what}) or 0.0


async def test_appends_are_measured(clock: ManualClock) -> None:
    """How long they take, what waits, what was tried again and what was dropped; nothing waits for a writer that is gone."""
    log = FaultyLog(clock, ["unavailable"] * 3)
    persistence = Persistence(clock, Notes())
    one = writer(log, clock)
    persistence.measure("unit", one)
    async with running(one.run()), running(persistence.run()):
        one.offer(KvGap(0))
        one.offer(KvGap(1))
        one.refused += 5
        await clock.advance(1.0)
        assert _measured("pending_events", "unit") == 2
        await clock.advance(10)
        await one.flush()
        assert _measured("pending_events", "unit") == 0
        assert _measured("append_retries_total", "unit") == 3
        assert _measured("dropped_events_total", "unit") == 5
        assert _measured("append_seconds_count", "unit") == 1
        assert _measured("append_seconds_sum", "unit") == pytest.approx(1.5, abs=0.1)
        log.script = ["unavailable"] * 100
        one.offer(KvGap(2))
        await clock.advance(1.0)
        assert _measured("pending_events", "unit") == 1
        persistence.measure("unit", writer(log, clock))
        assert _measured("pending_events", "unit") == 0
