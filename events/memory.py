"""The ports in memory: `Log`, `Table` and `Blobs` with the same contracts and no server. For tests and the simulator."""

import asyncio
from bisect import bisect_right
from collections.abc import AsyncIterator, Iterator, Sequence

from headwater.events.ports import (
    NOTHING,
    AppendResult,
    Bounds,
    Entry,
    Fenced,
    Gap,
    LogRefused,
    Newest,
    Retention,
    Slice,
    Stored,
    StoredMessage,
    check_count,
    sha256,
    wrong_bytes,
)
from headwater.events.table import KeySize, TableEntry
from headwater.schemas.clock import Clock
from headwater.schemas.encoding import Sealed
from headwater.schemas.subjects import matches

SLICE_RECORDS_MAX = 256
REPLACED = "the stream was replaced"


class MemoryLog:
    """`Log` in memory. Messages pass through the real codec, so unreadable ones behave as on JetStream."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._first = 1
        self._messages: list[StoredMessage] = []
        self._newest: dict[str, Newest] = {}
        self._grown = asyncio.Event()
        self._life = 1

    async def append(self, *entries: Entry, deadline_s: float = 5.0) -> AppendResult:
        """See `Log.append`."""
        check_count("an append", len(entries))
        for subject, message in entries:
            epoch = self._newest.get(subject, NOTHING).epoch
            if epoch > message.epoch:
                return Fenced(epoch)
        return self._store(entries)

    async def ingest(
        self, subject: str, *messages: Sealed, fence: str, deadline_s: float = 5.0
    ) -> AppendResult:
        """See `Log.ingest`."""
        check_count("an ingest", len(messages))
        epoch = max(self._newest.get(fenced_subject, NOTHING).epoch for fenced_subject in (fence, subject))
        if epoch > messages[-1].epoch:
            return Fenced(epoch)
        return self._store([Entry(subject, message) for message in messages])

    async def newest(self, subject: str) -> Newest:
        """See `Log.newest`."""
        return self._newest.get(subject, NOTHING)

    def _store(self, entries: Sequence[Entry]) -> Stored:
        """Store what is not stored yet."""
        fresh = [
            (subject, message)
            for subject, message in entries
            if not self._newest.get(subject, NOTHING).has(message)
        ]
        for subject, message in fresh:
            position = self._first + len(self._messages)
            stored_ns = self._clock.wall_ns()
            self._messages.append(StoredMessage(position, subject, stored_ns, message.data))
            self._newest[subject] = Newest.of(position, message)
        if fresh:
            self._wake_readers()
        return Stored(self._newest[entries[-1].subject].position, again=not fresh)

    async def read(self, after: int, *, follow: bool) -> AsyncIterator[Slice]:
        """See `Log.read`."""
        until = (await self.bounds()).last
        reported = False
        life = self._life
        while True:
            first, last = await self.bounds()
            gap = None
            if life != self._life:
                gap, after, life = Gap(1, after, REPLACED), 0, self._life
            elif after + 1 < first:
                gap = Gap(after + 1, first - 1, "purged")
                after = first - 1
            elif after > last:
                gap = Gap(last + 1, after, "the log is shorter than the position asked for")
                after = last
            stop = min(last, after + SLICE_RECORDS_MAX)
            found = self._messages[after + 1 - self._first : stop + 1 - self._first]
            after = max(after, stop)
            if found or gap or not reported:
                reported = True
                yield Slice.decode(found, last - after, gap)
            elif not follow and after >= until:
                return
            else:
                await self._grown.wait()

    async def scan(self, after: int, until: int, subjects: Sequence[str] = ()) -> AsyncIterator[Slice]:
        """See `Log.scan`."""
        for found, lag in self._runs(after, until, subjects):
            yield Slice.decode(found, lag)

    async def scan_raw(
        self, after: int, until: int, subjects: Sequence[str] = ()
    ) -> AsyncIterator[list[StoredMessage]]:
        """See `Log.scan_raw`."""
        for found, _ in self._runs(after, until, subjects):
            yield found

    def _runs(
        self, after: int, until: int, subjects: Sequence[str]
    ) -> Iterator[tuple[list[StoredMessage], int]]:
        """Messages of a scan that are delivered together, and how many come after them."""
        first, end = max(0, after + 1 - self._first), max(0, until + 1 - self._first)
        wanted = [
            message
            for message in self._messages[first:end]
            if not subjects or any(matches(pattern, message.subject) for pattern in subjects)
        ]
        for start in range(0, len(wanted), SLICE_RECORDS_MAX):
            run = wanted[start : start + SLICE_RECORDS_MAX]
            # Since the scan began, retention may have removed some.
            yield [one for one in run if one.position >= self._first], len(wanted) - start - len(run)

    async def position_at(self, wall_ns: int) -> int:
        """See `Log.position_at`."""
        return self._first - 1 + bisect_right(self._messages, wall_ns, key=lambda message: message.stored_ns)

    async def bounds(self) -> Bounds:
        """See `Log.bounds`."""
        return Bounds(self._first, self._first + len(self._messages) - 1)

    async def identity(self) -> str:
        """See `Log.identity`."""
        return f"life {self._life}"

    async def retention(self, after: int) -> Retention:
        """See `Log.retention`. Memory has no limits."""
        first, last = await self.bounds()
        next_age_s = 0.0
        if after < last:
            stored_ns = self._messages[max(after + 1, first) - first].stored_ns
            next_age_s = (self._clock.wall_ns() - stored_ns) / 1e9
        size = sum(len(message.data) for message in self._messages)
        return Retention(first, last, size, 0, 0, 0.0, next_age_s)

    def purge(self, before: int) -> None:
        """Remove positions below `before`, as retention would."""
        drop = max(0, min(before - self._first, len(self._messages)))
        del self._messages[:drop]
        self._first += drop
        self._wake_readers()

    def replace(self) -> None:
        """Become another log under the same name, without messages: deleted and re-created."""
        self._first, self._messages, self._newest = 1, [], {}
        self._life += 1
        self._wake_readers()

    def alter(self, position: int, data: bytes) -> None:
        """Replace a message's bytes, as a faulty disk would."""
        at = position - self._first
        self._messages[at] = self._messages[at]._replace(data=data)

    def raw(self, position: int) -> StoredMessage:
        """A message as it is stored."""
        return self._messages[position - self._first]

    def _wake_readers(self) -> None:
        grown, self._grown = self._grown, asyncio.Event()
        grown.set()


# `Table` and `Blobs`.


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
        key_sizes = [
            KeySize(key, len(held[0]), held[1])
            for key, held in self._entries.items()
            if key.startswith(prefix + ".")
        ]
        return sorted(key_sizes, key=lambda key_size: key_size.revision)

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
