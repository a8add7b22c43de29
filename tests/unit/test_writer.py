"""The writer: order, packing, one batch for one sequence number however often it is tried, bounds and fences."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.events.errors import LogRefused, LogUnavailable
from headwater.events.log import AppendResult, Record, Unknown
from headwater.events.memory import MemoryLog
from headwater.events.writer import (
    BATCH_BYTES_MAX,
    BATCH_EVENTS_MAX,
    DELAY_S,
    PENDING_EVENTS_MAX,
    Writer,
    WriterFenced,
)
from headwater.schemas.envelope import Batch, Event
from headwater.schemas.kv import KvGap
from tests.unit.clock import ManualClock, SkippingClock, running, settle
from tests.unit.examples import batch

SUBJECT = "hw.test.pool.p.kv.w1"

Fault = str
FAULTS: tuple[Fault, ...] = ("ok", "unknown", "unavailable", "answer lost", "answer lost, raised")


class FaultyLog(MemoryLog):
    """The memory log, which answers as its script says, then always well. Notes what it was given."""

    def __init__(self, clock: ManualClock, script: Sequence[Fault] = ()) -> None:
        super().__init__(clock)
        self.script = list(script)
        self.given: list[Batch[Any]] = []

    async def append(self, subject: str, batch: Batch[Any], *, deadline_s: float = 5.0) -> AppendResult:
        """See `Log.append`."""
        self.given.append(batch)
        fault = self.script.pop(0) if self.script else "ok"
        if fault == "refused":
            raise LogRefused("too large", 10054)
        if fault.startswith(("ok", "answer lost")):
            result = await super().append(subject, batch, deadline_s=deadline_s)
            if fault == "ok":
                return result
        if fault.endswith(("unavailable", "raised")):
            raise LogUnavailable("no answer")
        return Unknown("the deadline passed")


async def read(log: MemoryLog) -> list[Record]:
    """All that is stored."""
    return [record async for piece in log.read(0, follow=False) for record in piece.records]


def told(records: list[Record]) -> list[int]:
    """The numbers of all stored events, in order."""
    return [event.missing for record in records for event in record.batch.events if isinstance(event, KvGap)]


def writer(log: MemoryLog, clock: ManualClock, **more: Any) -> Writer:
    """A writer of epoch 3."""
    return Writer(log, SUBJECT, "w1", 3, clock, **more)


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.integers(0, 700), min_size=1, max_size=6), st.lists(st.sampled_from(FAULTS[1:]), max_size=8)
)
async def test_every_event_is_stored_once_and_in_order(bursts: list[int], script: list[Fault]) -> None:
    """Whatever goes wrong on the way, the log has each event exactly once, in the order of `offer`."""
    clock = SkippingClock()
    log = FaultyLog(clock, script)
    one = writer(log, clock)
    offered = 0
    async with running(one.run()):
        for burst in bursts:
            for _ in range(burst):
                assert one.offer(KvGap(offered))
                offered += 1
            await settle()
        await one.flush()
    assert one.pending == 0
    records = await read(log)
    assert told(records) == list(range(offered))
    assert [record.batch.seq for record in records] == list(range(1, len(records) + 1))
    assert one.position == (records[-1].position if records else 0)


async def test_a_retry_is_the_same_batch_with_the_same_number() -> None:
    """What was tried without an answer is tried again as it was, whatever came in meanwhile."""
    clock = ManualClock()
    log = FaultyLog(clock, ["unavailable", "answer lost", "unknown"])
    one = writer(log, clock)
    async with running(one.run()):
        one.offer(KvGap(0))
        await clock.advance(DELAY_S)
        one.offer(KvGap(1))
        await clock.advance(2.0)
        await one.flush()
    first, *others = log.given
    assert [given.seq for given in log.given] == [1, 1, 1, 1, 2]
    assert others[:3] == [first] * 3, "the time in it stays as well"
    assert told(await read(log)) == [0, 1]


async def test_events_of_one_moment_are_packed_into_one_message() -> None:
    """What came within the delay is one batch, under the writer's name, epoch and clock."""
    clock = ManualClock()
    log = FaultyLog(clock)
    one = writer(log, clock)
    async with running(one.run()):
        for number in range(10):
            one.offer(KvGap(number))
        await settle()
        assert log.given == [], "not before the delay is over"
        await clock.advance(DELAY_S)
    [stored] = log.given
    assert stored == batch(*(KvGap(number) for number in range(10)), epoch=3, seq=1, wall_ns=clock.wall_ns())


