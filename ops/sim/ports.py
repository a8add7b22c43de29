"""One process's side of the simulated store: the memory ports, with network latency and injected faults."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeVar

from headwater.events.memory import MemoryBlobs, MemoryLog, MemoryTable
from headwater.events.ports import (
    AppendResult,
    Bounds,
    Entry,
    LogFull,
    LogUnavailable,
    Newest,
    Retention,
    Slice,
    StoredMessage,
    Unknown,
)
from headwater.events.table import KeySize, TableEntry
from headwater.ops.sim.loop import VirtualLoop
from headwater.ops.sim.network import Network, NetworkTrace, Process
from headwater.schemas.encoding import Sealed

T = TypeVar("T")

REQUEST_S = 5.0
"""How long a request to the store waits for its answer."""


class Store:
    """The server's side: stored data, and active faults."""

    def __init__(self, loop: VirtualLoop, network: Network, draw: random.Random, trace: NetworkTrace) -> None:
        self.unavailable = 0
        self.answer_lost = 0.0
        self.full = 0
        self.clock = Process("server", loop)
        self.requests = MemoryLog(self.clock)
        self.pools: dict[str, MemoryLog] = {}
        self.leases = MemoryTable(self.clock)
        self.cards = MemoryTable(self.clock)
        self.api_keys = MemoryTable(self.clock)
        self.secrets = MemoryTable(self.clock)
        self.stored = MemoryTable(self.clock)
        self.videos = MemoryTable(self.clock)
        self.blobs = MemoryBlobs()
        self.loop = loop
        self.network = network
        self.trace = trace
        self._draw = draw

    def pool(self, name: str) -> MemoryLog:
        """The log of a pool."""
        if name not in self.pools:
            self.pools[name] = MemoryLog(self.clock)
        return self.pools[name]

    async def run_at_server(self, process: Process, wait_s: float, action: Callable[[], Awaitable[T]]) -> T:
        """Run `action` at the server. Raises `LogUnavailable` without a reply, whether it was run or not."""
        until = self.loop.time() + wait_s
        await asyncio.sleep(self.network.latency_s())
        if not process.alive or not process.connected or self.unavailable:
            await self._nothing(until, "the server does not answer")
        result = await action()
        if self._draw.random() < self.answer_lost:
            await self._nothing(until, "the reply was lost")
        await asyncio.sleep(self.network.latency_s())
        if not process.connected or not process.alive:
            await self._nothing(until, "the connection was lost")
        return result

    async def _nothing(self, until: float, reason: str) -> None:
        await asyncio.sleep(max(0.0, until - self.loop.time()))
        raise LogUnavailable(reason)


class SimLog:
    """See `headwater.events.ports.Log`."""

    def __init__(self, store: Store, log: MemoryLog, process: Process, name: str) -> None:
        self._store = store
        self._log = log
        self._process = process
        self._name = name

    async def append(self, *entries: Entry, deadline_s: float = 5.0) -> AppendResult:
        """See `Log.append`."""
        return await self._write(lambda: self._log.append(*entries), entries, deadline_s)

    async def ingest(
        self, subject: str, *messages: Sealed, fence: str, deadline_s: float = 5.0
    ) -> AppendResult:
        """See `Log.ingest`."""
        entries = tuple(Entry(subject, message) for message in messages)
        return await self._write(
            lambda: self._log.ingest(subject, *messages, fence=fence), entries, deadline_s
        )

    async def _write(
        self,
        action: Callable[[], Awaitable[AppendResult]],
        entries: tuple[Entry, ...],
        deadline_s: float,
    ) -> AppendResult:
        store = self._store

        async def at_server() -> AppendResult:
            if store.full:
                raise LogFull("no space left on the device")
            before = (await self._log.bounds()).last
            result = await action()
            if (await self._log.bounds()).last != before:
                for subject, message in entries:
                    store.trace("stored", self._process.name, subject, message.data)
            return result

        try:
            return await store.run_at_server(self._process, deadline_s, at_server)
        except LogFull:
            raise
        except LogUnavailable as error:
            return Unknown(str(error))

    async def newest(self, subject: str) -> Newest:
        """See `Log.newest`."""
        return await self._ask(lambda: self._log.newest(subject), 2.0)

    async def bounds(self) -> Bounds:
        """See `Log.bounds`."""
        return await self._ask(self._log.bounds)

    async def identity(self) -> str:
        """See `Log.identity`."""
        return await self._ask(self._log.identity)

    async def retention(self, after: int) -> Retention:
        """See `Log.retention`."""
        return await self._ask(lambda: self._log.retention(after))

    async def scan(self, after: int, until: int, subjects: Sequence[str] = ()) -> AsyncIterator[Slice]:
        """See `Log.scan`."""
        await self.bounds()
        async for piece in self._log.scan(after, until, subjects):
            yield piece

    async def scan_raw(
        self, after: int, until: int, subjects: Sequence[str] = ()
    ) -> AsyncIterator[list[StoredMessage]]:
        """See `Log.scan_raw`."""
        await self.bounds()
        async for run in self._log.scan_raw(after, until, subjects):
            yield run

    async def position_at(self, wall_ns: int) -> int:
        """See `Log.position_at`."""
        return await self._ask(lambda: self._log.position_at(wall_ns))

    async def _ask(self, action: Callable[[], Awaitable[T]], wait_s: float = REQUEST_S) -> T:
        return await self._store.run_at_server(self._process, wait_s, action)

    async def read(self, after: int, *, follow: bool) -> AsyncIterator[Slice]:
        """See `Log.read`. A disconnected reader resumes after its last position."""
        store, process = self._store, self._process
        if not follow:
            await self.bounds()
        async for piece in self._log.read(after, follow=follow):
            await asyncio.sleep(store.network.latency_s() + process.slow_reader_s)
            await process.reconnected()
            while store.unavailable:
                await asyncio.sleep(0.1)
            if not process.alive:
                await asyncio.Event().wait()
            yield piece


