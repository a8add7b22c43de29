"""`Table` and `Blobs` in memory: same contracts, no server. For tests and the simulator."""

import asyncio
from collections.abc import AsyncIterator

from headwater.events.blobs import sha256, wrong_bytes
from headwater.events.errors import LogRefused
from headwater.events.table import KeySize, TableEntry
from headwater.schemas.clock import Clock


class MemoryTable:
    """`Table` in memory. Entries with a time to live expire on the passed clock."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._revision = 0
        self._entries: dict[str, tuple[bytes, int, float]] = {}
        self._changes: list[TableEntry] = []
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

    async def put(self, key: str, value: bytes, *, ttl_s: int = 0) -> int:
        """See `Table.put`."""
        return self._store(key, value, ttl_s)

    async def delete(self, key: str, *, marker_s: int = 0) -> None:
        """See `Table.delete`. There are no markers."""
        del marker_s
        if self._entries.pop(key, None) is not None:
            self._note(key, None)

    async def get(self, key: str) -> TableEntry | None:
        """See `Table.get`."""
        self.expire()
        held = self._entries.get(key)
        return TableEntry(key, held[0], held[1]) if held else None

    async def sizes(self, prefix: str) -> list[KeySize]:
        """See `Table.sizes`."""
        self.expire()
        found = [
            KeySize(key, len(held[0]), held[1])
            for key, held in self._entries.items()
            if key.startswith(prefix + ".")
        ]
        return sorted(found, key=lambda one: one.revision)

    async def watch(self) -> AsyncIterator[list[TableEntry]]:
        """See `Table.watch`."""
        self.expire()
        seen = len(self._changes)
        yield [TableEntry(key, held[0], held[1]) for key, held in self._entries.items()]
        while True:
            if seen == len(self._changes):
                await self._changed.wait()
            fresh = self._changes[seen:]
            seen += len(fresh)
            yield fresh

    def replace(self) -> None:
        """Delete and re-create the table: it is empty, and revisions start again."""
        self.expire()
        for key in [*self._entries]:
            self._revision = self._entries.pop(key)[1]
            self._note(key, None, lost=True)
        self._revision = 0

    def expire(self) -> None:
        """Remove expired entries. To be called when a virtual clock is advanced."""
        now = self._clock.monotonic_s()
        for key in [key for key, held in self._entries.items() if held[2] <= now]:
            del self._entries[key]
            self._note(key, None)

    def _store(self, key: str, value: bytes, ttl_s: int) -> int:
        until = self._clock.monotonic_s() + ttl_s if ttl_s else float("inf")
        self._entries[key] = (value, self._revision + 1, until)
        self._note(key, value)
        return self._revision

    def _note(self, key: str, value: bytes | None, *, lost: bool = False) -> None:
        self._revision += 1
        self._changes.append(TableEntry(key, value, self._revision, lost))
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


class MemoryBlobs:
    """`Blobs` in memory."""

    def __init__(self) -> None:
        self._objects: dict[str, bytes] = {}

    async def put(self, name: str, data: bytes | memoryview) -> str:
        """See `Blobs.put`."""
        self._objects[name] = bytes(data)
        return sha256(data)

    async def get(self, name: str) -> bytes | None:
        """See `Blobs.get`."""
        return self._objects.get(name)

    async def read_into(self, name: str, into: memoryview, digest: str) -> bool:
        """See `Blobs.read_into`."""
        data = self._objects.get(name)
        if data is None:
            return False
        if len(data) != len(into) or sha256(data) != digest:
            raise LogRefused(wrong_bytes(name))
        into[:] = data
        return True

    async def has(self, name: str) -> bool:
        """See `Blobs.has`."""
        return name in self._objects

    async def names(self, prefix: str) -> list[str]:
        """See `Blobs.names`."""
        return sorted(name for name in self._objects if name.startswith(prefix))

    async def delete(self, name: str) -> None:
        """See `Blobs.delete`."""
        self._objects.pop(name, None)
