"""The ports of an actor: the `Bus` (core NATS messaging, for requests, token frames and cancellations), the log, and the state of its storage.

The storage: how long appends and lease renewals have gone unanswered. A process that cannot persist keeps serving and reports it everywhere:
in its health, its metrics, its log and, where the lease store still works, its lease, from which the edges learn it.
"""

import asyncio
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any, Final, NamedTuple, Protocol

import msgspec
import structlog

from headwater.actors import metrics
from headwater.events.ports import Blobs, Log, LogError
from headwater.events.snapshot_bytes import SnapshotCache
from headwater.events.snapshot_store import LADDER_BYTES, SnapshotStore, continues
from headwater.events.table import Table
from headwater.events.writer import Writer
from headwater.router.index.pack import prepare
from headwater.router.state import STATE_VERSION, RouterState
from headwater.schemas import subjects
from headwater.schemas.clock import Clock
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
    """See `headwater.actors.runtime.ports.Bus`. Wildcards '*' and '>' work as in NATS."""

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


# The state of an actor's storage.

STALLED_S: Final = 4.0
"""An append or renewal that is unanswered for this long is reported."""

CHECK_PERIOD_S: Final = 0.5
PROBE_S: Final = 5.0
"""How often an idle process appends, to check that it could."""

HINT: Final = (
    "free disk space on the NATS server, or restore its peers; after a full disk its file store stays frozen until "
    "that nats-server is restarted (`headwater up` restarts its own)"
)


class Storing(Protocol):
    """Something that writes to NATS and awaits confirmations: a log writer or a lease."""

    @property
    def stalled_s(self) -> float:
        """Seconds for which it has been waiting for a confirmation; 0 while it is not waiting."""
        ...


class MeasuredWriter:
    """A writer whose appends are metrics. Actors of one process share these, so each adds its changes."""

    def __init__(self, name: str, writer: Writer) -> None:
        self.writer = writer
        self._pending = metrics.LOG_PENDING.labels(name)
        self._retries = metrics.LOG_RETRIES.labels(name)
        self._dropped = metrics.LOG_DROPPED.labels(name)
        self._noted = (0, writer.retried, writer.refused)
        writer.on_append = metrics.LOG_APPEND_SECONDS.labels(name).observe

    def note(self, pending: int) -> None:
        """Add the changes since the last call; `pending` events count as such now."""
        before, retried, refused = self._noted
        self._noted = (pending, self.writer.retried, self.writer.refused)
        self._pending.inc(pending - before)
        self._retries.inc(self.writer.retried - retried)
        self._dropped.inc(self.writer.refused - refused)


class Persistence:
    """Watches the writers of one actor. `log` is the actor's structlog logger."""

    def __init__(self, clock: Clock, log: Any) -> None:
        self._clock = clock
        self._log = log
        self._watched: dict[str, Storing] = {}
        self._reported: set[str] = set()
        self._measured: dict[str, MeasuredWriter] = {}

    def watch(self, name: str, storing: Storing) -> None:
        """Watch `storing` from now on, in place of what was watched as `name` before."""
        self._watched[name] = storing

    def measure(self, name: str, writer: Writer) -> None:
        """Show `writer`'s appends as metrics from now on, in place of what was measured as `name` before."""
        if name in self._measured:
            self._measured[name].note(0)
        self._measured[name] = MeasuredWriter(name, writer)

    def stalled(self) -> dict[str, float]:
        """Seconds for which each writer has been stalled, of those past `STALLED_S`."""
        seconds = {name: round(storing.stalled_s, 1) for name, storing in self._watched.items()}
        return {name: stalled_s for name, stalled_s in seconds.items() if stalled_s >= STALLED_S}

    @property
    def is_stalled(self) -> bool:
        """Is there a writer that cannot store its events?"""
        return bool(self.stalled())

    async def run(self) -> None:
        """Report changes in the log, and the state as metrics. Does not return."""
        try:
            while True:
                await self._clock.sleep(CHECK_PERIOD_S)
                self._report(self.stalled())
                for measured in self._measured.values():
                    measured.note(measured.writer.pending)
        finally:
            for measured in self._measured.values():
                measured.note(0)

    def _report(self, stalled: dict[str, float]) -> None:
        for name in self._watched:
            metrics.LOG_STALLED.labels(name).set(stalled.get(name, 0.0))
        for name in sorted(stalled.keys() - self._reported):
            self._log.error("persistence_stalled", what=name, for_s=stalled[name], hint=HINT)
        for name in sorted(self._reported - stalled.keys()):
            self._log.info("persistence_resumed", what=name)
        self._reported = set(stalled)


# The ports of an actor: its only interfaces to the outside, over NATS or in memory.


class Ports(NamedTuple):
    """The ports of one namespace.

    `api_keys` and `secrets` are tables of edges: of other processes only an operator's may write them. `stored` is
    the table of stored responses, `videos` that of video jobs; only edges use these.
    `pool_log` opens the log of a pool and creates it where it is missing; `ids` makes short unique names. `cache`
    is this machine's copy of the newest snapshot's bulk data, None for none. `pool_logs` lists the pools that have a log, also those
    whose model is no longer served. `server` is the name and version of the server that stores all this, "" if it is none.
    """

    ns: str
    bus: Bus
    leases: Table
    cards: Table
    api_keys: Table
    secrets: Table
    blobs: Blobs
    stored: Table
    videos: Table
    requests: Log
    pool_log: Callable[[str], Awaitable[Log]]
    clock: Clock
    ids: Callable[[], str]
    cache: SnapshotCache | None = None
    pool_logs: Callable[[], Awaitable[list[str]]] | None = None
    server: str = ""


# Restoration of a router's state from the newest snapshot of a pool; shadow routers use it too.


class SnapshotReader:
    """Restores the snapshots of one pool."""

    def __init__(self, ports: Ports, pool: str) -> None:
        self._ports = ports
        self._store = SnapshotStore(
            ports.blobs,
            pool,
            cache=ports.cache,
            ids=ports.ids,
            prepare=prepare,
            ladder_bytes=LADDER_BYTES,
        )
        self._log = structlog.get_logger("headwater.router").bind(pool=pool)

    async def restore(self, log: Log) -> RouterState | None:
        """The state of the newest snapshot from which the log continues; None to fold the log from its start.

        Also None if the snapshot cannot be read, which is logged: the log still holds what retention has not cut.
        """
        bounds = await log.bounds()
        try:
            snapshot = await self._store.newest(lambda position: continues(position, bounds))
        except LogError as error:
            self._log.warning("snapshots_unavailable", reason=str(error))
            return None
        if snapshot is None:
            return None
        if snapshot.facts.get("log", "") not in ("", await log.identity()):
            self._log.error("snapshot_of_another_log", log_position=snapshot.position)
            return None
        try:
            # In a thread: the event loop must renew the lease.
            state = await asyncio.to_thread(RouterState.restore, snapshot)
        except (msgspec.ValidationError, LookupError, TypeError, ValueError) as error:
            # Written by another release.
            self._log.error("snapshot_unusable", log_position=snapshot.position, reason=repr(error))
            return None
        if state.version < STATE_VERSION:
            await self._complete(state, log)
        return state

    async def _complete(self, state: RouterState, log: Log) -> None:
        """Add to the state of an earlier release what that did not read. Its fleet events are few."""
        async for piece in log.scan(0, state.position, subjects.pool_kinds("fleet")):
            for record in piece.records:
                state.complete(record)
        self._log.info("snapshot_completed", log_position=state.position, made_by=state.version)
        state.version = STATE_VERSION
