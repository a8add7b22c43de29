"""The reading half of `Log` on a JetStream stream: slices behind a position, bounds, what retention will take."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

from nats.aio.client import Client

from headwater.events.errors import LogRefused, LogUnavailable
from headwater.events.jetstream.api import api
from headwater.events.jetstream.cursor import Cursor, Raw, StreamReplaced
from headwater.events.jetstream.error_codes import MESSAGE_NOT_FOUND
from headwater.events.jetstream.slices import PURGED, slices
from headwater.events.jetstream.stream_compare import parse_time_ns
from headwater.events.jetstream.stream_spec import SECOND_NS
from headwater.events.log import Bounds, Gap, Slice
from headwater.events.retention import Retention

PAUSE_S = 0.05

SHORTER = "the log is shorter than the position asked for"


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
            # `next_by_subj` passes over positions that are gone.
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
    """Bounds from the state that STREAM.INFO tells."""
    last = int(state["last_seq"])
    first = int(state["first_seq"]) if int(state["messages"]) else last + 1
    return Bounds(max(first, 1), last)
