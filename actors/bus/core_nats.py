"""`Bus` on core NATS. Apart from `headwater.events.jetstream` the only module that imports `nats`."""

import contextlib

import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsSubscription
from nats.errors import ConnectionClosedError, NoRespondersError
from nats.errors import Error as NatsError

from headwater.actors.bus.port import (
    PENDING_MESSAGES_MAX,
    BusClosed,
    BusError,
    Handler,
    Message,
    NoResponder,
    ReplyTimeout,
)

PENDING_BYTES_MAX = 256 * 1024 * 1024
"""Per subscription. Past it, or `PENDING_MESSAGES_MAX`, the client drops messages and logs it; readers of token frames detect the gap by
position and query the missing tokens."""

_log = structlog.get_logger("headwater.bus")


class NatsBus:
    """See `headwater.actors.bus.port.Bus`."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def publish(self, subject: str, data: bytes) -> None:
        """See `Bus.publish`."""
        try:
            await self._client.publish(subject, data)
        except ConnectionClosedError as error:
            raise BusClosed("the NATS connection is closed") from error
        except NatsError as error:
            raise BusError(f"{subject}: {error}") from error

    async def request(self, subject: str, data: bytes, *, timeout_s: float) -> bytes:
        """See `Bus.request`."""
        try:
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

    async def subscribe(self, subject: str, handler: Handler, *, queue: str = "") -> "_Subscription":
        """See `Bus.subscribe`."""

        exact = "*" not in subject and ">" not in subject

        async def deliver(message: Msg) -> None:
            if exact and message.subject != subject:
                # A client that may create consumers can have a stream's messages delivered to any subject; they keep
                # their own. This check keeps it from sending what it has no permission to publish.
                _log.error("subject_mismatch_dropped", subject=subject, came_as=message.subject)
                return
            try:
                await handler(Message(message.subject, message.data, message.reply))
            except Exception:
                _log.exception("handler_failed", subject=message.subject)

        made = await self._client.subscribe(
            subject,
            queue=queue,
            cb=deliver,
            pending_msgs_limit=PENDING_MESSAGES_MAX,
            pending_bytes_limit=PENDING_BYTES_MAX,
        )
        return _Subscription(made)

    async def flush(self) -> None:
        """Wait until the server has received all published messages."""
        await self._client.flush()

    async def close(self) -> None:
        """Send buffered messages and close the connection."""
        if not self._client.is_closed:
            await self._client.close()


class _Subscription:
    """Unsubscribing again, or after the connection was closed, is fine."""

    def __init__(self, made: NatsSubscription) -> None:
        self._made = made

    async def unsubscribe(self) -> None:
        """See `Subscription.unsubscribe`."""
        with contextlib.suppress(NatsError):
            await self._made.unsubscribe()
