"""The ports in memory: same contracts, no server. For tests and the simulator."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from headwater.events.log import AppendResult, Bounds, Fenced, Gap, Record, Slice, Stored, Unreadable
from headwater.events.table import Entry
from headwater.schemas.clock import Clock
from headwater.schemas.envelope import Batch
from headwater.schemas.pool import UnreadableBatch, decode_batch, encode_batch

SLICE_RECORDS_MAX = 256


class MemoryLog:
    """`Log` in memory. Batches go through the real codec, so what cannot be encoded cannot be appended."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._first = 1
        self._messages: list[tuple[str, int, bytes]] = []
        self._last_of: dict[str, tuple[str, int, int, int]] = {}
        self._grown = asyncio.Event()

    async def append(self, subject: str, batch: Batch[Any], *, deadline_s: float = 5.0) -> AppendResult:
        """See `Log.append`."""
        data = encode_batch(batch)
        last = self._last_of.get(subject)
        if last is not None:
            writer, epoch, seq, position = last
            if epoch > batch.epoch:
                return Fenced(epoch)
            if (writer, epoch) == (batch.writer, batch.epoch) and seq >= batch.seq:
                return Stored(position, again=True)
        self._messages.append((subject, self._clock.wall_ns(), data))
        position = self._first + len(self._messages) - 1
        self._last_of[subject] = (batch.writer, batch.epoch, batch.seq, position)
        grown, self._grown = self._grown, asyncio.Event()
        grown.set()
        return Stored(position)

    async def read(self, after: int, *, follow: bool) -> AsyncIterator[Slice]:
        """See `Log.read`."""
        until = (await self.bounds()).last
        told = False
        while True:
            first, last = await self.bounds()
            gap = None
            if after + 1 < first:
                gap = Gap(after + 1, first - 1, "purged")
                after = first - 1
            elif after > last:
                gap = Gap(last + 1, after, "the log is shorter than the position asked for")
                after = last
            stop = min(last, after + SLICE_RECORDS_MAX)
            records: list[Record] = []
            unreadable: list[Unreadable] = []
            for position in range(after + 1, stop + 1):
                subject, stored_ns, data = self._messages[position - self._first]
                try:
                    records.append(Record(position, subject, stored_ns, decode_batch(data)))
                except UnreadableBatch as error:
                    unreadable.append(Unreadable(position, subject, str(error)))
            after = stop
            if records or unreadable or gap or not told:
                told = True
                yield Slice(records, last - after, gap, tuple(unreadable))
            elif not follow and after >= until:
                return
            else:
                await self._grown.wait()

    async def bounds(self) -> Bounds:
        """See `Log.bounds`."""
        return Bounds(self._first, self._first + len(self._messages) - 1)

    def purge(self, before: int) -> None:
        """Forget positions below `before`, as retention would."""
        drop = max(0, min(before - self._first, len(self._messages)))
        del self._messages[:drop]
        self._first += drop


class MemoryTable:
    """`Table` in memory. Entries with a time to live expire on the passed clock."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._revision = 0
        self._entries: dict[str, tuple[bytes, int, float]] = {}
        self._changes: list[Entry] = []
        self._changed = asyncio.Event()

    async def create(self, key: str, value: bytes, *, ttl_s: int = 0) -> int | None:
        """See `Table.create`."""
        self.expire()
        return None if key in self._entries else self._store(key, value, ttl_s)

    async def update(self, key: str, value: bytes, *, revision: int, ttl_s: int = 0) -> int | None:
        """See `Table.update`."""
        self.expire()
        held = self._entries.get(key)
        return self._store(key, value, ttl_s) if held and held[1] == revision else None

    async def put(self, key: str, value: bytes) -> int:
        """See `Table.put`."""
        return self._store(key, value, 0)

    async def delete(self, key: str) -> None:
        """See `Table.delete`."""
        if self._entries.pop(key, None) is not None:
            self._note(key, None)

    async def get(self, key: str) -> Entry | None:
        """See `Table.get`."""
        self.expire()
        held = self._entries.get(key)
        return Entry(key, held[0], held[1]) if held else None

    async def watch(self) -> AsyncIterator[list[Entry]]:
        """See `Table.watch`."""
        self.expire()
        seen = len(self._changes)
        yield [Entry(key, held[0], held[1]) for key, held in self._entries.items()]
        while True:
            if seen == len(self._changes):
                await self._changed.wait()
            fresh = self._changes[seen:]
            seen += len(fresh)
            yield fresh

    def expire(self) -> None:
        """Drop what is past its time. Whoever moves the clock calls this."""
        now = self._clock.monotonic_s()
        for key in [key for key, held in self._entries.items() if held[2] <= now]:
            del self._entries[key]
            self._note(key, None)

    def _store(self, key: str, value: bytes, ttl_s: int) -> int:
        until = self._clock.monotonic_s() + ttl_s if ttl_s else float("inf")
        self._entries[key] = (value, self._revision + 1, until)
        self._note(key, value)
        return self._revision

    def _note(self, key: str, value: bytes | None) -> None:
        self._revision += 1
        self._changes.append(Entry(key, value, self._revision))
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


class MemoryBlobs:
    """`Blobs` in memory."""

    def __init__(self) -> None:
        self._objects: dict[str, bytes] = {}

    async def put(self, name: str, data: bytes) -> None:
        """See `Blobs.put`."""
        self._objects[name] = bytes(data)

    async def get(self, name: str) -> bytes | None:
        """See `Blobs.get`."""
        return self._objects.get(name)

    async def has(self, name: str) -> bool:
        """See `Blobs.has`."""
        return name in self._objects

    async def names(self, prefix: str) -> list[str]:
        """See `Blobs.names`."""
        return sorted(name for name in self._objects if name.startswith(prefix))

    async def delete(self, name: str) -> None:
        """See `Blobs.delete`."""
        self._objects.pop(name, None)
