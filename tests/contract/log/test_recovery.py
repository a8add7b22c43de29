"""How a reader of the JetStream log recovers: every position is a record or declared gone, and nobody waits for ever."""

import asyncio
import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from nats.aio.client import Client

from headwater.events.jetstream import JetStreamLog
from headwater.events.jetstream.api import api
from headwater.events.jetstream.streams import ensure_pool
from headwater.events.ports import Slice, StreamMissing
from headwater.schemas import subjects
from headwater.schemas.encoding import SCHEMA_VERSION, Batch, encode_batch
from headwater.schemas.events import BlocksStored
from tests.support.ports.logs import (
    POOL,
    append_surely,
    batch,
    connected,
    fill_raw,
    jetstream_case,
    read_all,
    reading,
    records_of,
    stored,
    take,
)
from tests.support.servers.nats import NatsServer
from tests.support.servers.nats_cluster import NatsCluster

pytestmark = pytest.mark.ack_formats

BIG_BYTES = 200_000
BIG_BATCHES = 601


def _spans(pieces: list[Slice]) -> list[tuple[str, int, int]]:
    """What was told, in order: runs of records and gaps, as (what, first, last)."""
    spans: list[tuple[str, int, int]] = []
    for piece in pieces:
        if piece.gap is not None:
            spans.append(("gap", piece.gap.first, piece.gap.last))
        for record in piece.records:
            if spans and spans[-1][0] == "records" and spans[-1][2] == record.position - 1:
                spans[-1] = ("records", spans[-1][1], record.position)
            else:
                spans.append(("records", record.position, record.position))
    return spans


async def _collect(slices: AsyncIterator[Slice], until: int) -> list[Slice]:
    """Slices up to the one that tells about position `until`."""
    pieces = []
    while True:
        piece = await anext(slices)
        pieces.append(piece)
        told = [record.position for record in piece.records] + ([piece.gap.last] if piece.gap else [])
        if told and max(told) >= until:
            return pieces


async def _delete(client: Client, ns: str, *positions: int) -> None:
    for position in positions:
        await api(client, f"STREAM.MSG.DELETE.{subjects.pool_stream(ns, POOL)}", {"seq": position})


async def test_missing_sequences_are_told_as_gaps(client: Client, server: NatsServer, unique: str) -> None:
    """Single messages deleted in the middle, inside what arrives at once: each hole by its exact positions."""
    async with jetstream_case(server, unique) as case:
        await case.fill([batch(seq) for seq in range(1, 11)])
        await _delete(client, unique, 3, 6, 7)
        expected = [("records", 1, 2), ("gap", 3, 3), ("records", 4, 5), ("gap", 6, 7), ("records", 8, 10)]
        async with asyncio.timeout(20), reading(case.other) as slices:
            assert _spans(await _collect(slices, 10)) == expected
        pieces = await read_all(case.log)
        assert _spans(pieces) == expected
        # However many slices it came in: each says how many records are still to come.
        left = [sum(len(later.records) for later in pieces[at + 1 :]) for at in range(len(pieces))]
        assert [piece.lag for piece in pieces] == left
        assert left[0] >= 5


@pytest.mark.parametrize("deleted", [[10], [8, 9, 10]], ids=["last", "tail"])
async def test_reading_to_a_deleted_end_ends(
    client: Client, server: NatsServer, unique: str, deleted: list[int]
) -> None:
    """The last position is one that no message will ever have: told as a gap, not waited for."""
    async with jetstream_case(server, unique) as case:
        await case.fill([batch(seq) for seq in range(1, 11)])
        await _delete(client, unique, *deleted)
        async with asyncio.timeout(20):
            assert _spans(await read_all(case.log)) == [
                ("records", 1, deleted[0] - 1),
                ("gap", deleted[0], 10),
            ]


@pytest.mark.parametrize("follow", [True, False], ids=["follow", "to the end"])
async def test_log_purged_under_a_slow_reader_is_told(server: NatsServer, unique: str, follow: bool) -> None:
    """What it had asked for arrives, the rest is a gap: told without waiting for the next message."""
    async with jetstream_case(server, unique) as case:
        await case.fill([batch(seq) for seq in range(1, 3_001)])
        async with asyncio.timeout(20), reading(case.other, follow=follow) as slices:
            first = await anext(slices)
            await case.purge(3_001)
            spans = _spans([first, *await _collect(slices, 3_000)])
            assert spans[0][:2] == ("records", 1)
            assert [what for what, _, _ in spans] == ["records", "gap"]
            assert spans[1] == ("gap", spans[0][2] + 1, 3_000)
            if follow:
                await stored(case.log, case.subject, batch(3_001))
                assert [record.position for record in await take(slices, 1)] == [3_001]
            else:
                with pytest.raises(StopAsyncIteration):
                    await anext(slices)


