"""What only the JetStream log can meet: foreign bytes, refusals, a stream that is deleted or replaced."""

import asyncio
import time
from collections.abc import AsyncIterator

import msgspec
import pytest
from nats.aio.client import Client

from headwater.events.jetstream import Connection, JetStreamLog
from headwater.events.jetstream.api import api
from headwater.events.jetstream.cursor import Cursor, RawMessage
from headwater.events.jetstream.stream_spec import log_stream
from headwater.events.jetstream.streams import ensure, ensure_pool
from headwater.events.ports import Fenced, LogFull, LogRefused, Slice, Stored, StreamMissing
from headwater.ops.nats.server import MAX_PAYLOAD
from headwater.schemas import subjects
from headwater.schemas.encoding import SCHEMA_VERSION, Batch, encode_batch
from headwater.schemas.events import BlocksStored
from tests.support.ports.logs import (
    POOL,
    append_one,
    batch,
    fill_raw,
    jetstream_case,
    read_all,
    reading,
    records_of,
    stored,
    take,
)
from tests.support.ports.waiting import eventually
from tests.support.servers.nats import NatsServer


@pytest.mark.ack_formats
async def test_garbage_is_told_and_passed_over(client: Client, server: NatsServer, unique: str) -> None:
    """Messages that are no batches are named with position and subject; the rest is read as ever."""
    async with jetstream_case(server, unique) as case:
        await stored(case.log, case.subject, batch(1))
        for garbage in (b"", b"\xff\x00garbage", b'{"json": true}'):
            await fill_raw(client, case.subject, [garbage])
        await fill_raw(client, subjects.pool_subject(unique, POOL, "kv", "stranger"), [b"\x96\x01"])
        assert await append_one(case.other, case.subject, batch(2)) == Stored(6)
        pieces = await read_all(case.log)
        unreadable = [one for piece in pieces for one in piece.unreadable]
        assert [one.position for one in unreadable] == [2, 3, 4, 5]
        assert [one.subject.rsplit(".", 1)[1] for one in unreadable] == ["w0", "w0", "w0", "stranger"]
        assert all(one.reason for one in unreadable)
        assert [record.batch.seq for piece in pieces for record in piece.records] == [1, 2]


@pytest.mark.ack_formats
async def test_headers_of_strangers_are_no_signals(client: Client, server: NatsServer, unique: str) -> None:
    """A stored message with a `Status` header is a message, not the end of a pull."""
    async with jetstream_case(server, unique) as case:
        await client.request(case.subject, b"x", timeout=30, headers={"Status": "404"})
        await stored(case.log, case.subject, batch(1))
        pieces = await read_all(case.log)
        assert [one.position for piece in pieces for one in piece.unreadable] == [1]
        assert [record.position for piece in pieces for record in piece.records] == [2]


async def test_reading_a_log_parses_no_headers(
    monkeypatch: pytest.MonkeyPatch, server: NatsServer, unique: str
) -> None:
    """Each message has those with which it was appended, and they cost more than half of what receiving it costs otherwise."""
    async with jetstream_case(server, unique) as case:
        for seq in (1, 2):
            await stored(case.log, case.subject, batch(seq))
        parsed: list[bytes] = []
        monkeypatch.setattr(Connection, "_parse_header_lines", staticmethod(parsed.append))
        assert len(await records_of(case.log)) == 2
        assert [run async for run in case.log.scan_raw(0, 2)]
        assert parsed == []


async def test_a_scan_does_not_end_where_a_slow_server_pauses(
    monkeypatch: pytest.MonkeyPatch, server: NatsServer, unique: str
) -> None:
    """A server that has not yet come to the next message reports that nothing arrived, as an idle one does."""
    messages = Cursor.messages

    async def slow(self: Cursor, after: int, **options: bool) -> AsyncIterator[list[RawMessage]]:
        async for run in messages(self, after, **options):
            yield []
            for one in run:
                # A replica that lags counts nothing as pending either.
                yield [one._replace(pending=0)]
                yield []

    async with jetstream_case(server, unique) as case:
        for seq in range(1, 7):
            await stored(case.log, case.subject, batch(seq))
        monkeypatch.setattr(Cursor, "messages", slow)
        for after, until, wanted in ((0, 100, ()), (1, 5, ()), (2, 6, (case.subject,))):
            pieces = [piece async for piece in case.log.scan(after, until, wanted)]
            found = [record.position for piece in pieces for record in piece.records]
            assert found == list(range(after + 1, min(until, 6) + 1))
        assert [piece async for piece in case.log.scan(0, 6, (case.subject + "x",))] == []


async def test_batch_too_large_for_the_server_is_refused(server: NatsServer, unique: str) -> None:
    """It can never be stored, so it is an error at once and not an `Unknown` that is tried for ever."""
    async with jetstream_case(server, unique) as case:
        big = Batch(SCHEMA_VERSION, "w0", 1, 1, 0, (BlocksStored(0, bytes(MAX_PAYLOAD + 1)),))
        with pytest.raises(LogRefused):
            await append_one(case.log, case.subject, big, deadline_s=3.0)
        assert await append_one(case.log, case.subject, batch(2)) == Stored(1)


