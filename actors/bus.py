"""The `Bus` port: core NATS messaging, for requests, token frames and cancellations; the log is another port."""

import asyncio
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Final, NamedTuple, Protocol

import structlog

from headwater.schemas.subjects import matches

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


# `Bus` in memory: the same contract within one process. For tests and the simulator.

_log = structlog.get_logger("headwater.bus")


class MemoryBus:
    """See `headwater.actors.bus.Bus`. Wildcards '*' and '>' work as in NATS."""

    def __init__(self) -> None:
        self._subscriptions: list[QueuedSubscription] = []
        self._inboxes = count(1)
        self._turn = 0

    async def publish(self, subject: str, data: bytes) -> None:
        """See `Bus.publish`."""
        self._deliver(Message(subject, data, ""))

    async def request(self, subject: str, data: bytes, *, timeout_s: float) -> bytes:
        """See `Bus.request`."""
        inbox = f"_INBOX.{next(self._inboxes)}"
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        async def on_reply(message: Message) -> None:
            if not answer.done():
                answer.set_result(message.data)

        subscription = await self.subscribe(inbox, on_reply)
        try:
            if not self._deliver(Message(subject, data, inbox)):
                raise NoResponder(f"no subscriber on {subject}")
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError as error:
            raise ReplyTimeout(f"no reply on {subject} within {timeout_s} s") from error
        finally:
            await subscription.unsubscribe()

    async def subscribe(self, subject: str, handler: Handler, *, queue: str = "") -> "QueuedSubscription":
        """See `Bus.subscribe`."""
        subscription = QueuedSubscription(subject, handler, queue, self._drop)
        self._subscriptions.append(subscription)
        return subscription

    def _drop(self, subscription: "QueuedSubscription") -> None:
        if subscription in self._subscriptions:
            self._subscriptions.remove(subscription)

    def _deliver(self, message: Message) -> int:
        matching = [s for s in self._subscriptions if matches(s.pattern, message.subject)]
        chosen = [s for s in matching if not s.queue]
        for queue in sorted({s.queue for s in matching if s.queue}):
            members = [s for s in matching if s.queue == queue]
            self._turn += 1
            chosen.append(members[self._turn % len(members)])
        for subscription in chosen:
            subscription.deliver(message)
        return len(chosen)


class QueuedSubscription:
    """Messages wait in a queue and are handled by a task, one at a time. `remove` ends the delivery."""

    def __init__(
        self, pattern: str, handler: Handler, queue: str, remove: Callable[["QueuedSubscription"], None]
    ) -> None:
        self.pattern = pattern
        self.queue = queue
        self.queued: asyncio.Queue[Message] = asyncio.Queue(PENDING_MESSAGES_MAX)
        self._handler = handler
        self._remove = remove
        self._task = asyncio.create_task(self._run(), name=f"subscription {pattern}")

    def deliver(self, message: Message) -> None:
        """Queue a message; a full queue drops it, as NATS does."""
        if self.queued.full():
            _log.error("message_dropped", subject=message.subject, pending=PENDING_MESSAGES_MAX)
        else:
            self.queued.put_nowait(message)

    async def _run(self) -> None:
        while True:
            message = await self.queued.get()
            try:
                await self._handler(message)
            except Exception:
                _log.exception("handler_failed", subject=message.subject)

    async def unsubscribe(self) -> None:
        """See `Subscription.unsubscribe`."""
        self._remove(self)
        self._task.cancel()
        if asyncio.current_task() is not self._task:
            await asyncio.gather(self._task, return_exceptions=True)
