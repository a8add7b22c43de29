"""The `Bus` port: core messaging. Requests, token frames and cancellations travel here, never the log."""

from collections.abc import Awaitable, Callable
from typing import NamedTuple, Protocol


class BusError(Exception):
    """Base of bus errors. All of them may pass: the same call can work later."""


class NoResponder(BusError):
    """Nobody is subscribed to the subject: the actor is gone, or was never there."""


class ReplyTimeout(BusError):
    """Somebody may have got the request; no answer came in time."""


class BusClosed(BusError):
    """This side's connection is closed."""


class Message(NamedTuple):
    """A received message. `reply` is empty where no answer is wanted."""

    subject: str
    data: bytes
    reply: str


Handler = Callable[[Message], Awaitable[None]]


class Subscription(Protocol):
    """A live subscription."""

    async def unsubscribe(self) -> None:
        """Stop; again is fine. Messages that were delivered but not handled are dropped."""
        ...


class Bus(Protocol):
    """Publish, request and subscribe. At most once: what must not be lost is asked for again by its reader."""

    async def publish(self, subject: str, data: bytes) -> None:
        """Send and forget."""
        ...

    async def request(self, subject: str, data: bytes, *, timeout_s: float) -> bytes:
        """Send and wait for one answer. Raises `NoResponder`, `ReplyTimeout` or `BusClosed`."""
        ...

    async def subscribe(self, subject: str, handler: Handler, *, queue: str = "") -> Subscription:
        """Call `handler` for each message, one at a time and in order, until unsubscribed.

        Subscribers of one `queue` share the messages. A handler that is slow delays only its own
        subscription; one that must not wait starts a task. An exception is logged, and the next message
        is handled.
        """
        ...
