"""The reading half of `Log` on a JetStream stream: slices after a position, bounds, retention.

A slice is decoded messages, cut where positions are missing.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from itertools import pairwise
from typing import Any

from nats.aio.client import Client

from headwater.events.errors import LogRefused, LogUnavailable
from headwater.events.jetstream.api import SECOND_NS, api, parse_time_ns
from headwater.events.jetstream.cursor import Cursor, RawMessage, StreamReplaced
from headwater.events.jetstream.error_codes import MESSAGE_NOT_FOUND
from headwater.events.log import Bounds, Gap, Record, Retention, Slice, Unreadable
from headwater.schemas.encoding.codec import UnreadableBatch, decode_batch

PAUSE_S = 0.05

PURGED = "purged"
SHORTER = "the log ends before the requested position"


class JetStreamReader:
    """See `headwater.events.log.Log`: `read`, `bounds` and `retention`."""

    def __init__(self, client: Client, stream: str) -> None:
        self._client = client
        self._stream = stream

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
        reported, remaining = False, 0
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
                if not raw and not cursor.pending and not reported:
                    yield Slice([], 0)
                reported = reported or bool(raw) or not cursor.pending
                if not follow and after >= until:
                    return
                remaining = raw[-1].pending if raw else (cursor.pending or remaining)
                # Pending messages do not arrive: they were deleted.
                if (remaining and not raw) or (not remaining and not follow):
                    reached = await self._gap_end(after)
                    if reached > after:
                        purged, after = Gap(after + 1, reached, PURGED), reached
                        yield Slice([], 0, purged)
                        cursor.pending = 0
                    remaining = cursor.pending
                    if not follow and after >= until:
                        return
        finally:
            await cursor.aclose()

    async def _messages(self, cursor: Cursor, after: int) -> AsyncIterator[list[RawMessage] | Gap]:
        """Messages of the cursor; a gap where the stream was replaced."""
        while True:
            try:
                async for raw in cursor.messages(after, report_idle=True):
                    if raw:
                        after = raw[-1].position
                    yield raw
            except StreamReplaced as replaced:
                yield Gap(1, after, str(replaced))
                # Read the new one from its start.
                after = 0

    async def _gap_end(self, after: int) -> int:
        """Last position of the gap after `after`, according to the leader; `after` if there is none.

        The consumer is not used: its replica of the stream may lag the leader's.
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
        """Bounds; with `follow`, waits for an unreachable server."""
        while True:
            try:
                return await self.bounds()
            except LogUnavailable:
                if not follow:
                    raise
                await asyncio.sleep(PAUSE_S)

    async def bounds(self) -> Bounds:
        """See `Log.bounds`. Raises `StreamMissing` when the stream does not exist."""
        return bounds_of((await api(self._client, f"STREAM.INFO.{self._stream}"))["state"])

    async def identity(self) -> str:
        """See `Log.identity`: when the stream was created. Raises `StreamMissing`."""
        return str((await api(self._client, f"STREAM.INFO.{self._stream}"))["created"])

    async def retention(self, after: int) -> Retention:
        """See `Log.retention`. Raises `StreamMissing` when the stream does not exist."""
        info = await api(self._client, f"STREAM.INFO.{self._stream}")
        config, bounds = info["config"], bounds_of(info["state"])
        next_age_s = 0.0
        if after < bounds.last:
            # `next_by_subj` skips deleted positions.
            body = {"seq": max(after + 1, bounds.first), "next_by_subj": ">"}
            try:
                answer = await api(self._client, f"STREAM.MSG.GET.{self._stream}", body)
            except LogRefused as error:
                if error.code != MESSAGE_NOT_FOUND:
                    raise
            else:
                age_ns = parse_time_ns(info["ts"]) - parse_time_ns(answer["message"]["time"])
                next_age_s = max(age_ns / SECOND_NS, 0.0)
        return Retention(
            *bounds,
            bytes=int(info["state"]["bytes"]),
            max_bytes=max(int(config["max_bytes"]), 0),
            max_messages=max(int(config["max_msgs"]), 0),
            max_age_s=int(config["max_age"]) / SECOND_NS,
            next_age_s=next_age_s,
        )


def bounds_of(state: Mapping[str, Any]) -> Bounds:
    """Bounds from the state in a STREAM.INFO reply."""
    last = int(state["last_seq"])
    first = int(state["first_seq"]) if int(state["messages"]) else last + 1
    return Bounds(max(first, 1), last)


def slices(raw: list[RawMessage], after: int) -> Iterator[Slice]:
    """Slices of the messages after position `after`; each starts with the gap before it, if there is one.

    Messages are deleted singly, by retention and by operators, so a gap may be anywhere. Messages up to `after` were
    reported as a gap while they were in transit, and are skipped.
    """
    raw = [message for message in raw if message.position > after]
    if not raw:
        return
    cuts = [at for at, (early, late) in enumerate(pairwise(raw), 1) if late.position > early.position + 1]
    for start, end in pairwise([0, *cuts, len(raw)]):
        run = raw[start:end]
        first = run[0].position
        gap = Gap(after + 1, first - 1, PURGED) if first > after + 1 else None
        after = run[-1].position
        yield _decoded(run, gap)


def _decoded(run: list[RawMessage], gap: Gap | None) -> Slice:
    records: list[Record] = []
    unreadable: list[Unreadable] = []
    for message in run:
        try:
            batch = decode_batch(message.data)
        except UnreadableBatch as error:
            unreadable.append(Unreadable(message.position, message.subject, str(error)))
            continue
        records.append(Record(message.position, message.subject, message.stored_ns, batch))
    return Slice(records, run[-1].pending, gap, tuple(unreadable))
