"""What the tests of the `Log` contract share: a log under test, numbered batches, and reading helpers."""

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple

import pytest
from nats.aio.client import Client

from headwater.events.jetstream import JetStreamLog, connect
from headwater.events.jetstream.api import api
from headwater.events.jetstream.streams import ensure_pool
from headwater.events.memory import MemoryLog
from headwater.events.ports import AppendResult, Entry, Log, Record, Slice, Stored, StreamMissing, Unknown
from headwater.schemas import subjects
from headwater.schemas.clock import SystemClock
from headwater.schemas.encoding import SCHEMA_VERSION, Batch, encode_batch, seal
from headwater.schemas.events import LoadReported
from tests.support.servers.nats import NatsServer
from tests.support.servers.nats_cluster import NatsCluster

POOL = "p"


class LogCase(NamedTuple):
    """A log under test. `other` is the same log seen by another process; `purge(n)` forgets all below `n`.

    `fill(batches)` brings many batches of `subject` into the log without waiting for each.
    """

    log: Log
    other: Log
    subject: str
    purge: Callable[[int], Awaitable[None]]
    fill: Callable[[list[Batch[Any]]], Awaitable[None]]


def batch(seq: int, *, writer: str = "w0", epoch: int = 1, version: int = SCHEMA_VERSION) -> Batch[Any]:
    """A small batch whose one event carries `seq`."""
    return Batch(version, writer, epoch, seq, 0, (LoadReported(seq, 0, 0, 1),))


@asynccontextmanager
async def memory_case() -> AsyncIterator[LogCase]:
    """A `MemoryLog`."""
    log = MemoryLog(SystemClock())
    subject = subjects.pool_subject("ns", POOL, "load", "w0")

    async def purge(before: int) -> None:
        log.purge(before)

    async def fill(batches: list[Batch[Any]]) -> None:
        for one in batches:
            await append_one(log, subject, one)

    yield LogCase(log, log, subject, purge, fill)


@asynccontextmanager
async def jetstream_case(server: NatsServer, ns: str) -> AsyncIterator[LogCase]:
    """A `JetStreamLog` on a fresh stream, and another over a connection of its own."""
    stream, subject = subjects.pool_stream(ns, POOL), subjects.pool_subject(ns, POOL, "load", "w0")

    async def purge(before: int) -> None:
        await api(client, f"STREAM.PURGE.{stream}", {"seq": before})

    async def fill(batches: list[Batch[Any]]) -> None:
        await fill_raw(other, subject, [encode_batch(one) for one in batches])

    async with connected(server) as client, connected(server) as other:
        await ensure_pool(client, ns, POOL)
        try:
            yield LogCase(JetStreamLog(client, stream), JetStreamLog(other, stream), subject, purge, fill)
        finally:
            # A stream reserves its greatest size on the disk: a few dozen would be refused.
            with suppress(StreamMissing):
                await api(client, f"STREAM.DELETE.{stream}")


@asynccontextmanager
async def connected(server: NatsServer | NatsCluster) -> AsyncIterator[Client]:
    """A connection of its own, closed at the end of the block."""
    client = await connect(server.url, "test")
    try:
        yield client
    finally:
        await client.close()


async def fill_raw(client: Client, subject: str, messages: list[bytes]) -> None:
    """Publish as fast as the connection takes it; returns when the server has answered the last one."""
    for message in messages[:-1]:
        await client.publish(subject, message)
    await client.request(subject, messages[-1], timeout=60)


@asynccontextmanager
async def reading(log: Log, after: int = 0, *, follow: bool = True) -> AsyncIterator[AsyncIterator[Slice]]:
    """The log's slices behind `after`; the reader is closed at the end of the block."""
    slices = log.read(after, follow=follow)
    try:
        yield slices
    finally:
        assert isinstance(slices, AsyncGenerator)
        await slices.aclose()


async def read_all(log: Log, after: int = 0) -> list[Slice]:
    """Every slice up to the present end."""
    return [piece async for piece in log.read(after, follow=False)]


async def records_of(log: Log, after: int = 0) -> list[Record]:
    """Every record up to the present end."""
    return [record for piece in await read_all(log, after) for record in piece.records]


def watch_scans(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The subjects of each scan of a log in memory from now on; a scan of some yields the kinds of no others."""
    asked: list[list[str]] = []
    scan = MemoryLog.scan

    async def watched(
        self: MemoryLog, after: int, until: int, names: Sequence[str] = ()
    ) -> AsyncIterator[Slice]:
        asked.append([*names])
        kinds = {one.split(".")[4] for one in names}
        async for piece in scan(self, after, until, names):
            assert not names or {subjects.pool_kind(one.subject) for one in piece.records} <= kinds
            yield piece

    monkeypatch.setattr(MemoryLog, "scan", watched)
    return asked


async def take(slices: AsyncIterator[Slice], count: int) -> list[Record]:
    """Read on until at least `count` records have come."""
    records: list[Record] = []
    while len(records) < count:
        records += (await anext(slices)).records
    return records


async def append_one(log: Log, subject: str, one: Batch[Any], *, deadline_s: float = 5.0) -> AppendResult:
    """Append a batch by itself."""
    return await log.append(Entry(subject, seal(one)), deadline_s=deadline_s)


async def append_surely(log: Log, subject: str, one: Batch[Any]) -> AppendResult:
    """Append, again after each `Unknown`, as every writer does."""
    while isinstance(result := await append_one(log, subject, one), Unknown):
        pass
    return result


async def stored(log: Log, subject: str, one: Batch[Any]) -> int:
    """Append a batch that must be taken at once; returns its position."""
    result = await append_one(log, subject, one)
    assert isinstance(result, Stored), result
    return result.position
