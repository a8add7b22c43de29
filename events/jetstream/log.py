"""`Log` on a JetStream stream.

The fence: every append expects the last sequence of a subject, so of two lives of one writer only the one that
wrote last can go on; the other finds a higher epoch there and learns that it is fenced. An atomic append expects it
of the subjects it writes; an ingest, whose messages follow each other unseen, of the fence subject, where a life
writes before anything else. A retried message carries the same message id, and a lost acknowledgement turns into
`Stored(again=True)`.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack

from nats.aio.client import Client

from headwater.events.errors import LogFull, LogRefused, LogUnavailable, StreamMissing
from headwater.events.jetstream.api import SUBJECT_BUSY, WRONG_LAST_SEQUENCE, api, last_message
from headwater.events.jetstream.atomic import Part, publish_together
from headwater.events.jetstream.cursor import Cursor, Raw, StreamReplaced
from headwater.events.jetstream.ingest import Ingest
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
    Slice,
    Stored,
    Unknown,
    Unreadable,
)
from headwater.schemas.envelope import NO_DIGEST, Sealed
from headwater.schemas.pool import UnreadableBatch, decode_batch

TRY_S = 2.0
"""How long one try waits for its acknowledgement before it is sent again."""

PAUSE_S = 0.05

SHORTER = "the log is shorter than the position asked for"

_EXPECTED = "Nats-Expected-Last-Subject-Sequence"


class _Stale(Exception):
    """Somebody wrote in between, or our own earlier try did: look, then decide."""


class JetStreamLog:
    """See `headwater.events.log.Log`."""

    def __init__(self, client: Client, stream: str) -> None:
        self._client = client
        self._stream = stream
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._newest: dict[str, Newest] = {}
        self._ingest = Ingest(client)

    async def append(self, *entries: Entry, deadline_s: float = 5.0) -> AppendResult:
        """See `Log.append`. Raises `StreamMissing` when the stream was deleted."""
        if not 1 <= len(entries) <= ATOMIC_MESSAGES_MAX:
            raise ValueError(f"an append takes 1 to {ATOMIC_MESSAGES_MAX} messages, got {len(entries)}")
        touched = sorted({entry.subject for entry in entries})
        return await self._until_known(touched, deadline_s, lambda left: self._append_once(entries, left))

    async def ingest(
        self, subject: str, *messages: Sealed, fence: str, deadline_s: float = 5.0
    ) -> AppendResult:
        """See `Log.ingest`. Raises `StreamMissing` when the stream was deleted."""
        return await self._until_known(
            [subject], deadline_s, lambda left: self._ingest_once(subject, messages, fence, left)
        )

    async def _until_known(
        self, touched: list[str], deadline_s: float, attempt: Callable[[float], Awaitable[AppendResult]]
    ) -> AppendResult:
        """Try until the outcome is known or the deadline has passed, alone on the touched subjects."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + deadline_s
        reason = "no try was made"
        async with AsyncExitStack() as held:
            try:
                async with asyncio.timeout_at(deadline):
                    # Sorted, so that two appends never wait for each other.
                    for subject in touched:
                        await held.enter_async_context(self._locks[subject])
            except TimeoutError:
                return Unknown("the append before it is still under way")
            while (left := deadline - loop.time()) > 0:
                try:
                    return await attempt(min(TRY_S, left))
                except LogFull:
                    raise
                except (LogUnavailable, _Stale) as error:
                    reason = str(error)
                except LogRefused as error:
                    if error.code not in (WRONG_LAST_SEQUENCE, SUBJECT_BUSY):
                        raise
                    reason = str(error)
                # Whether anything was stored is not known: the next try must look.
                for subject in touched:
                    self._newest.pop(subject, None)
                await asyncio.sleep(PAUSE_S)
        return Unknown(reason)

    async def _append_once(self, entries: tuple[Entry, ...], deadline_s: float) -> AppendResult:
        parts: list[Part] = []
        there = Stored(0)
        written: set[str] = set()
        for subject, message in entries:
            newest = await self._known(subject, deadline_s)
            if newest.epoch > message.epoch:
                return Fenced(newest.epoch)
            if _has(newest, message):
                there = Stored(newest.position, again=True)
            headers = {"Nats-Msg-Id": f"{subject}/{message.writer}/{message.epoch}/{message.seq}"}
            if subject not in written:
                headers[_EXPECTED] = str(newest.position)
                written.add(subject)
            parts.append(Part(subject, message.data, headers))
        if there.again:
            return there
        ack = await publish_together(self._client, parts, deadline_s)
        if ack.duplicate:
            raise _Stale("an earlier try got through")
        first = ack.seq - len(entries) + 1
        for position, (subject, message) in enumerate(entries, start=first):
            self._newest[subject] = _newest_of(position, message)
        return Stored(ack.seq)

    async def _ingest_once(
        self, subject: str, messages: tuple[Sealed, ...], fence: str, deadline_s: float
    ) -> AppendResult:
        guard = await self._known(fence, deadline_s)
        newest = await self._known(subject, deadline_s)
        epoch = messages[-1].epoch
        if max(guard.epoch, newest.epoch) > epoch:
            return Fenced(max(guard.epoch, newest.epoch))
        fresh = [message for message in messages if not _has(newest, message)]
        if not fresh:
            return Stored(newest.position, again=True)

        def headers(index: int) -> dict[str, str]:
            message = fresh[index]
            return {
                "Nats-Msg-Id": f"{subject}/{message.writer}/{message.epoch}/{message.seq}",
                _EXPECTED: str(guard.position),
                f"{_EXPECTED}-Subject": fence,
            }

        done = await self._ingest.send(subject, [one.data for one in fresh], headers, deadline_s)
        if done.error is None and done.stored == len(fresh):
            self._newest[subject] = _newest_of(done.position, fresh[-1])
            return Stored(done.position)
        # The fence may have moved with this very life: it writes there too.
        self._newest.pop(fence, None)
        raise done.error or _Stale(f"{done.stored} of {len(fresh)} messages were taken")

    async def _known(self, subject: str, deadline_s: float) -> Newest:
        newest = self._newest.get(subject)
        if newest is None:
            newest = self._newest[subject] = await self._look_up(subject, deadline_s)
        return newest

    async def _look_up(self, subject: str, deadline_s: float) -> Newest:
        last = await last_message(self._client, self._stream, subject, deadline_s)
        if last is None:
            return NOTHING
        try:
            batch = decode_batch(last.data)
        except UnreadableBatch:
            return Newest(last.seq, "", 0, 0, NO_DIGEST)
        return Newest(last.seq, batch.writer, batch.epoch, batch.seq, batch.digest)

    async def newest(self, subject: str) -> Newest:
        """See `Log.newest`."""
        return await self._look_up(subject, TRY_S)

    async def read(self, after: int, *, follow: bool) -> AsyncIterator[Slice]:
        """See `Log.read`."""
        bounds = await self._bounds(follow=follow)
        until = bounds.last
        gap = None
        if after > bounds.last:
            gap = Gap(bounds.last + 1, after, SHORTER)
            after = bounds.last
        elif after + 1 < bounds.first:
            gap = Gap(after + 1, bounds.first - 1, "purged")
            after = bounds.first - 1
        if gap is not None:
            yield Slice([], until - after, gap)
        cursor = Cursor(self._client, self._stream)
        told = False
        try:
            if not follow and after >= until:
                yield Slice([], 0)
                return
            async for raw in self._messages(cursor, after):
                if isinstance(raw, Gap):
                    after = 0
                    yield Slice([], 0, raw)
                    continue
                if not raw:
                    if not told:
                        yield Slice([], 0)
                    told = True
                    continue
                told = True
                gap_before = None
                if raw[0].position > after + 1:
                    gap_before = Gap(after + 1, raw[0].position - 1, "purged")
                records: list[Record] = []
                unreadable: list[Unreadable] = []
                for message in raw:
                    try:
                        batch = decode_batch(message.data)
                    except UnreadableBatch as error:
                        unreadable.append(Unreadable(message.position, message.subject, str(error)))
                        continue
                    records.append(Record(message.position, message.subject, message.stored_ns, batch))
                after = raw[-1].position
                yield Slice(records, raw[-1].pending, gap_before, tuple(unreadable))
                if not follow and after >= until:
                    return
        finally:
            await cursor.aclose()

    async def _messages(self, cursor: Cursor, after: int) -> AsyncIterator[list[Raw] | Gap]:
        """What the cursor brings; a gap where the stream was replaced."""
        while True:
            try:
                async for raw in cursor.messages(after):
                    if raw:
                        after = raw[-1].position
                    yield raw
            except StreamReplaced as replaced:
                yield Gap(1, after, str(replaced))
                # Nothing of the new one was read yet.
                after = 0

    async def _bounds(self, *, follow: bool) -> Bounds:
        """Bounds; with `follow` an unreachable server is waited for."""
        while True:
            try:
                return await self.bounds()
            except LogUnavailable:
                if not follow:
                    raise
                await asyncio.sleep(PAUSE_S)

    async def bounds(self) -> Bounds:
        """See `Log.bounds`. Raises `StreamMissing` when the stream does not exist."""
        state = (await api(self._client, f"STREAM.INFO.{self._stream}"))["state"]
        last = int(state["last_seq"])
        first = int(state["first_seq"]) if int(state["messages"]) else last + 1
        return Bounds(max(first, 1), last)


def _newest_of(position: int, message: Sealed) -> Newest:
    return Newest(position, message.writer, message.epoch, message.seq, message.digest)


def _has(newest: Newest, message: Sealed) -> bool:
    """Is the message stored, its subject standing at `newest`?"""
    return (newest.writer, newest.epoch) == (message.writer, message.epoch) and newest.seq >= message.seq


__all__ = ["JetStreamLog", "StreamMissing"]