async def test_empty_store_after_a_restart_is_missing_or_a_gap(own_server: NatsServer) -> None:
    """The server comes back without its disk: the reader is never left waiting at a position of the old log."""
    async with jetstream_case(own_server, "wiped") as case, connected(own_server) as admin:
        await case.fill([batch(seq) for seq in range(1, 6)])
        async with asyncio.timeout(60), reading(case.other) as slices:
            await take(slices, 5)
            own_server.kill()
            shutil.rmtree(own_server.folder / "jetstream")
            await own_server.restart()
            async with asyncio.timeout(20):
                while not admin.is_connected:
                    await asyncio.sleep(0.05)
            await ensure_pool(admin, "wiped", POOL)
            await append_surely(
                JetStreamLog(admin, subjects.pool_stream("wiped", POOL)), case.subject, batch(1, epoch=2)
            )
            try:
                pieces = await _collect(slices, 1)
                while not any(piece.records for piece in pieces):
                    pieces.append(await anext(slices))
            except StreamMissing:
                # The reader looked before the stream was there again: as good an answer.
                return
        assert pieces[0].gap is not None
        (record,) = [record for piece in pieces for record in piece.records]
        assert (record.position, record.batch.epoch) == (1, 2)


async def test_reader_that_stands_still_is_served_whole_and_not_cut_off(tmp_path: Path) -> None:
    """A process that stops for a second while megabytes come: a server keeps 64 MiB for it, and no more."""
    server = NatsServer(tmp_path)
    await server.start()
    try:
        await _stand_still(server)
        assert "Slow Consumer" not in server.log_file.read_text()
    finally:
        server.stop()


async def _stand_still(server: NatsServer) -> None:
    async with jetstream_case(server, "slow") as case:
        big = [
            Batch(SCHEMA_VERSION, "w0", 1, seq, 0, (BlocksStored(seq, bytes([1]) * BIG_BYTES),))
            for seq in range(1, BIG_BATCHES + 1)
        ]
        async with connected(server) as writer:
            for number in range(0, BIG_BATCHES, 50):
                await fill_raw(writer, case.subject, [encode_batch(one) for one in big[number : number + 50]])
        async with asyncio.timeout(60), reading(case.other) as slices:
            got = (await anext(slices)).records
            # The whole process stands still, as in a long computation or a full swap, with pulls under way.
            time.sleep(1.0)  # noqa: ASYNC251 (that is what is tested)
            got += await take(slices, BIG_BATCHES - len(got))
        assert [record.position for record in got] == list(range(1, BIG_BATCHES + 1))


async def test_changed_leader_is_not_noticed_by_a_reader(tmp_path: Path) -> None:
    """Three servers: the leader steps down twice while a reader follows and a writer writes."""
    stream = subjects.pool_stream("moved", POOL)
    subject = subjects.pool_subject("moved", POOL, "load", "w0")
    async with NatsCluster(tmp_path) as cluster:
        async with connected(cluster) as client, connected(cluster) as other:
            await cluster.until_ready(client)
            await ensure_pool(client, "moved", POOL, replicas=3)
            await cluster.until_current(client, stream)
            log = JetStreamLog(client, stream)
            leaders = []
            async with asyncio.timeout(60), reading(JetStreamLog(other, stream)) as slices:
                for seq in range(1, 31):
                    if seq in (11, 21):
                        leaders.append(await cluster.leader(client, stream))
                        await api(client, f"STREAM.LEADER.STEPDOWN.{stream}")
                        await cluster.until_current(client, stream)
                    await append_surely(log, subject, batch(seq))
                pieces = await _collect(slices, 30)
            leaders.append(await cluster.leader(client, stream))
            assert leaders[0] is not leaders[1]
            assert leaders[1] is not leaders[2]
            assert _spans(pieces) == [("records", 1, 30)]
            assert [record.batch.seq for record in await records_of(log)] == list(range(1, 31))
