"""The JetStream log when its server is killed, started again, or stops answering."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial

import pytest

from headwater.events.jetstream.connection import connect
from headwater.events.ports import Stored, Unknown
from tests.support.ports.logs import (
    LogCase,
    append_one,
    append_surely,
    batch,
    jetstream_case,
    reading,
    records_of,
    stored,
    take,
)
from tests.support.ports.waiting import eventually
from tests.support.servers.nats import NatsServer

KILLS = 3
BATCHES_BETWEEN_KILLS = 300
LONG_S = 60.0
"""A deadline that does not pass during a test."""


@pytest.fixture
async def case(own_server: NatsServer) -> AsyncIterator[LogCase]:
    """A log on `own_server`."""
    async with jetstream_case(own_server, "loss") as made:
        yield made


def _reached(acknowledged: list[tuple[int, int]], count: int) -> bool:
    return len(acknowledged) >= count


@pytest.mark.timeout(300)
async def test_killed_server_loses_nothing_acknowledged_and_repeats_nothing(
    own_server: NatsServer, case: LogCase
) -> None:
    """SIGKILL under writing and reading: all acknowledged is there once, in order, and so it is read."""
    acknowledged: list[tuple[int, int]] = []
    unknown = 0
    wanted = (KILLS + 1) * BATCHES_BETWEEN_KILLS
    read: list[tuple[int, int]] = []

    async def write() -> None:
        nonlocal unknown
        for seq in range(1, wanted + 1):
            while isinstance(
                result := await append_one(case.log, case.subject, batch(seq), deadline_s=1.0), Unknown
            ):
                unknown += 1
            assert isinstance(result, Stored)
            acknowledged.append((result.position, seq))

    async def follow() -> None:
        async with reading(case.other) as slices:
            while len(read) < wanted:
                piece = await anext(slices)
                assert piece.gap is None
                assert not piece.unreadable
                read.extend((record.position, record.batch.seq) for record in piece.records)

    async with asyncio.timeout(240), asyncio.TaskGroup() as tasks:
        tasks.create_task(write())
        tasks.create_task(follow())
        for kill in range(1, KILLS + 1):
            await eventually(partial(_reached, acknowledged, kill * BATCHES_BETWEEN_KILLS))
            own_server.kill()
            await own_server.restart()
    everything = [(record.position, record.batch.seq) for record in await records_of(case.log)]
    assert everything == [(seq, seq) for seq in range(1, wanted + 1)]
    assert acknowledged == everything
    assert read == everything


@pytest.mark.timeout(180)
async def test_append_in_flight_at_the_kill_ends_and_its_retry_is_stored_once(
    own_server: NatsServer, case: LogCase
) -> None:
    """It ends as stored or unknown, never as an error, and trying it again tells which it was."""
    await stored(case.log, case.subject, batch(1))
    in_flight = [
        asyncio.create_task(append_one(case.log, case.subject, batch(seq), deadline_s=1.5))
        for seq in range(2, 12)
    ]
    await asyncio.sleep(0)
    own_server.kill()
    results = await asyncio.gather(*in_flight)
    assert all(isinstance(result, Stored | Unknown) for result in results)
    await own_server.restart()
    for seq, result in enumerate(results, 2):
        again = await append_surely(case.log, case.subject, batch(seq))
        assert isinstance(again, Stored)
        assert again.again or isinstance(result, Unknown)
    assert [record.batch.seq for record in await records_of(case.log)] == list(range(1, 12))


@pytest.mark.timeout(180)
@pytest.mark.ack_formats
async def test_reader_of_a_dead_server_goes_on_when_it_is_back(own_server: NatsServer, case: LogCase) -> None:
    """A reader that waits at the end while the server dies brings the next record, and that one only."""
    for seq in range(1, 4):
        await stored(case.log, case.subject, batch(seq))
    async with asyncio.timeout(120), reading(case.other) as slices:
        await take(slices, 3)
        waiting = asyncio.create_task(take(slices, 1))
        own_server.kill()
        await own_server.restart()
        assert await append_surely(case.log, case.subject, batch(4)) == Stored(4)
        assert [record.position for record in await waiting] == [4]


@pytest.mark.timeout(180)
@pytest.mark.ack_formats
async def test_reading_begins_when_the_server_comes_back(own_server: NatsServer, case: LogCase) -> None:
    """A reader that starts while the server is away waits for it, as one that had started before does."""
    await stored(case.log, case.subject, batch(1))
    own_server.kill()
    async with asyncio.timeout(120), reading(case.other) as slices:
        waiting = asyncio.create_task(take(slices, 1))
        # Longer than one request's deadline.
        await asyncio.wait([waiting], timeout=5.5)
        await own_server.restart()
        assert [record.position for record in await waiting] == [1]


@pytest.mark.parametrize("known", [True, False], ids=["writing", "fresh"])
async def test_silent_server_ends_an_append_at_its_deadline(
    own_server: NatsServer, case: LogCase, known: bool
) -> None:
    """`Unknown`, no later than a little after the deadline, for a fresh writer too; then it works again."""
    if known:
        await stored(case.log, case.subject, batch(1))
    own_server.pause()
    try:
        async with asyncio.timeout(LONG_S):
            result = await append_one(case.log, case.subject, batch(2), deadline_s=1.0)
    finally:
        own_server.resume()
    assert isinstance(result, Unknown)
    assert result.reason
    retried = await append_surely(case.log, case.subject, batch(2))
    assert isinstance(retried, Stored)
    assert [record.batch.seq for record in await records_of(case.log)][-1] == 2
    assert len(await records_of(case.log)) == 1 + known


async def test_append_queued_behind_a_stuck_one_keeps_its_own_deadline(
    own_server: NatsServer, case: LogCase
) -> None:
    """Waiting for another append of the subject counts."""
    await stored(case.log, case.subject, batch(1))
    own_server.pause()
    try:
        stuck = asyncio.create_task(append_one(case.log, case.subject, batch(2), deadline_s=LONG_S))
        await asyncio.sleep(0)
        result = await append_one(case.log, case.subject, batch(3), deadline_s=0.5)
        assert not stuck.done(), "it did not wait for the other one"
    finally:
        own_server.resume()
    assert isinstance(result, Unknown)
    assert isinstance(await stuck, Stored)


async def test_a_connection_that_lost_its_server_closes_without_an_error(own_server: NatsServer) -> None:
    """Also with messages that it could not send: what stops it has no use for an error of the transport that is gone."""
    client = await connect(own_server.url, "orphan")
    own_server.kill()
    await eventually(lambda: not client.is_connected)
    await client.publish("x", b"never sent")
    await client.close()
    assert client.is_closed
