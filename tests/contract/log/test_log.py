"""The `Log` contract on writing: once, in order, and never past a fence."""

import asyncio

import pytest

from headwater.events.ports import Bounds, Fenced, Stored
from tests.support.ports.logs import LogCase, append_one, append_surely, batch, records_of, stored


async def test_append_returns_rising_positions_that_are_those_of_the_records(log_case: LogCase) -> None:
    """`Stored.position` is where the batch is read again."""
    positions = [await stored(log_case.log, log_case.subject, batch(seq)) for seq in range(1, 6)]
    records = await records_of(log_case.log)
    assert positions == sorted(set(positions))
    assert [(record.position, record.batch.seq) for record in records] == list(zip(positions, range(1, 6)))
    assert {record.subject for record in records} == {log_case.subject}
    assert await log_case.log.bounds() == Bounds(positions[0], positions[-1])


async def test_empty_log_has_bounds_without_a_message(log_case: LogCase) -> None:
    """`last` is `first` - 1."""
    assert await log_case.log.bounds() == Bounds(1, 0)


async def test_batch_appended_again_is_stored_once(log_case: LogCase) -> None:
    """A retry is told apart and gets the position of the first try, from whichever process it comes."""
    first = await append_one(log_case.log, log_case.subject, batch(1))
    assert first == Stored(1)
    for log in (log_case.log, log_case.other, log_case.log):
        assert await append_one(log, log_case.subject, batch(1)) == Stored(1, again=True)
    assert await stored(log_case.log, log_case.subject, batch(2)) == 2
    assert [record.batch.seq for record in await records_of(log_case.log)] == [1, 2]


async def test_older_batch_appended_again_is_not_stored_again(log_case: LogCase) -> None:
    """Not only the newest batch of a writer is known to the log."""
    for seq in range(1, 4):
        await stored(log_case.log, log_case.subject, batch(seq))
    for log in (log_case.log, log_case.other):
        result = await append_one(log, log_case.subject, batch(1))
        assert isinstance(result, Stored)
        assert result.again
    assert [record.batch.seq for record in await records_of(log_case.log)] == [1, 2, 3]


async def test_higher_epoch_fences_a_lower_one(log_case: LogCase) -> None:
    """A writer of an earlier life learns the epoch that took over, and nothing of it is appended."""
    await stored(log_case.log, log_case.subject, batch(1, epoch=5))
    await stored(log_case.other, log_case.subject, batch(1, epoch=9))
    for log in (log_case.log, log_case.other):
        assert await append_one(log, log_case.subject, batch(2, epoch=5)) == Fenced(9)
    await stored(log_case.other, log_case.subject, batch(2, epoch=9))
    assert await append_one(log_case.log, log_case.subject, batch(2, epoch=5)) == Fenced(9)
    assert [(r.batch.epoch, r.batch.seq) for r in await records_of(log_case.log)] == [(5, 1), (9, 1), (9, 2)]


async def test_fence_holds_for_its_subject_only(log_case: LogCase) -> None:
    """Another writer's epoch says nothing about this one's."""
    neighbour = log_case.subject.removesuffix("w0") + "w1"
    await stored(log_case.log, log_case.subject, batch(1, epoch=9))
    assert await stored(log_case.log, neighbour, batch(1, writer="w1", epoch=1)) == 2


async def test_appends_of_one_subject_are_stored_in_call_order(log_case: LogCase) -> None:
    """Concurrent appends wait for each other, so a writer's numbers never run backwards."""
    results = await asyncio.gather(
        *(append_one(log_case.log, log_case.subject, batch(n)) for n in range(1, 41))
    )
    assert all(isinstance(result, Stored) and not result.again for result in results)
    assert [record.batch.seq for record in await records_of(log_case.log)] == list(range(1, 41))


async def test_two_writers_of_one_epoch_both_get_everything_in(log_case: LogCase) -> None:
    """Batches are told apart by writer too: one writer's number never hides the other's batch."""

    async def write(name: str) -> None:
        log = log_case.log if name == "w0" else log_case.other
        for seq in range(1, 16):
            result = await append_surely(log, log_case.subject, batch(seq, writer=name))
            assert result == Stored(result.position if isinstance(result, Stored) else 0), (name, seq)

    await asyncio.gather(write("w0"), write("w1"))
    records = await records_of(log_case.log)
    for name in ("w0", "w1"):
        assert [r.batch.seq for r in records if r.batch.writer == name] == list(range(1, 16))


async def test_of_two_racing_lives_the_later_one_wins(log_case: LogCase) -> None:
    """Once the later life has written, the earlier one never gets in again, however closely they race."""
    later_began = asyncio.Event()

    async def earlier() -> int:
        for seq in range(1, 1_000_000):
            result = await append_surely(log_case.log, log_case.subject, batch(seq, epoch=1))
            if isinstance(result, Fenced):
                assert result == Fenced(2)
                return seq - 1
            if seq == 5:
                later_began.set()
            await asyncio.sleep(0)
        raise AssertionError("never fenced")

    async def later() -> None:
        await later_began.wait()
        for seq in range(1, 21):
            assert isinstance(
                await append_surely(log_case.other, log_case.subject, batch(seq, epoch=2)), Stored
            )

    taken, _ = await asyncio.gather(earlier(), later())
    got = [(r.batch.epoch, r.batch.seq) for r in await records_of(log_case.log)]
    assert got == [(1, n) for n in range(1, taken + 1)] + [(2, n) for n in range(1, 21)]


@pytest.mark.parametrize("deadline_s", [0.5, 30.0])
async def test_deadline_changes_nothing_when_the_log_answers(log_case: LogCase, deadline_s: float) -> None:
    """A deadline is an upper bound, not a wait."""
    assert await append_one(log_case.log, log_case.subject, batch(1), deadline_s=deadline_s) == Stored(1)
