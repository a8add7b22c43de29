"""Our own cursor: overlapped raw pulls, checked against the consumer's own sequence.

The server numbers what it delivers to a consumer without holes, whatever was purged from the stream; so a
hole in that number is a message lost on the way, and the cursor reads it again. A hole in the *stream's*
number is a purge, and is told to the reader. At most two pulls of messages, and so many bytes, are asked for
ahead of the reader: one who stops reading stops the server, and nothing is ever dropped.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import msgspec
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError

from headwater.events.errors import LogError, LogUnavailable
from headwater.events.jetstream.api import api
from headwater.events.jetstream.streams import SECOND_NS

PULL = 256
WINDOW = 2 * PULL
PULL_BYTES = 8 * 1024 * 1024
"""Bytes that one pull brings at most, and two are under way: a process that stands still for a moment must not have
more on its way than a server keeps for it (`max_pending`, 64 MiB by default) before it cuts the connection."""

HEADERS_BYTES = 64 * 1024
"""Room for subject and headers of the largest message, which must fit one pull."""

PULL_ENDS = ("Exceeds MaxBytes", "Batch Completed")
"""Coded as 409 like a deleted consumer; but only this pull is over."""

EXPIRES_S = 20
HEARTBEAT_S = 1
SILENCE_S_MAX = 2.5
INACTIVE_S = 30
BACKOFF_S = (0.05, 0.1, 0.2, 0.5, 1.0)

_log = structlog.get_logger("headwater.cursor")


class Raw(NamedTuple):
    """One delivered message and where it stands. `pending` counts those behind it."""

    position: int
    delivered: int
    pending: int
    stored_ns: int
    subject: str
    data: bytes
    headers: dict[str, str] | None


def parse_ack(reply: str) -> tuple[int, int, int, int]:
    """(stream sequence, consumer sequence, time in ns, pending) of an ack subject.

    Format 1 has nine tokens; format 2 (server flag js_ack_fc_v2) puts domain and account in front of the
    stream and may end in one more token. Raises ValueError for anything else.
    """
    parts = reply.split(".")
    start = 5 if len(parts) == 9 else 7
    if len(parts) not in (9, 11, 12) or parts[:2] != ["$JS", "ACK"]:
        raise ValueError(f"not an ack subject: {reply!r}")
    return int(parts[start]), int(parts[start + 1]), int(parts[start + 2]), int(parts[start + 3])


class _Lost(Exception):
    """The consumer has to be made again; the reader never sees this."""


class StreamReplaced(Exception):
    """The stream is another one under the same name: deleted and made anew, or it lost its store."""


class Cursor:
    """Reads one stream from a position on. Make one per read; always `aclose` it.

    `pull`: messages asked for at a time. Who reads large ones asks for few: what is under way has to fit into
    the buffers of server and client.
    """

    def __init__(self, client: Client, stream: str, *, filter_subject: str = "", pull: int = PULL) -> None:
        self._client = client
        self._stream = stream
        self._filter = filter_subject
        self._pull = pull
        self._consumer = ""
        self._inbox = ""
        self._subscription: Subscription | None = None
        self._buffer: list[Raw] = []
        self._outstanding = 0
        self._delivered = 0
        self._failure: str = ""
        self._wake = asyncio.Event()
        self._created = ""
        self._tell_idle = False
        self._idle = False
        self.opened = 0
        self.pending = 0
        """Messages behind the last one that arrived, as the server counted when it sent that."""

    async def messages(
        self, after: int, *, newest_per_subject: bool = False, tell_idle: bool = False
    ) -> AsyncIterator[list[Raw]]:
        """Yield what arrives, in order and without holes; an empty list when there is nothing yet.

        With `tell_idle` an empty list also says that nothing came for `HEARTBEAT_S`, from a server that lives.

        `after` is the stream sequence to start behind. With `newest_per_subject` reading begins with the newest
        message of each subject, and does so again whenever the consumer had to be made anew (`opened` counts
        that): what was deleted meanwhile is then missing there.
        """
        newest = newest_per_subject
        self._tell_idle = tell_idle
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
                _log.debug("cursor_reopens", stream=self._stream, after=after, reason=str(error))
            await self._close_consumer()
            await asyncio.sleep(BACKOFF_S[min(tries, len(BACKOFF_S) - 1)])
            tries += 1

    async def aclose(self) -> None:
        """Drop the subscription and the server's consumer."""
        await self._close_consumer()

    async def _open(self, after: int, newest: bool) -> None:
        """Make a fresh consumer behind `after`."""
        self._inbox = self._client.new_inbox()
        self._consumer = "c" + self._inbox.rsplit(".", 1)[-1]
        self._buffer, self._outstanding, self._delivered, self._failure = [], 0, 0, ""
        self._idle = False
        self._subscription = await self._client.subscribe(self._inbox, cb=self._on_message)
        config: dict[str, Any] = {
            "name": self._consumer,
            "ack_policy": "none",
            "max_deliver": 1,
            "mem_storage": True,
            "num_replicas": 1,
            "inactive_threshold": INACTIVE_S * SECOND_NS,
            "deliver_policy": "last_per_subject" if newest else "by_start_sequence",
        }
        if not newest:
            config["opt_start_seq"] = after + 1
        if self._filter or newest:
            config["filter_subject"] = self._filter or ">"
        verb = f"CONSUMER.CREATE.{self._stream}.{self._consumer}"
        if self._filter or newest:
            verb += f".{config['filter_subject']}"
        answer = await api(self._client, verb, {"stream_name": self._stream, "config": config, "action": ""})
        self.opened += 1
        self.pending = int(answer.get("num_pending", 0))
        await self._ask_more()

    async def _check_identity(self, after: int) -> None:
        info = await api(self._client, f"STREAM.INFO.{self._stream}")
        created = str(info["created"])
        before, self._created = self._created or created, created
        if created != before or (self.opened and int(info["state"]["last_seq"]) < after):
            raise StreamReplaced(f"{self._stream} was created {created}, before that {before}")

    async def _take(self) -> list[Raw]:
        loop = asyncio.get_running_loop()
        while not self._buffer:
            if self._failure:
                raise _Lost(self._failure)
            if self._idle and self._tell_idle:
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
        # What arrived and was not taken yet counts too: a pull that ended must not be made up for.
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

    async def _on_message(self, message: Msg) -> None:
        headers = message.headers
        status = headers.get("Status") if headers and not message.reply.startswith("$JS.ACK") else None
        if status is not None and headers is not None:
            await self._on_status(status, headers)
        else:
            self._on_data(message)
        self._wake.set()

    def _on_data(self, message: Msg) -> None:
        position, delivered, stored_ns, pending = parse_ack(message.reply)
        if delivered != self._delivered + 1:
            self._failure = f"delivery {delivered} came after {self._delivered}"
            return
        self._delivered = delivered
        self._idle = False
        self.pending = pending
        self._outstanding -= 1
        self._buffer.append(
            Raw(position, delivered, pending, stored_ns, message.subject, message.data, message.headers)
        )

    async def _on_status(self, status: str, headers: dict[str, str]) -> None:
        if status == "100":
            self._idle = True
            return
        ended = status in ("404", "408") or headers.get("Description", "").endswith(PULL_ENDS)
        if ended:
            # This pull ended; what it did not deliver may be asked for again.
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
            # The server drops an idle consumer by itself after INACTIVE_S.
            pass
