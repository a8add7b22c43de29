"""`Log` on a JetStream stream.

The fence: every append expects the subject's last sequence, so of two lives of one writer only the one that
wrote last can go on; the other finds a higher epoch there and learns that it is fenced. A retried batch
carries the same message id, and a lost acknowledgement turns into `Stored(again=True)`.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Any

from nats.aio.client import Client

from headwater.events.errors import LogRefused, LogUnavailable, StreamMissing
from headwater.events.jetstream.api import (
    SUBJECT_BUSY,
    WRONG_LAST_SEQUENCE,
    api,
    last_message,
    publish,
)
from headwater.events.jetstream.cursor import Cursor
from headwater.events.log import AppendResult, Bounds, Fenced, Gap, Record, Slice, Stored, Unknown, Unreadable
from headwater.schemas.envelope import Batch
from headwater.schemas.pool import UnreadableBatch, decode_batch, encode_batch

TRY_S = 2.0
"""How long one try waits for its acknowledgement before it is sent again."""

PAUSE_S = 0.05


class JetStreamLog:
    """See `headwater.events.log.Log`."""

    def __init__(self, client: Client, stream: str) -> None:
        self._client = client
        self._stream = stream
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._last: dict[str, int] = {}

    async def append(self, subject: str, batch: Batch[Any], *, deadline_s: float = 5.0) -> AppendResult:
        """See `Log.append`. Raises `StreamMissing` when the stream was deleted."""
        data = encode_batch(batch)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + deadline_s
        reason = "no try was made"
        async with self._locks[subject]:
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
        return Unknown(reason)

    async def _append_once(
        self, subject: str, batch: Batch[Any], data: bytes, deadline_s: float
    ) -> AppendResult:
        expected = self._last.get(subject)
        if expected is None:
            last = await last_message(self._client, self._stream, subject)
            expected = 0
            if last is not None:
                settled = self._settled(batch, last.seq, last.data)
                if settled is not None:
                    return settled
                expected = last.seq
        headers = {
            "Nats-Expected-Last-Subject-Sequence": str(expected),
            "Nats-Msg-Id": f"{subject}/{batch.epoch}/{batch.seq}",
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
            self._last[subject] = ack.seq
        return Stored(ack.seq, again=ack.duplicate)

    @staticmethod
    def _settled(batch: Batch[Any], position: int, data: bytes) -> AppendResult | None:
        """The outcome, if the subject's newest message already decides it."""
        try:
            newest = decode_batch(data)
        except UnreadableBatch:
            return None
        if newest.epoch > batch.epoch:
            return Fenced(newest.epoch)
        if (newest.writer, newest.epoch) == (batch.writer, batch.epoch) and newest.seq >= batch.seq:
            return Stored(position, again=True)
        return None

    async def read(self, after: int, *, follow: bool) -> AsyncIterator[Slice]:
        """See `Log.read`."""
        last = (await self.bounds()).last
        until = last
        if after > last:
            gap = Gap(last + 1, after, "the log is shorter than the position asked for")
            yield Slice([], last, gap)
            after = last
        cursor = Cursor(self._client, self._stream)
        told = False
        try:
            if not follow and after >= until:
                yield Slice([], 0)
                return
            async for raw in cursor.messages(after):
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

    async def bounds(self) -> Bounds:
        """See `Log.bounds`. Raises `StreamMissing` when the stream does not exist."""
        state = (await api(self._client, f"STREAM.INFO.{self._stream}"))["state"]
        last = int(state["last_seq"])
        first = int(state["first_seq"]) if int(state["messages"]) else last + 1
        return Bounds(max(first, 1), last)


__all__ = ["JetStreamLog", "StreamMissing"]
