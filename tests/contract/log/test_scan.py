"""The `Log` contract on parts of a log: some subjects between two positions, and the position at a time."""

from collections.abc import Sequence

from headwater.events.ports import Record
from headwater.schemas.encoding import decode_batch
from tests.support.ports.logs import LogCase, batch, records_of, stored


async def scanned(case: LogCase, after: int, until: int, subjects: Sequence[str] = ()) -> list[Record]:
    """All records of a scan by another process."""
    pieces = [piece async for piece in case.other.scan(after, until, subjects)]
    assert all(piece.gap is None for piece in pieces)
    assert [piece.lag for piece in pieces] == sorted((piece.lag for piece in pieces), reverse=True)
    return [record for piece in pieces for record in piece.records]


async def fill_two(case: LogCase, count: int) -> str:
    """Batches of two writers in turns, odd positions of the case's own; returns the other's subject."""
    other = case.subject.removesuffix("w0") + "w1"
    for seq in range(1, count + 1):
        await stored(case.log, case.subject, batch(seq))
        await stored(case.log, other, batch(seq, writer="w1"))
    return other


async def test_a_scan_has_what_lies_between_two_positions(log_case: LogCase) -> None:
    """The first is left out, the second is included; a scan ends at the log's end."""
    await fill_two(log_case, 6)
    assert [one.position for one in await scanned(log_case, 3, 7)] == [4, 5, 6, 7]
    assert [one.position for one in await scanned(log_case, 0, 10_000)] == list(range(1, 13))
    assert await scanned(log_case, 12, 10_000) == []
    assert await scanned(log_case, 7, 7) == []
    assert await scanned(log_case, 0, 4) == (await records_of(log_case.log))[:4]


async def test_a_scan_has_only_the_wanted_subjects(log_case: LogCase) -> None:
    """One by name, several, all of a pattern, and none that is there."""
    other = await fill_two(log_case, 300)
    assert [one.position for one in await scanned(log_case, 1, 9, [log_case.subject])] == [3, 5, 7, 9]
    assert {one.subject for one in await scanned(log_case, 0, 600, [other])} == {other}
    assert len(await scanned(log_case, 0, 600, [log_case.subject, other])) == 600
    kind = log_case.subject.removesuffix("w0") + "*"
    assert len(await scanned(log_case, 10, 600, [kind])) == 590
    assert await scanned(log_case, 0, 600, [log_case.subject + "x"]) == []


async def test_a_scan_passes_over_what_is_gone(log_case: LogCase) -> None:
    """Purged positions are no gap: those of other subjects are missing as well."""
    await fill_two(log_case, 6)
    await log_case.purge(5)
    assert [one.position for one in await scanned(log_case, 0, 7)] == [5, 6, 7]


async def test_a_time_has_the_position_that_was_last_then(log_case: LogCase) -> None:
    """By the server's clock, to the microsecond; before the first message it is the position before it."""
    await fill_two(log_case, 20)
    records = await records_of(log_case.log)
    for record in (records[0], records[17], records[-1]):
        found = await log_case.other.position_at(record.stored_ns + 1_000)
        assert found >= record.position
        assert records[found - 1].stored_ns <= record.stored_ns + 2_000
        earlier = await log_case.other.position_at(record.stored_ns - 2_000)
        assert earlier < record.position
    assert await log_case.other.position_at(0) == 0
    assert await log_case.other.position_at(1 << 62) == 40
    await log_case.purge(11)
    assert await log_case.other.position_at(0) == 10


async def test_an_empty_log_has_no_position_at_any_time(log_case: LogCase) -> None:
    """Nor anything to scan."""
    assert await log_case.log.position_at(1 << 62) == 0
    assert await scanned(log_case, 0, 100) == []


async def test_a_raw_scan_has_the_stored_bytes(log_case: LogCase) -> None:
    """Of the same messages as a scan, which they decode to."""
    other = await fill_two(log_case, 300)
    for after, until, wanted in ((0, 10_000, ()), (3, 7, ()), (1, 599, (other,)), (600, 700, ())):
        records = await scanned(log_case, after, until, wanted)
        raw = [one async for run in log_case.other.scan_raw(after, until, wanted) for one in run]
        decoded = [Record(one.position, one.subject, one.stored_ns, decode_batch(one.data)) for one in raw]
        assert decoded == records