async def test_batches_are_bounded_by_count_and_by_bytes() -> None:
    """A large burst is several messages; an event larger than the bound goes by itself."""
    clock = SkippingClock()
    log = FaultyLog(clock)
    one = writer(log, clock)
    async with running(one.run()):
        for number in range(2 * BATCH_EVENTS_MAX + 1):
            one.offer(KvGap(number))
        await one.flush()
        assert [len(given.events) for given in log.given] == [BATCH_EVENTS_MAX, BATCH_EVENTS_MAX, 1]
        log.given.clear()
        for size in (BATCH_BYTES_MAX // 2, BATCH_BYTES_MAX // 2, 1, 10 * BATCH_BYTES_MAX, 1):
            one.offer(KvGap(0), size)
        await one.flush()
    assert [len(given.events) for given in log.given] == [2, 1, 1, 1]


async def test_a_full_writer_refuses_and_counts() -> None:
    """With the log away, events wait up to the bound; beyond it the owner is told, each time."""
    clock = SkippingClock()
    one = writer(FaultyLog(clock), clock)
    assert all(one.offer(KvGap(number)) for number in range(PENDING_EVENTS_MAX))
    assert not one.offer(KvGap(-1))
    assert not one.offer(KvGap(-1))
    assert (one.refused, one.pending) == (2, PENDING_EVENTS_MAX)


async def test_there_is_room_again_once_the_log_is_back() -> None:
    """What was refused is missing; what was taken is stored, and more is taken."""
    clock = SkippingClock()
    log = FaultyLog(clock)
    one = writer(log, clock)
    for number in range(PENDING_EVENTS_MAX + 5):
        one.offer(KvGap(number))
    async with running(one.run()):
        await one.flush()
        assert one.offer(KvGap(PENDING_EVENTS_MAX))
        await one.flush()
    in_order = told(await read(log)) == list(range(PENDING_EVENTS_MAX + 1))
    assert in_order, "not shown: it is long"


async def test_a_later_life_fences_this_one() -> None:
    """Once another epoch has written, nothing more is appended and `run` ends with WriterFenced."""
    clock = SkippingClock()
    log = FaultyLog(clock)
    one = writer(log, clock)
    async with running(one.run()) as task:
        one.offer(KvGap(0))
        await one.flush()
        await Writer(log, SUBJECT, "w1", 4, clock).append_now(KvGap(100))
        one.offer(KvGap(1))
        with pytest.raises(WriterFenced, match="epoch 3 of w1 is over, 4 writes now"):
            await task
    assert told(await read(log)) == [0, 100]
    assert one.pending == 1, "it is not claimed to be stored"


async def test_a_refusal_for_good_ends_the_writer() -> None:
    """A message that the server will never take is not tried for ever."""
    clock = SkippingClock()
    log = FaultyLog(clock, ["unknown", "refused"])
    one = writer(log, clock)
    async with running(one.run()) as task:
        one.offer(KvGap(0))
        with pytest.raises(LogRefused, match="too large"):
            await task
    assert len(log.given) == 2


async def test_the_owner_hears_what_is_stored_and_where() -> None:
    """`on_stored` is called once per batch, in order, with its position, and not before it is there."""
    clock = SkippingClock()
    log = FaultyLog(clock, ["answer lost", "unavailable"])
    heard: list[tuple[int, tuple[Event, ...]]] = []
    one = writer(log, clock, on_stored=lambda position, events: heard.append((position, events)))
    async with running(one.run()):
        for number in range(BATCH_EVENTS_MAX + 1):
            one.offer(KvGap(number))
        await one.flush()
    assert [position for position, _ in heard] == [1, 2]
    assert [event for _, events in heard for event in events] == [
        KvGap(n) for n in range(BATCH_EVENTS_MAX + 1)
    ]


async def test_facts_can_be_appended_at_once() -> None:
    """`append_now` returns the position, retries as `run` does, and stands before what is offered later."""
    clock = SkippingClock()
    log = FaultyLog(clock, ["unavailable"])
    one = writer(log, clock)
    assert await one.append_now(KvGap(0), KvGap(1)) == 1
    async with running(one.run()):
        one.offer(KvGap(2))
        await one.flush()
    assert told(await read(log)) == [0, 1, 2]
    assert [given.seq for given in log.given] == [1, 1, 2]


async def test_flush_waits_for_all_that_was_offered() -> None:
    """It returns at once with nothing pending, and not before the last event is stored."""
    clock = ManualClock()
    log = FaultyLog(clock, ["unavailable"])
    one = writer(log, clock)
    await one.flush()
    async with running(one.run()):
        one.offer(KvGap(0))
        async with running(one.flush()) as flushed:
            await clock.advance(DELAY_S)
            assert not flushed.done()
            await clock.advance(1.0)
            assert flushed.done()
    assert told(await read(log)) == [0]
