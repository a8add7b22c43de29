"""`Log` in memory: the same contract, no server. For tests and the simulator."""

import asyncio
from collections.abc import AsyncIterator
from typing import NamedTuple

from headwater.events.log import (
    ATOMIC_MESSAGES_MAX,
    NOTHING,
    AppendResult,
    Bounds,
    Entry,
    Fenced,
    Gap,
    Newest,
    Record,
    Retention,
    Slice,
    Stored,
    Unreadable,
)
from headwater.schemas.clock import Clock
from headwater.schemas.encoding.codec import UnreadableBatch, decode_batch
from headwater.schemas.encoding.envelope import Sealed

SLICE_RECORDS_MAX = 256
REPLACED = "the stream was replaced"


class MemoryMessage(NamedTuple):
    """One stored message."""

    subject: str
    stored_ns: int
    data: bytes


class MemoryLog:
    """`Log` in memory. Messages pass through the real codec, so unreadable ones behave as on JetStream."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._first = 1
        self._messages: list[MemoryMessage] = []
        self._newest: dict[str, Newest] = {}
        self._grown = asyncio.Event()
        self._life = 1

    async def append(self, *entries: Entry, deadline_s: float = 5.0) -> AppendResult:
        """See `Log.append`."""
        if not 1 <= len(entries) <= ATOMIC_MESSAGES_MAX:
            raise ValueError(f"an append accepts 1 to {ATOMIC_MESSAGES_MAX} messages, got {len(entries)}")
        for subject, message in entries:
            known = self._newest.get(subject, NOTHING)
            if known.epoch > message.epoch:
                return Fenced(known.epoch)
        fresh = [entry for entry in entries if not self._has(entry.subject, entry.message)]
        for subject, message in fresh:
            self._store(subject, message)
        if fresh:
            self._wake_readers()
        return Stored(self._newest[entries[-1].subject].position, again=not fresh)

    async def ingest(
        self, subject: str, *messages: Sealed, fence: str, deadline_s: float = 5.0
    ) -> AppendResult:
        """See `Log.ingest`."""
        if not 1 <= len(messages) <= ATOMIC_MESSAGES_MAX:
            raise ValueError(f"an ingest accepts 1 to {ATOMIC_MESSAGES_MAX} messages, got {len(messages)}")
        fenced = max(self._newest.get(one, NOTHING).epoch for one in (fence, subject))
        if fenced > messages[-1].epoch:
            return Fenced(fenced)
        fresh = [message for message in messages if not self._has(subject, message)]
        for message in fresh:
            self._store(subject, message)
        if fresh:
            self._wake_readers()
        return Stored(self._newest[subject].position, again=not fresh)

    async def newest(self, subject: str) -> Newest:
        """See `Log.newest`."""
        return self._newest.get(subject, NOTHING)

    def _has(self, subject: str, message: Sealed) -> bool:
        known = self._newest.get(subject, NOTHING)
        return (known.writer, known.epoch) == (message.writer, message.epoch) and known.seq >= message.seq

    def _store(self, subject: str, message: Sealed) -> None:
        self._messages.append(MemoryMessage(subject, self._clock.wall_ns(), message.data))
        position = self._first + len(self._messages) - 1
        self._newest[subject] = Newest(position, message.writer, message.epoch, message.seq, message.digest)

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
            records: list[Record] = []
            unreadable: list[Unreadable] = []
            for position in range(after + 1, stop + 1):
                subject, stored_ns, data = self._messages[position - self._first]
                try:
                    records.append(Record(position, subject, stored_ns, decode_batch(data)))
                except UnreadableBatch as error:
                    unreadable.append(Unreadable(position, subject, str(error)))
            after = max(after, stop)
            if records or unreadable or gap or not reported:
                reported = True
                yield Slice(records, last - after, gap, tuple(unreadable))
            elif not follow and after >= until:
                return
            else:
                await self._grown.wait()

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

    def raw(self, position: int) -> MemoryMessage:
        """The stored bytes of a message."""
        return self._messages[position - self._first]

    def _wake_readers(self) -> None:
        grown, self._grown = self._grown, asyncio.Event()
        grown.set()