async def test_full_stream_that_keeps_its_old_messages_refuses(
    client: Client, server: NatsServer, unique: str
) -> None:
    """No space is an error of its own: nothing was stored, and somebody has to make room."""
    spec = log_stream(unique, f"{unique}.>", max_age_s=60, max_bytes=1024, replicas=1)
    await ensure(client, msgspec.structs.replace(spec, discard="new"))
    log = JetStreamLog(client, unique)
    big = Batch(SCHEMA_VERSION, "w0", 1, 1, 0, (BlocksStored(0, bytes(4096)),))
    with pytest.raises(LogFull, match="free space"):
        await append_one(log, f"{unique}.w0", big, deadline_s=2.0)


async def test_retry_after_the_duplicate_window_is_not_stored_again(
    client: Client, server: NatsServer, unique: str
) -> None:
    """The fence, not only the server's memory of message ids, keeps a batch from being stored twice."""
    spec = log_stream(unique, f"{unique}.>", max_age_s=60, max_bytes=1024**2, replicas=1)
    await ensure(client, msgspec.structs.replace(spec, duplicate_window=100_000_000))
    log, subject = JetStreamLog(client, unique), f"{unique}.w0"
    await stored(log, subject, batch(1))
    await stored(log, subject, batch(2))
    began = time.monotonic()
    await eventually(lambda: time.monotonic() - began > 1.0)
    for one in (batch(2), batch(1)):
        for handle in (log, JetStreamLog(client, unique)):
            result = await append_one(handle, subject, one)
            assert isinstance(result, Stored)
            assert result.again
    assert [record.batch.seq for record in await records_of(log)] == [1, 2]


async def test_lower_epoch_is_fenced_whoever_asked_before(server: NatsServer, unique: str) -> None:
    """Two lives in one process share a log object: the earlier one is fenced there too."""
    async with jetstream_case(server, unique) as case:
        await stored(case.log, case.subject, batch(1, epoch=9))
        assert await append_one(case.log, case.subject, batch(7, epoch=5)) == Fenced(9)
        assert len(await records_of(case.log)) == 1


@pytest.mark.ack_formats
async def test_reader_whose_consumer_is_deleted_reads_on(
    client: Client, server: NatsServer, unique: str
) -> None:
    """Nothing is left out or repeated, and a reader that ends leaves no consumer on the server."""
    names = f"CONSUMER.NAMES.{subjects.pool_stream(unique, POOL)}"
    async with jetstream_case(server, unique) as case:
        async with asyncio.timeout(30), reading(case.log) as slices:
            for seq in range(1, 7):
                await stored(case.other, case.subject, batch(seq))
                assert [record.position for record in await take(slices, 1)] == [seq]
                if seq % 2:
                    (consumer,) = (await api(client, names))["consumers"]
                    await api(client, f"CONSUMER.DELETE.{subjects.pool_stream(unique, POOL)}.{consumer}")
        assert not (await api(client, names))["consumers"]


async def test_deleted_stream_is_missing_for_writers_and_readers(
    client: Client, server: NatsServer, unique: str
) -> None:
    """`StreamMissing` at once, also for a writer that had written and a reader that was following."""
    async with jetstream_case(server, unique) as case:
        await stored(case.log, case.subject, batch(1))
        async with asyncio.timeout(30), reading(case.other) as slices:
            await take(slices, 1)
            await api(client, f"STREAM.DELETE.{subjects.pool_stream(unique, POOL)}")
            for log in (case.log, case.other):
                with pytest.raises(StreamMissing):
                    await append_one(log, case.subject, batch(2))
            with pytest.raises(StreamMissing):
                await anext(slices)
        with pytest.raises(StreamMissing):
            await case.log.bounds()
        with pytest.raises(StreamMissing):
            await read_all(case.log)


@pytest.mark.parametrize("length", [3, 30], ids=["shorter", "longer"])
@pytest.mark.ack_formats
async def test_replaced_stream_is_a_gap_for_its_reader(
    client: Client, server: NatsServer, unique: str, length: int
) -> None:
    """Deleted and made anew under a following reader: it hears of it and reads the new stream from its start."""
    new = [encode_batch(batch(seq, epoch=2)) for seq in range(1, length + 1)]
    async with jetstream_case(server, unique) as case:
        for seq in range(1, 11):
            await stored(case.log, case.subject, batch(seq))
        async with asyncio.timeout(30), reading(case.log) as slices:
            await take(slices, 10)
            await api(client, f"STREAM.DELETE.{subjects.pool_stream(unique, POOL)}")
            await ensure_pool(client, unique, POOL)
            await fill_raw(client, case.subject, new)
            pieces: list[Slice] = []
            try:
                while sum(len(piece.records) for piece in pieces) < length:
                    pieces.append(await anext(slices))
            except StreamMissing:
                # The reader looked in the moment between: as good an answer.
                return
        assert any(piece.gap for piece in pieces)
        assert [r.position for piece in pieces for r in piece.records] == list(range(1, length + 1))
