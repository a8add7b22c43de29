"""`Bus` on core NATS. Only this module and `headwater.events.jetstream` use nats-py.

A message larger than the server's `max_payload` (1 MiB unless it is configured) is sent in pieces: messages on the same subject, with a header
that says which message they belong to. Replies go to the last one. A connection keeps the order of what it
sends, so a reader joins them as they come.
"""

import asyncio
import contextlib
import secrets
import time
from typing import Final

import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsSubscription
from nats.errors import ConnectionClosedError, NoRespondersError
from nats.errors import Error as NatsError

from headwater.actors.runtime.ports import (
    PENDING_MESSAGES_MAX,
    BusClosed,
    BusError,
    Handler,
    Message,
    MessageTooLarge,
    NoResponder,
    ReplyTimeout,
)

PENDING_BYTES_MAX = 256 * 1024 * 1024
"""Limit per subscription. Past it, or `PENDING_MESSAGES_MAX`, the client drops messages and logs it; readers of token frames detect the gap by
position and query the missing tokens."""

PIECE: Final = "Headwater-Piece"
"""Header of a piece: id of the message, number of the piece, number of all pieces."""

RESERVE_BYTES: Final = 4096
"""Bytes of the server's `max_payload` kept for headers, which count towards it."""

PARTIAL_BYTES_MAX: Final = 256 << 20
PARTIAL_S_MAX: Final = 60.0
"""Pieces that a subscription keeps, and for how long, until the rest of their message comes."""

_log = structlog.get_logger("headwater.bus")


class NatsBus:
    """See `headwater.actors.runtime.ports.Bus`."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._in_pieces = asyncio.Lock()
        """Held while a message goes in pieces: a smaller one must not overtake it."""

    async def publish(self, subject: str, data: bytes) -> None:
        """See `Bus.publish`."""
        try:
            if len(data) > self._payload_max:
                if subject.startswith("_INBOX"):
                    raise MessageTooLarge(
                        f"a reply of {len(data)} bytes exceeds the NATS server's max_payload of {self._client.max_payload}"
                    )
                async with self._in_pieces:
                    last, headers = await self._send_first_pieces(subject, data)
                    await self._client.publish(subject, last, headers=headers)
            elif self._in_pieces.locked():
                async with self._in_pieces:
                    await self._client.publish(subject, data)
            else:
                await self._client.publish(subject, data)
        except ConnectionClosedError as error:
            raise BusClosed("the NATS connection is closed") from error
        except NatsError as error:
            raise BusError(f"{subject}: {error}") from error

    async def request(self, subject: str, data: bytes, *, timeout_s: float) -> bytes:
        """See `Bus.request`."""
        try:
            if len(data) > self._payload_max:
                reply = await self._request_in_pieces(subject, data, timeout_s)
            else:
                if self._in_pieces.locked():
                    async with self._in_pieces:
                        pass
                reply = await self._client.request(subject, data, timeout=timeout_s)
        except NoRespondersError as error:
            raise NoResponder(f"no subscriber on {subject}") from error
        except TimeoutError as error:
            raise ReplyTimeout(f"no reply on {subject} within {timeout_s} s") from error
        except ConnectionClosedError as error:
            raise BusClosed("the NATS connection is closed") from error
        except NatsError as error:
            raise BusError(f"{subject}: {error}") from error
        return reply.data

    @property
    def _payload_max(self) -> int:
        return self._client.max_payload - RESERVE_BYTES

    async def _send_first_pieces(self, subject: str, data: bytes) -> tuple[bytes, dict[str, str]]:
        """Send all pieces but the last; returns that one with its headers. With the lock held."""
        size, name = self._payload_max, secrets.token_hex(8)
        count = -(-len(data) // size)
        for number in range(count - 1):
            piece = data[number * size : (number + 1) * size]
            await self._client.publish(subject, piece, headers={PIECE: f"{name} {number} {count}"})
            # What waits to be written is bounded.
            await self._client.flush()
        return data[(count - 1) * size :], {PIECE: f"{name} {count - 1} {count}"}

    async def _request_in_pieces(self, subject: str, data: bytes, timeout_s: float) -> Msg:
        async with self._in_pieces:
            last, headers = await self._send_first_pieces(subject, data)
            asking = asyncio.ensure_future(
                self._client.request(subject, last, timeout=timeout_s, headers=headers)
            )
            # It is sent in this turn of the loop; its reply takes as long as it takes.
            await asyncio.sleep(0)
        try:
            return await asking
        finally:
            asking.cancel()

    async def subscribe(self, subject: str, handler: Handler, *, queue: str = "") -> "_Subscription":
        """See `Bus.subscribe`."""

        exact = "*" not in subject and ">" not in subject
        partial = _PartialMessages()

        async def deliver(message: Msg) -> None:
            if exact and message.subject != subject:
                # A client that may create consumers can have a stream's messages delivered to any subject; they keep
                # their own. This check keeps it from sending what it has no permission to publish.
                _log.error("subject_mismatch_dropped", subject=subject, came_as=message.subject)
                return
            data = message.data
            if message.headers is not None and PIECE in message.headers:
                joined = partial.join(message.headers[PIECE], data)
                if joined is None:
                    return
                data = joined
            try:
                await handler(Message(message.subject, data, message.reply))
            except Exception:
                _log.exception("handler_failed", subject=message.subject)

        subscription = await self._client.subscribe(
            subject,
            queue=queue,
            cb=deliver,
            pending_msgs_limit=PENDING_MESSAGES_MAX,
            pending_bytes_limit=PENDING_BYTES_MAX,
        )
        return _Subscription(subscription)

    async def flush(self) -> None:
        """Wait until the server has received all published messages."""
        await self._client.flush()

    async def close(self) -> None:
        """Send buffered messages and close the connection."""
        if not self._client.is_closed:
            await self._client.close()


class _PartialMessages:
    """The messages of one subscription that lack pieces which are still to come."""

    def __init__(self) -> None:
        self._pieces: dict[str, tuple[float, list[bytes]]] = {}
        self._bytes = 0

    def join(self, header: str, piece: bytes) -> bytes | None:
        """The whole message, once this was its last piece. A message that lacks a piece is dropped: its sender tries again."""
        now_s = time.monotonic()
        try:
            name, number, count = header.split()
            at, total = int(number), int(count)
        except ValueError:
            _log.error("piece_unreadable", header=header[:100])
            return None
        for old in [key for key, (began_s, _) in self._pieces.items() if now_s - began_s > PARTIAL_S_MAX]:
            self._drop(old, "the rest did not come")
        _, pieces = self._pieces.setdefault(name, (now_s, []))
        if at != len(pieces):
            self._drop(name, "a piece is missing")
            return None
        pieces.append(piece)
        self._bytes += len(piece)
        if at == total - 1:
            del self._pieces[name]
            self._bytes -= sum(map(len, pieces))
            return b"".join(pieces)
        if self._bytes > PARTIAL_BYTES_MAX:
            self._drop(name, "too much waits for its rest")
        return None

    def _drop(self, name: str, reason: str) -> None:
        _, pieces = self._pieces.pop(name)
        self._bytes -= sum(map(len, pieces))
        if pieces:
            _log.warning("pieces_dropped", pieces=len(pieces), reason=reason)


class _Subscription:
    """Unsubscribing again, or after the connection was closed, is fine."""

    def __init__(self, subscription: NatsSubscription) -> None:
        self._subscription = subscription

    async def unsubscribe(self) -> None:
        """See `Subscription.unsubscribe`."""
        with contextlib.suppress(NatsError):
            await self._subscription.unsubscribe()
