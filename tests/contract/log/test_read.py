"""The `Log` contract on reading: in order, from any position, nothing silently left out."""

import asyncio

import pytest

from headwater.events.ports import Gap, Stored, Unreadable
from headwater.schemas.encoding import SCHEMA_VERSION, Batch
from headwater.schemas.events import BlocksStored
from tests.support.ports.logs import LogCase, append_one, batch, read_all, reading, records_of, stored, take

pytestmark = pytest.mark.ack_formats

BURST = 20_000
BIG_BYTES = 200_000
BIG_BATCHES = 100


async def test_reading_starts_behind_any_position(log_case: LogCase) -> None:
    """`after` is the last position that the reader already has."""
    for seq in range(1, 8):
        await stored(log_case.log, log_case.subject, batch(seq))
    for after in range(8):
        assert [r.position for r in await records_of(log_case.other, after)] == list(range(after + 1, 8))


async def test_following_brings_old_records_and_then_new_ones(log_case: LogCase) -> None:
    """One reader goes from the past into the present without a seam."""
    for seq in range(1, 4):
        await stored(log_case.log, log_case.subject, batch(seq))
    async with reading(log_case.other, 1) as slices:
        assert [record.position for record in await take(slices, 2)] == [2, 3]
        for seq in range(4, 7):
            await stored(log_case.log, log_case.subject, batch(seq))
        assert [record.position for record in await take(slices, 3)] == [4, 5, 6]


async def test_empty_log_says_caught_up(log_case: LogCase) -> None:
    """A reader of an empty log learns at once that there is nothing, and then gets what comes."""
    pieces = await read_all(log_case.log)
    assert [(piece.records, piece.lag, piece.gap) for piece in pieces] == [([], 0, None)]
    async with reading(log_case.log) as slices:
        first = await anext(slices)
        assert (first.records, first.lag, first.gap) == ([], 0, None)
        await stored(log_case.log, log_case.subject, batch(1))
        assert [record.position for record in await take(slices, 1)] == [1]


async def test_reader_at_the_end_hears_that_it_is_caught_up(log_case: LogCase) -> None:
    """Starting at the last position brings one slice without records and a lag of 0."""
    position = await stored(log_case.log, log_case.subject, batch(1))
    async with reading(log_case.log, position) as slices:
        piece = await anext(slices)
        assert (piece.records, piece.lag, piece.gap) == ([], 0, None)


async def test_lag_counts_what_is_behind_the_last_record(log_case: LogCase) -> None:
    """Lags of a log that does not grow fall to exactly 0."""
    await log_case.fill([batch(seq) for seq in range(1, 1_501)])
    pieces = await read_all(log_case.log)
    assert len(pieces) > 1
    assert [piece.lag for piece in pieces] == [1_500 - piece.records[-1].position for piece in pieces]
    async with reading(log_case.log) as slices:
        while (await anext(slices)).lag:
            pass


async def test_purged_front_is_told_as_a_gap(log_case: LogCase) -> None:
    """The gap names exactly the positions that are gone, before the records behind it."""
    for seq in range(1, 11):
        await stored(log_case.log, log_case.subject, batch(seq))
    await log_case.purge(6)
    for after, expected in ((0, (1, 5)), (3, (4, 5)), (5, None), (8, None)):
        pieces = await read_all(log_case.log, after)
        gaps = [(piece.gap.first, piece.gap.last) for piece in pieces if piece.gap]
        assert gaps == ([expected] if expected else [])
        if expected:
            assert pieces[0].gap is not None
        assert [r.position for p in pieces for r in p.records] == list(range(max(after, 5) + 1, 11))


async def test_log_purged_to_its_end_is_a_gap_and_then_caught_up(log_case: LogCase) -> None:
    """A reader must not wait for records that will never come, nor miss that they are gone."""
    for seq in range(1, 6):
        await stored(log_case.log, log_case.subject, batch(seq))
    await log_case.purge(6)
    async with asyncio.timeout(20):
        pieces = await read_all(log_case.log, 2)
    gaps = [(piece.gap.first, piece.gap.last) for piece in pieces if piece.gap]
    assert (gaps, pieces[-1].lag) == ([(3, 5)], 0)
    async with asyncio.timeout(20), reading(log_case.log, 2) as slices:
        first = await anext(slices)
        assert first.gap is not None
        assert (first.gap.first, first.gap.last) == (3, 5)
        await stored(log_case.log, log_case.subject, batch(6))
        assert [record.position for record in await take(slices, 1)] == [6]


async def test_position_beyond_the_end_is_a_gap(log_case: LogCase) -> None:
    """The log is not the one that the position came from: the reader hears it and goes on at the end."""
    for seq in range(1, 4):
        await stored(log_case.log, log_case.subject, batch(seq))
    pieces = await read_all(log_case.log, 10)
    assert [(piece.gap.first, piece.gap.last) for piece in pieces if piece.gap] == [(4, 10)]
    assert not [record for piece in pieces for record in piece.records]
    async with reading(log_case.log, 10) as slices:
        gap = (await anext(slices)).gap
        assert isinstance(gap, Gap)
        assert (gap.first, gap.last) == (4, 10)
        await stored(log_case.log, log_case.subject, batch(4))
        assert [record.position for record in await take(slices, 1)] == [4]


async def test_batch_of_a_newer_release_is_told_and_passed_over(log_case: LogCase) -> None:
    """An old reader meets a newer writer: it says so and reads on."""
    await stored(log_case.log, log_case.subject, batch(1))
    await stored(log_case.log, log_case.subject, batch(2, version=SCHEMA_VERSION + 1))
    await stored(log_case.log, log_case.subject, batch(3))
    pieces = await read_all(log_case.log)
    unreadable = [one for piece in pieces for one in piece.unreadable]
    assert [(one.position, one.subject) for one in unreadable] == [(2, log_case.subject)]
    assert all(isinstance(one, Unreadable) and "newer" in one.reason for one in unreadable)
    assert [record.position for piece in pieces for record in piece.records] == [1, 3]


async def test_burst_into_a_slow_reader_is_delivered_whole(log_case: LogCase) -> None:
    """A reader that stops reading while 20,000 batches arrive gets every one of them, in order."""
    async with reading(log_case.log) as slices:
        await anext(slices)
        await log_case.fill([batch(seq) for seq in range(1, BURST + 1)])
        got: list[int] = []
        while len(got) < BURST:
            piece = await anext(slices)
            assert piece.gap is None
            got += [record.batch.seq for record in piece.records]
            # Others run between two slices, as in a busy process.
            await asyncio.sleep(0.001)
    assert got == list(range(1, BURST + 1))


async def test_big_batches_arrive_whole_and_in_order(log_case: LogCase) -> None:
    """Batches of 200 KB are as good as small ones."""
    for seq in range(1, BIG_BATCHES + 1):
        event = BlocksStored(seq, seq.to_bytes(8, "little") * (BIG_BYTES // 8))
        result = await append_one(
            log_case.log, log_case.subject, Batch(SCHEMA_VERSION, "w0", 1, seq, 0, (event,))
        )
        assert result == Stored(seq)
    records = await records_of(log_case.other)
    assert [record.batch.seq for record in records] == list(range(1, BIG_BATCHES + 1))
    for record in records:
        (told,) = record.batch.events
        assert isinstance(told, BlocksStored)
        assert told.hashes == record.batch.seq.to_bytes(8, "little") * (BIG_BYTES // 8)
