"""A cursor over a stream (overlapped raw pulls, checked against the consumer's sequence), and the reading half of `Log` on it.

The server numbers deliveries to a consumer consecutively, whatever was purged from the stream; so a gap in that sequence
is a message lost in transit, and the cursor reads it again. A gap in the *stream's* sequence is a purge, and is reported
to the reader. Readers apply back-pressure: at most two pulls are outstanding, and no message is dropped.

A slice of the log is a run of decoded messages, cut where positions are missing.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing
from itertools import pairwise
from typing import Any, Final, NamedTuple

import msgspec
import structlog
from nats.aio.client import Client
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError

from headwater.events.jetstream.api import SECOND_NS, api, next_message, parse_time_ns, stream_info
from headwater.events.jetstream.connection import Connection
from headwater.events.ports import (
    Bounds,
    Gap,
    LogError,
    LogUnavailable,
    Retention,
    Slice,
    StoredMessage,
)
from headwater.schemas.subjects import matches

PULL = 256
PULL_BYTES = 8 * 1024 * 1024
"""Maximum bytes of one pull, of which two are outstanding: a process that pauses must not have more in transit than the
server buffers for it (`max_pending`, 64 MiB by default) before it closes the connection."""

HEADERS_BYTES = 64 * 1024
"""Reserve for subject and headers of the largest message, which must fit one pull."""

PULL_ENDS = ("Exceeds MaxBytes", "Batch Completed")
"""Status 409, as for a deleted consumer; but only this pull ended."""

EXPIRES_S = 20
HEARTBEAT_S = 1
SILENCE_S_MAX = 2.5
INACTIVE_S = 30
BACKOFF_S = (0.05, 0.1, 0.2, 0.5, 1.0)

_log = structlog.get_logger("headwater.cursor")


class RawMessage(NamedTuple):
    """One delivered message and its sequences. `pending` counts the messages after it."""

    position: int
    delivered: int
    pending: int
    stored_ns: int
    subject: str
    data: bytes
    headers: Mapping[str, str] | None


def parse_ack(reply: str) -> tuple[int, int, int, int]:
    """(stream sequence, consumer sequence, time in ns, pending) of an ack subject.

    Format 1 has nine tokens; format 2 (server flag js_ack_fc_v2) has domain and account before the stream and may
    have one more token at the end. Raises ValueError for anything else.
    """
    parts = reply.split(".")
    start = 5 if len(parts) == 9 else 7
    if len(parts) not in (9, 11, 12) or parts[:2] != ["$JS", "ACK"]:
        raise ValueError(f"not an ack subject: {reply!r}")
    return int(parts[start]), int(parts[start + 1]), int(parts[start + 2]), int(parts[start + 3])


SHORTER_S: Final = 30.0
"""For so long a stream with replicas may seem to end before what was read: a server that was cut off, or catches up, answers for it."""


class _Lost(Exception):
    """The consumer has to be re-created; not visible to the reader."""


class StreamReplaced(Exception):
    """The stream is another one of the same name: deleted and re-created, or it lost its store."""


class Cursor:
    """Reads one stream from a position. Create one per read; always `aclose` it.

    `pull`: messages per pull. Use few for large messages: those in transit have to fit into the buffers of server
    and client. `headers_only`: messages have no data, and a header with its size. `subjects`: only these, which may have
    wildcards but must not overlap; empty: all.
    """

    def __init__(
        self,
        client: Client,
        stream: str,
        *,
        subjects: Sequence[str] = (),
        pull: int = PULL,
        headers_only: bool = False,
    ) -> None:
        self._client = client
        self._stream = stream
        self._subjects = tuple(subjects)
        self._pull = pull
        self._headers_only = headers_only
        self._consumer = ""
        self._inbox = ""
        self._subscription: Subscription | None = None
        self._buffer: list[RawMessage] = []
        self._outstanding = 0
        self._delivered = 0
        self._failure: str = ""
        self._wake = asyncio.Event()
        self._created = ""
        self._shorter_since_s = 0.0
        self._report_idle = False
        self._idle = False
        self.opened = 0
        self.pending = 0
        """Messages after the last one received, as the server counted when it sent that one."""

    async def messages(
        self, after: int, *, newest_per_subject: bool = False, report_idle: bool = False
    ) -> AsyncIterator[list[RawMessage]]:
        """Yield messages in order and without gaps; an empty list when there are none yet.

        With `report_idle` an empty list also means that none arrived for `HEARTBEAT_S` from a live server.

        Reading starts after stream sequence `after`. With `newest_per_subject` it starts with the newest message of
        each subject, and does so again whenever the consumer had to be re-created (`opened` counts this): what was
        deleted in between is then missing.
        """
        newest = newest_per_subject
        self._report_idle = report_idle
        tries = 0
        while True:
            try:
                if not newest:
                    await self._check_identity(after)
                await self._open(after, newest)
                if not self.pending:
                    yield []
                tries = 0
                while True:
                    batch = await self._take()
                    after = batch[-1].position if batch else after
                    yield batch
            except (_Lost, LogUnavailable) as error:
                _log.debug("cursor_reopened", stream=self._stream, after=after, reason=str(error))
            await self._close_consumer()
            await asyncio.sleep(BACKOFF_S[min(tries, len(BACKOFF_S) - 1)])
            tries += 1

    async def aclose(self) -> None:
        """Delete the subscription and the server's consumer."""
        await self._close_consumer()

    async def _open(self, after: int, newest: bool) -> None:
        """Create a consumer that starts after `after`."""
        self._inbox = self._client.new_inbox()
        self._consumer = "c" + self._inbox.rsplit(".", 1)[-1]
        self._buffer, self._outstanding, self._delivered, self._failure = [], 0, 0, ""
        self._idle = False
        if not isinstance(self._client, Connection):
            raise TypeError(f"the log is read by a connection of `connect`, not by {self._client!r}")
        self._subscription = await self._client.subscribe_reader(self._inbox, self)
        config: dict[str, Any] = {
            "name": self._consumer,
            "ack_policy": "none",
            "max_deliver": 1,
            "mem_storage": True,
            "num_replicas": 1,
            "inactive_threshold": INACTIVE_S * SECOND_NS,
            "deliver_policy": "last_per_subject" if newest else "by_start_sequence",
        }
        if self._headers_only:
            config["headers_only"] = True
        if not newest:
            config["opt_start_seq"] = after + 1
        subjects = self._subjects or ((">",) if newest else ())
        verb = f"CONSUMER.CREATE.{self._stream}.{self._consumer}"
        if len(subjects) == 1:
            config["filter_subject"] = subjects[0]
            verb += f".{subjects[0]}"
        elif subjects:
            config["filter_subjects"] = subjects
        answer = await api(self._client, verb, {"stream_name": self._stream, "config": config, "action": ""})
        self.opened += 1
        self.pending = int(answer.get("num_pending", 0))
        await self._ask_more()

    async def _check_identity(self, after: int) -> None:
        info = await stream_info(self._client, self._stream)
        created = str(info["created"])
        before, self._created = self._created or created, created
        if created != before:
            raise StreamReplaced(f"{self._stream} was created {created}, before that {before}")
        last = int(info["state"]["last_seq"])
        if not self.opened or last >= after:
            self._shorter_since_s = 0.0
            return
        reason = f"{self._stream} ends at {last}, and {after} was read"
        now_s = asyncio.get_running_loop().time()
        self._shorter_since_s = self._shorter_since_s or now_s
        if int(info["config"]["num_replicas"]) > 1 and now_s - self._shorter_since_s < SHORTER_S:
            raise _Lost(reason)
        raise StreamReplaced(reason)

    async def _take(self) -> list[RawMessage]:
        loop = asyncio.get_running_loop()
        while not self._buffer:
            if self._failure:
                raise _Lost(self._failure)
            if self._idle and self._report_idle:
                self._idle = False
                return []
            self._wake.clear()
            before = loop.time()
            try:
                async with asyncio.timeout(SILENCE_S_MAX):
                    await self._wake.wait()
            except TimeoutError:
                raise _Lost(f"silent for {loop.time() - before:.1f} s") from None
        batch, self._buffer = self._buffer, []
        await self._ask_more()
        return batch

    async def _ask_more(self) -> None:
        # Messages that arrived and were not read yet count too, so that an ended pull is not replaced.
        if self._outstanding + len(self._buffer) > self._pull:
            return
        self._outstanding += self._pull
        body = {
            "batch": self._pull,
            "max_bytes": max(PULL_BYTES, self._client.max_payload) + HEADERS_BYTES,
            "expires": EXPIRES_S * SECOND_NS,
            "idle_heartbeat": HEARTBEAT_S * SECOND_NS,
        }
        try:
            await self._client.publish(
                f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{self._consumer}",
                msgspec.json.encode(body),
                reply=self._inbox,
            )
        except NatsError as error:
            raise _Lost(str(error)) from error

    def take_delivery(self, subject: str, reply: str, data: bytes, headers: Mapping[str, str] | None) -> None:
        """See `Reader`."""
        self._wake.set()
        try:
            position, delivered, stored_ns, pending = parse_ack(reply)
        except ValueError as error:
            self._failure = str(error)
            return
        if delivered != self._delivered + 1:
            self._failure = f"delivery {delivered} came after {self._delivered}"
            return
        self._delivered = delivered
        self._idle = False
        self.pending = pending
        self._outstanding -= 1
        self._buffer.append(RawMessage(position, delivered, pending, stored_ns, subject, data, headers))

    async def take_status(self, headers: Mapping[str, str]) -> None:
        """See `Reader`."""
        try:
            await self._on_status(headers["Status"], headers)
        except ValueError as error:
            self._failure = f"{dict(headers)}: {error}"
        self._wake.set()

    async def _on_status(self, status: str, headers: Mapping[str, str]) -> None:
        if status == "100":
            self._idle = True
            return
        ended = status in ("404", "408") or headers.get("Description", "").endswith(PULL_ENDS)
        if ended:
            # This pull ended; the messages that it did not deliver may be requested again.
            self._outstanding -= int(headers.get("Nats-Pending-Messages", self._outstanding))
            try:
                await self._ask_more()
            except _Lost as error:
                self._failure = str(error)
            return
        self._failure = f"{status} {headers.get('Description', '')}".strip()

    async def _close_consumer(self) -> None:
        if self._subscription is None:
            return
        subscription, self._subscription = self._subscription, None
        try:
            await subscription.unsubscribe()
            if self._client.is_connected:
                await api(self._client, f"CONSUMER.DELETE.{self._stream}.{self._consumer}")
        except (NatsError, LogError):
            # The server deletes an idle consumer after INACTIVE_S.
            pass


