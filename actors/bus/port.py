"""The `Bus` port: core NATS messaging, for requests, token frames and cancellations; the log is another port."""

from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple, Protocol

PENDING_MESSAGES_MAX: Final = 65_536
"""Messages that wait for one subscription's handler. Beyond, they are dropped, and that is logged."""


class BusError(Exception):
    """Base of bus errors. All but `MessageTooLarge` are transient: the same call may succeed later."""


class NoResponder(BusError):
    """The subject has no subscriber: the actor has ended, or never started."""


class ReplyTimeout(BusError):
    """No reply came in time; the request may have been received."""


class MessageTooLarge(BusError):
    """The server takes no message of this size, and this one cannot go in pieces."""


class BusClosed(BusError):
    """This client's connection is closed."""


class Message(NamedTuple):
    """A received message. `reply` is empty if no reply is expected."""

    subject: str
    data: bytes
    reply: str


Handler = Callable[[Message], Awaitable[None]]


class Subscription(Protocol):
    """An active subscription."""

    async def unsubscribe(self) -> None:
        """Stop; again is fine. Messages that were delivered but not handled are dropped."""
        ...


class Bus(Protocol):
    """Publish, request and subscribe. Delivery is at most once: a reader that must not lose a message requests it again."""

    async def publish(self, subject: str, data: bytes) -> None:
        """Send a message, of any size, without confirmation. A reply is one message of the server's size: else `MessageTooLarge`."""
        ...

    async def request(self, subject: str, data: bytes, *, timeout_s: float) -> bytes:
        """Send a message, of any size, and wait for one reply. Raises `NoResponder`, `ReplyTimeout` or `BusClosed`.

        Not to a queue group: the pieces of a large message would go to several members.
        """
        ...

    async def subscribe(self, subject: str, handler: Handler, *, queue: str = "") -> Subscription:
        """Call `handler` for each message, one at a time and in order, until unsubscribed.

        Subscribers of one `queue` (a NATS queue group) share the messages. A slow handler delays only its own
        subscription; one that has to wait should start a task. An exception is logged, and the next message is
        handled.
        """
        ...
