"""`Log` on a JetStream stream.

Fencing: every append carries an expected last sequence, so of two incarnations of one writer only the one that wrote
last can continue; the other reads a higher epoch there and is fenced. An atomic append expects the last sequence of the
subjects it writes; an ingest, whose messages are not acknowledged one by one, that of the fence subject, which each
incarnation writes first. A retried message has the same message id, and a lost acknowledgement results in
`Stored(again=True)`.

The protocol of an ingest is encoded in the reply subject, `<inbox>.<batch>.<flow>.fail.<seq>.<op>.$FI`; the server replies with flow
acks (progress, and the number of messages until the next one), with an error that names its message, and finally with an
ordinary acknowledgement of what was stored: a prefix of the batch if a message was rejected.
"""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from itertools import count
from typing import Any, NamedTuple
from uuid import uuid4

import msgspec
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError

from headwater.events.jetstream.api import (
    ALREADY_THERE,
    EXPECTED,
    SUBJECT_BUSY,
    WRONG_LAST_SEQUENCE,
    Ack,
    check_sizes,
    error_of,
    last_message,
    publish,
    request_json,
    stream_info,
)
from headwater.events.jetstream.connection import watched
from headwater.events.jetstream.cursor import JetStreamReader
from headwater.events.jetstream.stream_spec import mirror_of
from headwater.events.ports import (
    NOTHING,
    AppendResult,
    Entry,
    Fenced,
    LogError,
    LogFull,
    LogRefused,
    LogUnavailable,
    Newest,
    Stored,
    StreamMissing,
    Unknown,
    check_count,
)
from headwater.schemas.encoding import NO_DIGEST, Sealed, UnreadableBatch, decode_batch

FLOW = 100
"""Requested number of messages per flow ack; the server may choose fewer."""

OUTSTANDING_ACKS = 2

START, APPEND, COMMIT = 0, 1, 2


class Ingested(NamedTuple):
    """The first `stored` messages are in the stream, the last of them at `position`; `error` stopped the rest."""

    stored: int
    position: int
    error: LogError | None = None


class _Batch:
    """One unfinished batch."""

    def __init__(self, subject: str) -> None:
        self.subject = subject
        self.flow = FLOW
        self.acked = 0
        self.error: LogError | None = None
        self.end: Ingested | None = None
        self.news = asyncio.Event()

    def on_answer(self, answer: dict[str, Any]) -> None:
        kind = answer.get("type")
        if kind == "ack":
            self.acked = max(self.acked, int(answer["seq"]))
            self.flow = max(1, int(answer.get("msgs", self.flow)))
        elif kind == "err" or (kind is None and answer.get("error")):
            self.error = self.error or error_of(self.subject, answer["error"])
            if kind is None and self.end is None:
                self.end = Ingested(0, 0, self.error)
        elif kind is None:
            self.end = Ingested(int(answer["count"]), int(answer["seq"]), self.error)
        self.news.set()


