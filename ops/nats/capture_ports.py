"""A capture as the ports of a namespace: whatever reads a fleet's logs reads a file's, and does not know the difference.

Nothing can be written. A log's first position is that of the captured part. Its end is its end for good: a reader that
follows it waits until it is cancelled.
"""

import asyncio
from bisect import bisect_right
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Final

from headwater.actors.runtime.ports import MemoryBus, Ports
from headwater.events.memory import MemoryTable
from headwater.events.ports import (
    NOTHING,
    AppendResult,
    Bounds,
    Entry,
    Gap,
    Log,
    LogRefused,
    Newest,
    Retention,
    Slice,
    StoredMessage,
    StreamMissing,
    sha256,
    wrong_bytes,
)
from headwater.ops.nats.capture_file import CaptureFile, LogEntry, TableValue, chunk_after
from headwater.schemas.clock import Clock, SystemClock
from headwater.schemas.encoding import Sealed, UnreadableBatch, decode_batch
from headwater.schemas.subjects import matches

SLICE_RECORDS_MAX: Final = 256

READ_ONLY: Final = "a capture is read-only"
NOT_CAPTURED: Final = "not in the capture"
GONE: Final = "gone when the capture was made"
SHORTER: Final = "the capture ends before the requested position"


class CapturedLog:
    """`Log` of a capture. See `headwater.events.ports.Log`."""

    def __init__(self, file: CaptureFile, entry: LogEntry) -> None:
        self._file = file
        self._entry = entry

    async def append(self, *entries: Entry, deadline_s: float = 5.0) -> AppendResult:
        """Raises `LogRefused`."""
        raise LogRefused(READ_ONLY)

    async def ingest(
        self, subject: str, *messages: Sealed, fence: str, deadline_s: float = 5.0
    ) -> AppendResult:
        """Raises `LogRefused`."""
        raise LogRefused(READ_ONLY)

    async def newest(self, subject: str) -> Newest:
        """See `Log.newest`: of what was captured."""
        for number in range(len(self._entry.chunks) - 1, -1, -1):
            for message in reversed(self._file.chunk(self._entry.chunks[number]).messages):
                if message.subject == subject:
                    try:
                        batch = decode_batch(message.data)
                    except UnreadableBatch:
                        continue
                    return Newest(message.position, batch.writer, batch.epoch, batch.seq, batch.digest)
        return NOTHING

    async def read(self, after: int, *, follow: bool) -> AsyncIterator[Slice]:
        """See `Log.read`."""
        first, last = await self.bounds()
        gap = None
        if after > last:
            gap, after = Gap(last + 1, after, SHORTER), last
        elif after + 1 < first:
            gap, after = Gap(after + 1, first - 1, NOT_CAPTURED), first - 1
        remaining = self._left_after(after)
        if gap is not None or not remaining:
            yield Slice([], remaining, gap)
        for run in self._runs(after, last):
            for part in _without_holes(run):
                hole = Gap(after + 1, part[0].position - 1, GONE) if part[0].position > after + 1 else None
                after = part[-1].position
                remaining -= len(part)
                yield Slice.decode(part, remaining, hole)
        if follow:
            await asyncio.Event().wait()

    async def scan(self, after: int, until: int, subjects: Sequence[str] = ()) -> AsyncIterator[Slice]:
        """See `Log.scan`. `lag` is exact where it is 0; with subjects, it counts those of others otherwise."""
        held: list[StoredMessage] = []
        remaining = self._left_after(after)
        async for run in self.scan_raw(after, until, subjects):
            if held:
                yield Slice.decode(held, max(1, remaining), None)
            held, remaining = run, self._left_after(run[-1].position)
        if held:
            yield Slice.decode(held, 0, None)

    async def scan_raw(
        self, after: int, until: int, subjects: Sequence[str] = ()
    ) -> AsyncIterator[list[StoredMessage]]:
        """See `Log.scan_raw`."""
        selected: dict[str, bool] = {}
        for run in self._runs(after, until):
            if subjects:
                for message in run:
                    if message.subject not in selected:
                        selected[message.subject] = any(
                            matches(pattern, message.subject) for pattern in subjects
                        )
                run = [message for message in run if selected[message.subject]]
            if run:
                yield run
                # One task must not hold the others up for the whole of a log.
                await asyncio.sleep(0)

    def _runs(self, after: int, until: int) -> Iterator[list[StoredMessage]]:
        for number in range(chunk_after(self._entry, after), len(self._entry.chunks)):
            entry = self._entry.chunks[number]
            if entry.first > until:
                return
            positions, messages = self._file.chunk(entry)
            start, end = bisect_right(positions, after), bisect_right(positions, until)
            for at in range(start, end, SLICE_RECORDS_MAX):
                yield messages[at : min(at + SLICE_RECORDS_MAX, end)]

    def _left_after(self, position: int) -> int:
        """How many messages there are after a position."""
        number = chunk_after(self._entry, position)
        if number == len(self._entry.chunks):
            return 0
        rest = sum(chunk.count for chunk in self._entry.chunks[number + 1 :])
        entry = self._entry.chunks[number]
        if position < entry.first:
            return rest + entry.count
        return rest + entry.count - bisect_right(self._file.chunk(entry).positions, position)

    async def position_at(self, wall_ns: int) -> int:
        """See `Log.position_at`."""
        chunks = self._entry.chunks
        number = bisect_right(chunks, wall_ns, key=lambda entry: entry.first_ns) - 1
        if number < 0:
            return self._entry.after
        messages = self._file.chunk(chunks[number]).messages
        return messages[bisect_right(messages, wall_ns, key=lambda entry: entry.stored_ns) - 1].position

    async def bounds(self) -> Bounds:
        """See `Log.bounds`."""
        return Bounds(self._entry.after + 1, self._entry.last)

    async def identity(self) -> str:
        """See `Log.identity`: that of the log that was captured."""
        return self._entry.identity

    async def retention(self, after: int) -> Retention:
        """See `Log.retention`. A file has no limits, and nothing in it becomes older."""
        first, last = await self.bounds()
        return Retention(first, last, self._entry.bytes, 0, 0, 0.0, 0.0)


