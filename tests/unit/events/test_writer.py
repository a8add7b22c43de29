"""The writer: order, packing, one batch for one sequence number however often it is tried, bounds and fences."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.events.chain import Chains
from headwater.events.memory import MemoryLog
from headwater.events.ports import (
    NOTHING,
    AppendResult,
    Entry,
    LogFull,
    LogRefused,
    LogUnavailable,
    Record,
    Unknown,
)
from headwater.events.writer import (
    BATCH_BYTES_MAX,
    BATCH_EVENTS_MAX,
    DELAY_S,
    FULL_RETRY_S,
    Writer,
    WriterFenced,
    stored,
)
from headwater.schemas.encoding import EVENT_BYTES, NO_DIGEST, Batch, Sealed, decode_batch
from headwater.schemas.events import BlocksRemoved, KvGap
from tests.support.data.examples import batch
from tests.support.worlds.clock import ManualClock, SkippingClock, running, settle

SUBJECT = "hw.test.pool.p.kv.w1"
FENCE = "hw.test.pool.p.fleet.w1"

Fault = str
FAULTS: tuple[Fault, ...] = ("ok", "unknown", "unavailable", "answer lost", "answer lost, raised")


class FaultyLog(MemoryLog):
    """The memory log, which answers as its script says, then always well. Notes what it was given."""

    def __init__(self, clock: ManualClock, script: Sequence[Fault] = ()) -> None:
        super().__init__(clock)
        self.script = list(script)
        self.given: list[Batch[Any]] = []

    async def append(self, *entries: Entry, deadline_s: float = 5.0) -> AppendResult:
        """See `Log.append`."""
        self.given += [decode_batch(entry.message.data) for entry in entries]
        return await self._answer(lambda: super(FaultyLog, self).append(*entries))

    async def ingest(
        self, subject: str, *messages: Sealed, fence: str, deadline_s: float = 5.0
    ) -> AppendResult:
        """See `Log.ingest`."""
        self.given += [decode_batch(message.data) for message in messages]
        return await self._answer(lambda: super(FaultyLog, self).ingest(subject, *messages, fence=fence))

    async def _answer(self, store: Callable[[], Awaitable[AppendResult]]) -> AppendResult:
        fault = self.script.pop(0) if self.script else "ok"
        if fault == "refused":
            raise LogRefused("too large", 10054)
        if fault == "full":
            raise LogFull("no room")
        if fault.startswith(("ok", "answer lost")):
            result = await store()
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


async def begun(
    log: MemoryLog, clock: ManualClock, epoch: int, *numbers: int, subject: str = SUBJECT
) -> Writer:
    """A writer whose first message is stored."""
    one = Writer(log, subject, "w1", epoch, clock)
    entries = await one.first_entries(*(KvGap(number) for number in numbers))
    await stored(lambda: log.append(*entries), clock, subject)
    return one


@given(
    st.lists(st.integers(0, 700), min_size=1, max_size=6),
    st.lists(st.sampled_from(FAULTS[1:]), max_size=8),
    st.sampled_from(["", FENCE]),
)
async def test_every_event_is_stored_once_and_in_order(
    bursts: list[int], script: list[Fault], fence: str
) -> None:
    """Whatever goes wrong on the way, the log has each event exactly once, in the order of `offer`."""
    clock = SkippingClock()
    log = FaultyLog(clock, script)
    one = writer(log, clock, fence=fence)
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
    chains = Chains()
    assert [chains.follow(record) for record in records] == [(True, None)] * len(records)
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
    [given] = log.given
    wanted = batch(*(KvGap(number) for number in range(10)), epoch=3, seq=1, wall_ns=clock.wall_ns())
    assert msgspec.structs.replace(given, digest=NO_DIGEST) == wanted


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
        half = BATCH_BYTES_MAX // 2 - EVENT_BYTES
        for size in (half, half, 8, 10 * BATCH_BYTES_MAX, 8):
            one.offer(BlocksRemoved(b"\1" * size))
        await one.flush()
    assert [len(given.events) for given in log.given] == [2, 1, 1, 1]


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> int:
    """How many events a writer queues, less than in production."""
    bound = 2 * BATCH_EVENTS_MAX + 100
    monkeypatch.setattr("headwater.events.writer.PENDING_EVENTS_MAX", bound)
    return bound


async def test_a_full_writer_refuses_and_counts(room: int) -> None:
    """With the log away, events wait up to the bound; beyond it the owner is told, each time."""
    clock = SkippingClock()
    one = writer(FaultyLog(clock), clock)
    assert all(one.offer(KvGap(number)) for number in range(room))
    assert not one.offer(KvGap(-1))
    assert not one.offer(KvGap(-1))
    assert (one.refused, one.pending) == (2, room)


async def test_there_is_room_again_once_the_log_is_back(room: int) -> None:
    """What was refused is missing; what was taken is stored, and more is taken."""
    clock = SkippingClock()
    log = FaultyLog(clock)
    one = writer(log, clock)
    for number in range(room + 5):
        one.offer(KvGap(number))
    async with running(one.run()):
        await one.flush()
        assert one.offer(KvGap(room))
        await one.flush()
    assert told(await read(log)) == list(range(room + 1))


async def test_a_later_life_fences_this_one() -> None:
    """Once another epoch has written, nothing more is appended and `run` ends with WriterFenced."""
    clock = SkippingClock()
    log = FaultyLog(clock)
    one = writer(log, clock)
    async with running(one.run()) as task:
        one.offer(KvGap(0))
        await one.flush()
        await begun(log, clock, 4, 100)
        one.offer(KvGap(1))
        with pytest.raises(WriterFenced, match="this incarnation ended, epoch 4 writes now"):
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


async def test_a_later_life_fences_a_stream_through_the_fence_subject() -> None:
    """A streamed message is refused once a later life wrote to the fence, though not to this subject yet."""
    clock = SkippingClock()
    log = FaultyLog(clock)
    await begun(log, clock, 3, subject=FENCE)
    one = writer(log, clock, fence=FENCE)
    async with running(one.run()) as task:
        one.offer(KvGap(0))
        await one.flush()
        await begun(log, clock, 4, subject=FENCE)
        one.offer(KvGap(1))
        with pytest.raises(WriterFenced, match="epoch 4 writes now"):
            await task
    assert told(await read(log)) == [0]


async def test_a_life_begins_in_several_subjects_at_once() -> None:
    """`begin` gives the first messages of a life; appended together, `run` goes on behind them."""
    clock = SkippingClock()
    log = FaultyLog(clock, ["unavailable"])
    one, other = writer(log, clock), Writer(log, FENCE, "w1", 3, clock)
    entries = [*await other.first_entries(KvGap(0)), *await one.first_entries(KvGap(1), KvGap(2))]
    assert (await log.newest(SUBJECT), await log.newest(FENCE)) == (NOTHING, NOTHING)
    assert await stored(lambda: log.append(*entries), clock, SUBJECT) == 2
    async with running(one.run()):
        one.offer(KvGap(3))
        await one.flush()
    records = await read(log)
    assert told(records) == [0, 1, 2, 3]
    chains = Chains()
    assert all(chains.follow(record) == (True, None) for record in records)


async def test_a_life_goes_on_behind_the_one_before_it() -> None:
    """The first message of a life names the last of the life before, so a cut between them is seen."""
    clock = SkippingClock()
    log = FaultyLog(clock)
    for epoch in (3, 4, 7):
        await begun(log, clock, epoch, epoch)
    records = await read(log)
    chains = Chains()
    assert [chains.follow(record) for record in records] == [(True, None)] * 3
    again = Chains()
    again.follow(records[0])
    fold, broken = again.follow(records[2])
    assert fold
    assert broken is not None
    assert "between position 1 and this one" in broken.reason


async def test_a_stamp_sees_and_follows_the_events_of_its_message() -> None:
    """The stamp is made with the message, once, also when the message is tried again."""
    clock = SkippingClock()
    log = FaultyLog(clock, ["answer lost", "unavailable"])
    one = writer(log, clock, stamp=lambda events: KvGap(1000 + len(events)))
    async with running(one.run()):
        one.offer(KvGap(0))
        one.offer(KvGap(1))
        await one.flush()
    assert told(await read(log)) == [0, 1, 1002]


async def test_a_full_store_is_waited_for() -> None:
    """Nobody loses an event because a disk is full: the writer tries again, at a slower pace."""
    clock = SkippingClock()
    log = FaultyLog(clock, ["full", "full"])
    one = writer(log, clock)
    async with running(one.run()):
        one.offer(KvGap(0))
        await one.flush()
    assert told(await read(log)) == [0]
    assert clock.slept.count(FULL_RETRY_S) == 2


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