class Ingest:
    """Sends batches and receives the replies to all of them, by one subscription of the connection."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._inbox = client.new_inbox()
        self._batches: dict[str, _Batch] = {}
        self._numbers = count(1)
        self._subscription: Subscription | None = None
        self._subscribing = asyncio.Lock()

    async def send(
        self,
        subject: str,
        messages: Sequence[bytes],
        headers: Callable[[int], dict[str, str]],
        deadline_s: float,
    ) -> Ingested:
        """Send one batch; `headers(i)` are those of message i (from 0).

        Raises `LogUnavailable` without an answer, and `AccessDenied` when the server denies the subject.
        """
        check_sizes(self._client, subject, messages)
        await self._subscribe()
        name = f"b{next(self._numbers)}"
        batch = self._batches[name] = _Batch(subject)
        try:
            async with watched(self._client, subject), asyncio.timeout(deadline_s):
                for index, data in enumerate(messages):
                    while index - batch.acked >= OUTSTANDING_ACKS * batch.flow and batch.end is None:
                        batch.news.clear()
                        await batch.news.wait()
                    if batch.end is not None or batch.error is not None:
                        break
                    last = index == len(messages) - 1
                    op = COMMIT if last else APPEND if index else START
                    await self._client.publish(
                        subject,
                        data,
                        reply=f"{self._inbox}.{name}.{FLOW}.fail.{index + 1}.{op}.$FI",
                        headers=headers(index),
                    )
                while batch.end is None:
                    batch.news.clear()
                    await batch.news.wait()
            return batch.end
        except TimeoutError as error:
            raise LogUnavailable(f"no answer to a batch on {subject} within {deadline_s:.1f} s") from error
        except NatsError as error:
            raise LogUnavailable(f"{subject}: {error!r}") from error
        finally:
            del self._batches[name]

    async def _subscribe(self) -> None:
        async with self._subscribing:
            if self._subscription is None:
                self._subscription = await self._client.subscribe(self._inbox + ".>", cb=self._on_message)

    async def _on_message(self, message: Msg) -> None:
        name = message.subject[len(self._inbox) + 1 :].partition(".")[0]
        batch = self._batches.get(name)
        if batch is None:
            return
        if message.headers and message.headers.get("Status") == "503":
            batch.end = Ingested(
                0, 0, LogUnavailable(f"no responders on {batch.subject}: no stream or no leader")
            )
            batch.news.set()
            return
        try:
            batch.on_answer(msgspec.json.decode(message.data))
        except (msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
            batch.end = Ingested(0, 0, LogUnavailable(f"{batch.subject}: unreadable answer: {error!r}"))
            batch.news.set()


# The log.


class Part(NamedTuple):
    """One message of a batch."""

    subject: str
    data: bytes
    headers: dict[str, str]


async def publish_together(client: Client, parts: Sequence[Part], deadline_s: float) -> Ack:
    """Store all parts in this order at consecutive sequences; returns the last one's.

    Each part's expected sequence is compared with the stream before the batch. Raises as `api.request_json`.
    """
    if len(parts) == 1:
        [only] = parts
        return await publish(client, only.subject, only.data, only.headers, deadline_s)
    # A denied part gets no reply; the batch then fails for a missing part, which is less specific.
    async with watched(client, *{part.subject for part in parts[:-1]}):
        return await _publish_batch(client, parts, deadline_s)


async def _publish_batch(client: Client, parts: Sequence[Part], deadline_s: float) -> Ack:
    for part in parts:
        check_sizes(client, part.subject, [part.data])
    batch = uuid4().hex
    try:
        for number, part in enumerate(parts[:-1], start=1):
            headers = {"Nats-Batch-Id": batch, "Nats-Batch-Sequence": str(number), **part.headers}
            await client.publish(part.subject, part.data, headers=headers)
    except NatsError as error:
        # The server discards what was sent: the batch was not committed.
        raise LogUnavailable(f"{parts[0].subject}: {error!r}") from error
    last = parts[-1]
    headers = {
        "Nats-Batch-Id": batch,
        "Nats-Batch-Sequence": str(len(parts)),
        "Nats-Batch-Commit": "1",
        **last.headers,
    }
    try:
        answer = await request_json(client, last.subject, last.data, headers, deadline_s)
    except LogRefused as error:
        if error.code == ALREADY_THERE:
            return Ack(0, True)
        raise
    return Ack(int(answer["seq"]), False)


TRY_S = 2.0
"""How long one attempt waits for its acknowledgement before the message is sent again."""

PAUSE_S = 0.05


class _Stale(Exception):
    """Another writer, or an earlier attempt, wrote in between: read the newest message, then decide."""


class JetStreamLog(JetStreamReader):
    """See `headwater.events.ports.Log`."""

    def __init__(self, client: Client, stream: str) -> None:
        super().__init__(client, stream)
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._newest: dict[str, Newest] = {}
        self._ingest = Ingest(client)
        self._replicated = False

    async def copied_kinds(self) -> tuple[str, ...]:
        """The kinds of events that this copy of a site's log has; empty: all, or it is no copy. Raises `StreamMissing`."""
        mirror = mirror_of((await stream_info(self._client, self._stream))["config"])
        return mirror.kinds if mirror is not None else ()

    async def append(self, *entries: Entry, deadline_s: float = 5.0) -> AppendResult:
        """See `Log.append`. Raises `StreamMissing` when the stream was deleted."""
        check_count("an append", len(entries))
        touched = sorted({entry.subject for entry in entries})
        return await self._until_known(
            touched, deadline_s, lambda remaining_s: self._append_once(entries, remaining_s)
        )

    async def ingest(
        self, subject: str, *messages: Sealed, fence: str, deadline_s: float = 5.0
    ) -> AppendResult:
        """See `Log.ingest`. Raises `StreamMissing` when the stream was deleted."""
        check_count("an ingest", len(messages))
        return await self._until_known(
            [subject],
            deadline_s,
            lambda remaining_s: self._ingest_once(subject, messages, fence, remaining_s),
        )

    async def _until_known(
        self, touched: list[str], deadline_s: float, attempt: Callable[[float], Awaitable[AppendResult]]
    ) -> AppendResult:
        """Retry until the outcome is known or the deadline has passed, with the affected subjects locked."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + deadline_s
        reason = "no attempt was made"
        async with AsyncExitStack() as held:
            try:
                async with asyncio.timeout_at(deadline):
                    # Sorted, so that two appends cannot deadlock.
                    for subject in touched:
                        await held.enter_async_context(self._locks[subject])
            except TimeoutError:
                return Unknown("the previous append has not finished")
            while (remaining_s := deadline - loop.time()) > 0:
                try:
                    return await attempt(min(TRY_S, remaining_s))
                except LogFull:
                    raise
                except (LogUnavailable, _Stale) as error:
                    reason = str(error)
                except LogRefused as error:
                    if error.code not in (WRONG_LAST_SEQUENCE, SUBJECT_BUSY):
                        raise
                    reason = str(error)
                # Whether anything was stored is unknown: the next attempt must check.
                for subject in touched:
                    self._newest.pop(subject, None)
                await asyncio.sleep(PAUSE_S)
        return Unknown(reason)

    async def _append_once(self, entries: tuple[Entry, ...], deadline_s: float) -> AppendResult:
        parts: list[Part] = []
        fresh: list[Entry] = []
        stored_position = 0
        written: set[str] = set()
        for subject, message in entries:
            newest = await self._known(subject, deadline_s)
            if newest.epoch > message.epoch:
                return Fenced(newest.epoch)
            if newest.has(message):
                stored_position = newest.position
                continue
            fresh.append(Entry(subject, message))
            headers = {"Nats-Msg-Id": _name(subject, message)}
            if subject not in written:
                headers[EXPECTED] = str(newest.position)
                written.add(subject)
            parts.append(Part(subject, message.data, headers))
        if not fresh:
            return Stored(stored_position, again=True)
        ack = await publish_together(self._client, parts, deadline_s)
        if ack.duplicate:
            raise _Stale("an earlier attempt was stored")
        first = ack.seq - len(fresh) + 1
        for position, (subject, message) in enumerate(fresh, start=first):
            self._newest[subject] = Newest.of(position, message)
        return Stored(ack.seq)

    async def _ingest_once(
        self, subject: str, messages: tuple[Sealed, ...], fence: str, deadline_s: float
    ) -> AppendResult:
        guard = await self._known(fence, deadline_s)
        newest = await self._known(subject, deadline_s)
        epoch = messages[-1].epoch
        if max(guard.epoch, newest.epoch) > epoch:
            return Fenced(max(guard.epoch, newest.epoch))
        fresh = [message for message in messages if not newest.has(message)]
        if not fresh:
            return Stored(newest.position, again=True)

        fenced = {EXPECTED: str(guard.position), f"{EXPECTED}-Subject": fence}
        parts = [Part(subject, sealed.data, {"Nats-Msg-Id": _name(subject, sealed)}) for sealed in fresh]
        try:
            position = await self._send(parts, fenced, deadline_s)
        except (LogRefused, _Stale):
            # The fence may have advanced by this very incarnation: it writes there too.
            self._newest.pop(fence, None)
            raise
        self._newest[subject] = Newest.of(position, fresh[-1])
        return Stored(position)

    async def _send(self, parts: list[Part], fenced: dict[str, str], deadline_s: float) -> int:
        """Stream the parts, each with the fence; on a replicated stream, send them as one batch with one fence.

        A leader of several replicas rejects an expected sequence of a subject for which another one is pending
        (10164), so there each message cannot carry the fence; without it, messages that a suspended process had
        not sent yet would be accepted after its successor started.
        """
        if not self._replicated:
            headers = [part.headers | fenced for part in parts]
            done = await self._ingest.send(
                parts[0].subject, [part.data for part in parts], headers.__getitem__, deadline_s
            )
            if done.error is None and done.stored == len(parts):
                return done.position
            self._replicated = isinstance(done.error, LogRefused) and done.error.code == SUBJECT_BUSY
            raise done.error or _Stale(f"{done.stored} of {len(parts)} messages were stored")
        first = parts[0]._replace(headers=parts[0].headers | fenced)
        ack = await publish_together(self._client, [first, *parts[1:]], deadline_s)
        if ack.duplicate:
            raise _Stale("an earlier attempt was stored")
        return ack.seq

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


def _name(subject: str, message: Sealed) -> str:
    """Message id for the server's deduplication: it stores the message once however often it is sent."""
    return f"{subject}/{message.writer}/{message.epoch}/{message.seq}"


__all__ = ["JetStreamLog", "StreamMissing"]