def _without_holes(run: list[StoredMessage]) -> Iterator[list[StoredMessage]]:
    """The run, cut where positions are missing."""
    start = 0
    for at in range(1, len(run) + 1):
        if at == len(run) or run[at].position != run[at - 1].position + 1:
            yield run[start:at]
            start = at


class CapturedBlobs:
    """`Blobs` of a capture."""

    def __init__(self, file: CaptureFile) -> None:
        self._file = file

    async def put(self, name: str, data: bytes | memoryview) -> str:
        """Raises `LogRefused`."""
        raise LogRefused(READ_ONLY)

    async def get(self, name: str) -> bytes | None:
        """See `Blobs.get`."""
        return self._file.blob(name)

    async def read_into(self, name: str, into: memoryview, digest: str) -> bool:
        """See `Blobs.read_into`."""
        data = self._file.blob(name)
        if data is None:
            return False
        if len(data) != len(into) or sha256(data) != digest:
            raise LogRefused(wrong_bytes(name))
        into[:] = data
        return True

    async def has(self, name: str) -> bool:
        """See `Blobs.has`."""
        return name in self._file.blob_names

    async def names(self, prefix: str) -> list[str]:
        """See `Blobs.names`."""
        return [name for name in self._file.blob_names if name.startswith(prefix)]

    async def delete(self, name: str) -> None:
        """Raises `LogRefused`."""
        raise LogRefused(READ_ONLY)


async def _table(clock: Clock, values: Sequence[TableValue] = ()) -> MemoryTable:
    table = MemoryTable(clock)
    for entry in values:
        await table.put(entry.key, entry.value)
    return table


class CaptureClock(SystemClock):
    """A clock that shows the end of what was captured: "a minute ago" is a minute before that."""

    def __init__(self, end_ns: int) -> None:
        self._end_ns = end_ns

    def wall_ns(self) -> int:
        """The end of the captured time, in nanoseconds since the Unix epoch."""
        return self._end_ns


@asynccontextmanager
async def capture_ports(path: Path) -> AsyncIterator[Ports]:
    """The ports of the namespace that was captured, as they were then. Raises `ConfigError`."""
    file = CaptureFile(path)
    contents, numbers = file.contents, count(1)
    clock = CaptureClock(contents.end_ns)

    async def pool_log(pool: str) -> Log:
        if pool != contents.pool:
            raise StreamMissing(f"the capture is of pool {contents.pool}, and has no log of pool {pool}")
        return CapturedLog(file, contents.pool_log)

    async def pool_logs() -> list[str]:
        return [contents.pool]

    try:
        yield Ports(
            ns=contents.namespace,
            bus=MemoryBus(),
            leases=await _table(clock, contents.leases),
            cards=await _table(clock, contents.cards),
            api_keys=await _table(clock),
            secrets=await _table(clock),
            blobs=CapturedBlobs(file),
            stored=await _table(clock),
            videos=await _table(clock),
            requests=CapturedLog(file, contents.request_log),
            pool_log=pool_log,
            clock=clock,
            ids=lambda: f"captured{next(numbers)}",
            pool_logs=pool_logs,
            server=contents.server,
        )
    finally:
        file.close()