class SimTable:
    """See `headwater.events.table.Table`."""

    def __init__(self, store: Store, table: MemoryTable, process: Process) -> None:
        self._store = store
        self._table = table
        self._process = process

    async def create(self, key: str, value: bytes, *, ttl_s: int = 0) -> int | None:
        """See `Table.create`."""
        return await self._ask(lambda: self._table.create(key, value, ttl_s=ttl_s), ttl_s)

    async def update(self, key: str, value: bytes, *, revision: int, ttl_s: int = 0) -> int | None:
        """See `Table.update`."""
        return await self._ask(lambda: self._table.update(key, value, revision=revision, ttl_s=ttl_s), ttl_s)

    async def put(self, key: str, value: bytes, *, ttl_s: int = 0) -> int:
        """See `Table.put`."""
        return await self._ask(lambda: self._table.put(key, value, ttl_s=ttl_s), ttl_s)

    async def delete(self, key: str, *, marker_s: int = 0) -> None:
        """See `Table.delete`."""
        await self._ask(lambda: self._table.delete(key, marker_s=marker_s))

    async def get(self, key: str) -> TableEntry | None:
        """See `Table.get`."""
        return await self._ask(lambda: self._table.get(key))

    async def sizes(self, prefix: str) -> list[KeySize]:
        """See `Table.sizes`."""
        return await self._ask(lambda: self._table.sizes(prefix))

    async def watch(self) -> AsyncIterator[list[TableEntry]]:
        """See `Table.watch`."""
        async for entries in self._table.watch():
            await asyncio.sleep(self._store.network.latency_s())
            await self._process.reconnected()
            if not self._process.alive:
                await asyncio.Event().wait()
            yield entries

    async def _ask(self, action: Callable[[], Awaitable[T]], ttl_s: int = 0) -> T:
        async def at_server() -> T:
            result = await action()
            if ttl_s:
                self._store.loop.later(ttl_s, self._table.expire)
            return result

        return await self._store.run_at_server(self._process, REQUEST_S, at_server)


class SimBlobs:
    """See `headwater.events.ports.Blobs`."""

    def __init__(self, store: Store, process: Process) -> None:
        self._store = store
        self._process = process

    async def put(self, name: str, data: bytes | memoryview) -> str:
        """See `Blobs.put`."""
        return await self._ask(lambda: self._store.blobs.put(name, data))

    async def read_into(self, name: str, into: memoryview, digest: str) -> bool:
        """See `Blobs.read_into`."""
        return await self._ask(lambda: self._store.blobs.read_into(name, into, digest))

    async def has(self, name: str) -> bool:
        """See `Blobs.has`."""
        return await self._ask(lambda: self._store.blobs.has(name))

    async def get(self, name: str) -> bytes | None:
        """See `Blobs.get`."""
        return await self._ask(lambda: self._store.blobs.get(name))

    async def names(self, prefix: str) -> list[str]:
        """See `Blobs.names`."""
        return await self._ask(lambda: self._store.blobs.names(prefix))

    async def delete(self, name: str) -> None:
        """See `Blobs.delete`."""
        await self._ask(lambda: self._store.blobs.delete(name))

    async def _ask(self, action: Callable[[], Awaitable[T]]) -> T:
        return await self._store.run_at_server(self._process, REQUEST_S, action)