# The reading half of `Log`: slices after a position, bounds, retention.

PAUSE_S = 0.05

PURGED = "purged"
SHORTER = "the log ends before the requested position"


class JetStreamReader:
    """See `headwater.events.ports.Log`: `read`, `bounds` and `retention`."""

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

    async def scan(self, after: int, until: int, subjects: Sequence[str] = ()) -> AsyncIterator[Slice]:
        """See `Log.scan`."""
        async with aclosing(self._scan(after, until, subjects)) as runs:
            async for run in runs:
                yield Slice.decode(map(_stored, run), run[-1].pending)

    async def scan_raw(
        self, after: int, until: int, subjects: Sequence[str] = ()
    ) -> AsyncIterator[list[StoredMessage]]:
        """See `Log.scan_raw`."""
        async with aclosing(self._scan(after, until, subjects)) as runs:
            async for run in runs:
                yield [_stored(message) for message in run]

    async def _scan(
        self, after: int, until: int, subjects: Sequence[str]
    ) -> AsyncGenerator[list[RawMessage], None]:
        until = min(until, (await self.bounds()).last)
        # The server takes thirty times as long for a message that passes one of several filters than for one that passes the only one,
        # and more than it takes to receive it (2.15, 3,000 subjects): then all are received, and the others dropped unread.
        only = subjects[0] if len(subjects) == 1 else ">"
        cursor = Cursor(self._client, self._stream, subjects=subjects if len(subjects) == 1 else ())
        selected = _Wanted(subjects)
        try:
            if after >= until:
                return
            async for raw in cursor.messages(after, report_idle=True):
                run = [message for message in raw if message.position <= until and selected[message.subject]]
                if run:
                    yield run
                after = raw[-1].position if raw else after
                if after >= until:
                    return
                # That nothing comes may mean that a server is slow, and that nothing is pending that the consumer's replica lags.
                if (not raw or not raw[-1].pending) and not await self._has_message(after, until, only):
                    return
        except StreamReplaced as replaced:
            raise LogUnavailable(f"{replaced}: read it again") from replaced
        finally:
            await cursor.aclose()

    async def position_at(self, wall_ns: int) -> int:
        """See `Log.position_at`: by bisection, a request for each step."""
        low, high = await self.bounds()
        low -= 1
        while low < high:
            middle = (low + high + 1) // 2
            message = await next_message(self._client, self._stream, middle)
            if message is not None and message.stored_ns <= wall_ns:
                low = min(message.seq, high)
            else:
                high = middle - 1
        return low

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
            found = await next_message(self._client, self._stream, after + 1)
        except LogUnavailable:
            return after
        return max(after, last) if found is None else found.seq - 1

    async def _has_message(self, after: int, until: int, subject: str) -> bool:
        """Whether the leader has a message of `subject` after position `after` and up to `until`."""
        found = await next_message(self._client, self._stream, after + 1, subject)
        return found is not None and found.seq <= until

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
        return bounds_of((await stream_info(self._client, self._stream))["state"])

    async def identity(self) -> str:
        """See `Log.identity`: when the stream was created. Raises `StreamMissing`."""
        return str((await stream_info(self._client, self._stream))["created"])

    async def retention(self, after: int) -> Retention:
        """See `Log.retention`. Raises `StreamMissing` when the stream does not exist."""
        info = await stream_info(self._client, self._stream)
        config, bounds = info["config"], bounds_of(info["state"])
        next_age_s = 0.0
        if after < bounds.last:
            first = max(after + 1, bounds.first)
            found = await next_message(self._client, self._stream, first)
            if found is not None:
                next_age_s = max((parse_time_ns(info["ts"]) - found.stored_ns) / SECOND_NS, 0.0)
        return Retention(
            *bounds,
            bytes=int(info["state"]["bytes"]),
            max_bytes=max(int(config["max_bytes"]), 0),
            max_messages=max(int(config["max_msgs"]), 0),
            max_age_s=int(config["max_age"]) / SECOND_NS,
            next_age_s=next_age_s,
        )


class _Wanted(dict[str, bool]):
    """Whether a subject matches one of some patterns; without any, all do."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self._patterns = patterns

    def __missing__(self, subject: str) -> bool:
        matched = self[subject] = not self._patterns or any(
            matches(pattern, subject) for pattern in self._patterns
        )
        return matched


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
        yield Slice.decode(map(_stored, run), run[-1].pending, gap)


def _stored(raw: RawMessage) -> StoredMessage:
    return StoredMessage(raw.position, raw.subject, raw.stored_ns, raw.data)
