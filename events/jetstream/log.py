"""`Log` on a JetStream stream.

The fence: every append expects the subject's last sequence, so of two lives of one writer only the one that
wrote last can go on; the other finds a higher epoch there and learns that it is fenced. A retried batch
carries the same message id, and a lost acknowledgement turns into `Stored(again=True)`.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

from nats.aio.client import Client

from headwater.events.errors import LogRefused, LogUnavailable, StreamMissing
from headwater.events.jetstream.api import (
    MESSAGE_NOT_FOUND,
    SUBJECT_BUSY,
    WRONG_LAST_SEQUENCE,
    api,
    last_message,
    publish,
)
from headwater.events.jetstream.cursor import Cursor, Raw, StreamReplaced
from headwater.events.jetstream.slices import PURGED, slices
from headwater.events.log import AppendResult, Bounds, Fenced, Gap, Slice, Stored, Unknown
from headwater.schemas.envelope import Batch
from headwater.schemas.pool import UnreadableBatch, decode_batch, encode_batch

TRY_S = 2.0
"""How long one try waits for its acknowledgement before it is sent again."""

PAUSE_S = 0.05

SHORTER = "the log is shorter than the position asked for"


class _Newest(NamedTuple):
    """The newest message of a subject, as far as this process knows: where, and whose."""

    position: int
    writer: str
    epoch: int
    seq: int


def _newest(position: int, data: bytes) -> _Newest:
    try:
        batch = decode_batch(data)
    except UnreadableBatch:
        return _Newest(position, "", 0, 0)
    return _Newest(position, batch.writer, batch.epoch, batch.seq)


class JetStreamLog:
    """See `headwater.events.log.Log`."""

    def __init__(self, client: Client, stream: str) -> None:
        self._client = client
        self._stream = stream
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._last: dict[str, _Newest] = {}

    async def append(self, subject: str, batch: Batch[Any], *, deadline_s: float = 5.0) -> AppendResult:
        """See `Log.append`. Raises `StreamMissing` when the stream was deleted."""
        data = encode_batch(batch)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + deadline_s
        reason = "no try was made"
        lock = self._locks[subject]
        try:
            async with asyncio.timeout_at(deadline):
                await lock.acquire()
        except TimeoutError:
            return Unknown("the append before it is still under way")
        try:
            while (left := deadline - loop.time()) > 0:
                try:
                    return await self._append_once(subject, batch, data, min(TRY_S, left))
                except LogUnavailable as error:
                    reason = str(error)
                except LogRefused as error:
                    if error.code not in (WRONG_LAST_SEQUENCE, SUBJECT_BUSY):
                        raise
                    reason = str(error)
                    # Somebody wrote in between, or our own earlier try did: look, then decide.
                    self._last.pop(subject, None)
                await asyncio.sleep(PAUSE_S)
        finally:
            lock.release()
        return Unknown(reason)

    async def _append_once(
        self, subject: str, batch: Batch[Any], data: bytes, deadline_s: float
    ) -> AppendResult:
        newest = self._last.get(subject)
        if newest is None:
            last = await last_message(self._client, self._stream, subject, deadline_s)
            newest = _newest(last.seq, last.data) if last is not None else _Newest(0, "", 0, 0)
        if newest.epoch > batch.epoch:
            return Fenced(newest.epoch)
        if (newest.writer, newest.epoch) == (batch.writer, batch.epoch) and newest.seq >= batch.seq:
            return Stored(newest.position, again=True)
        headers = {
            "Nats-Expected-Last-Subject-Sequence": str(newest.position),
            "Nats-Msg-Id": f"{subject}/{batch.writer}/{batch.epoch}/{batch.seq}",
        }
        try:
            ack = await publish(self._client, subject, data, headers, deadline_s)
        except LogUnavailable:
            # Whether it was stored is not known: the next try must look.
            self._last.pop(subject, None)
            raise
        if ack.duplicate:
            self._last.pop(subject, None)
        else:
            self._last[subject] = _Newest(ack.seq, batch.writer, batch.epoch, batch.seq)
        return Stored(ack.seq, again=ack.duplicate)

    async def read(self, after: int, *, follow: bool) -> AsyncIterator[Slice]:
        """See `Log.read`."""
        bounds = await self._bounds(follow=follow)
        until = bounds.last
        gap = None
        if after > bounds.last:
            gap = Gap(bounds.last + 1, after, SHORTER)
            after = bounds.last
        elif after + 1 < bounds.first:
            gap = Gap(after + 1, bounds.first - 1, PURGED)
            after = bounds.first - 1
        if gap is not None:
            yield Slice([], until - after, gap)
        cursor = Cursor(self._client, self._stream)
        told, behind = False, 0
        try:
            if not follow and after >= until:
                yield Slice([], 0)
                return
            async for raw in self._messages(cursor, after):
                if isinstance(raw, Gap):
                    after, until = 0, (await self._bounds(follow=follow)).last
                    yield Slice([], 0, raw)
                    if not follow and after >= until:
                        return
                    continue
                for piece in slices(raw, after):
                    yield piece
                after = max(after, raw[-1].position) if raw else after
                if not raw and not cursor.pending and not told:
                    yield Slice([], 0)
                told = told or bool(raw) or not cursor.pending
                if not follow and after >= until:
                    return
                behind = raw[-1].pending if raw else (cursor.pending or behind)
                # Nothing comes although something should: it was deleted, and will never come.
                if (behind and not raw) or (not behind and not follow):
                    reached = await self._gone_up_to(after)
                    if reached > after:
                        gone, after = Gap(after + 1, reached, PURGED), reached
                        yield Slice([], 0, gone)
                        cursor.pending = 0
                    behind = cursor.pending
                    if not follow and after >= until:
                        return
        finally:
            await cursor.aclose()

    async def _messages(self, cursor: Cursor, after: int) -> AsyncIterator[list[Raw] | Gap]:
        """What the cursor brings; a gap where the stream was replaced."""
        while True:
            try:
                async for raw in cursor.messages(after, tell_idle=True):
                    if raw:
                        after = raw[-1].position
                    yield raw
            except StreamReplaced as replaced:
                yield Gap(1, after, str(replaced))
                # Nothing of the new one was read yet.
                after = 0

    async def _gone_up_to(self, after: int) -> int:
        """Last position of the hole behind `after`, as the leader sees it; `after` if there is none.

        Not asked of the consumer: its copy of the stream may be behind the leader's.
        """
        try:
            last = (await self.bounds()).last
            wanted = {"seq": after + 1, "next_by_subj": ">"}
            answer = await api(self._client, f"STREAM.MSG.GET.{self._stream}", wanted)
        except LogUnavailable:
            return after
        except LogRefused as error:
            if error.code != MESSAGE_NOT_FOUND:
                raise
            return max(after, last)
        return int(answer["message"]["seq"]) - 1

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


__all__ = ["JetStreamLog", "StreamMissing"]
