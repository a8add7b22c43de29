"""The beginning and end of an incarnation: its subscriptions, the gate that holds its messages until it has joined, and its end.

A router may choose a worker as soon as its `WorkerJoined` event is in the log, before the worker has the confirmation.
Requests that arrive in between wait at the gate, in order. If the append then fails, they are refused, and their
edges try another worker.

A failed worker sends everything at once, so that no part waits for another: its requests end with an error (the edges
migrate them), its lease is released (so that no reader waits for it to lapse), and the log gets the reason. If NATS is
unreachable none of this arrives: then the lease lapses, a router publishes that, and the edges query in vain.
"""

import asyncio
from collections.abc import Awaitable, Iterable

import msgspec
import structlog

from headwater.actors.bus import Bus, Handler, Message, Subscription
from headwater.actors.runtime.actor import Spawn
from headwater.actors.runtime.lease import LeaseHandle
from headwater.actors.runtime.persistence import Ports
from headwater.actors.worker.incarnation import Incarnation
from headwater.actors.worker.requests import RequestIntake
from headwater.actors.worker.token_frames import FrameSender
from headwater.schemas import subjects
from headwater.schemas.messages.inference import Refused
from headwater.schemas.subjects import EngineVerb

WAITING_MAX = 256
WAIT_S_MAX = 1.5
"""Less than an edge waits for a worker's reply: a refusal in time is better than an answer after the timeout."""

_encode = msgspec.msgpack.Encoder().encode


class WorkerSubscriptions:
    """Subscriptions of the worker `name`. A verb may have several handlers; each gets every message."""

    def __init__(self, ports: Ports, name: str) -> None:
        self._ports = ports
        self._name = name
        self._open: list[Subscription] = []

    def __len__(self) -> int:
        """Open subscriptions."""
        return len(self._open)

    async def open(
        self, epoch: int, verbs: Iterable[tuple[EngineVerb, Handler]], *, resync: Handler, control: Handler
    ) -> None:
        """Subscribe. The subjects of `verbs` contain the epoch; the other two are the same for every incarnation."""
        ns, name = self._ports.ns, self._name
        wanted = [(subjects.engine(ns, name, epoch, verb), handler) for verb, handler in verbs]
        wanted += [(subjects.resync(ns, name), resync), (subjects.control(ns, name), control)]
        for subject, handler in wanted:
            self._open.append(await self._ports.bus.subscribe(subject, handler))

    async def close(self) -> None:
        """Unsubscribe. Again is fine."""
        for subscription in self._open:
            await subscription.unsubscribe()
        self._open.clear()


class ReadyGate:
    """Holds messages until it is opened. Those that wait longer than `WAIT_S_MAX`, or are too many, are refused."""

    def __init__(self, bus: Bus, worker: str, spawn: Spawn) -> None:
        self._bus = bus
        self._worker = worker
        self._spawn = spawn
        self._waiting = 0
        self._opened = asyncio.Event()

    @property
    def waiting(self) -> int:
        """Messages held now."""
        return self._waiting

    def open(self) -> None:
        """Pass all messages, those that wait first."""
        self._opened.set()

    def close(self) -> None:
        """Hold messages from now on."""
        self._opened.clear()

    def guard(self, handler: Handler) -> Handler:
        """The handler, called only while the gate is open."""

        async def handle(message: Message) -> None:
            if self._opened.is_set() and not self._waiting:
                await handler(message)
            elif self._waiting >= WAITING_MAX:
                await self._refuse(message, f"{WAITING_MAX} requests are waiting for it to become ready")
            else:
                # In a task: a subscription delivers one message at a time.
                self._waiting += 1
                self._spawn(self._wait(message, handler), "ready gate")

        return handle

    async def _wait(self, message: Message, handler: Handler) -> None:
        try:
            async with asyncio.timeout(WAIT_S_MAX):
                await self._opened.wait()
        except TimeoutError:
            await self._refuse(message, "it is not ready yet")
        else:
            # An event wakes its waiters in order, so messages are handled in order of arrival.
            await handler(message)
        finally:
            self._waiting -= 1

    async def _refuse(self, message: Message, reason: str) -> None:
        if message.reply:
            refused = Refused(f"worker {self._worker}: {reason}", True)
            await self._bus.publish(message.reply, _encode(refused))


# The end: what a worker sends to edges, the lease table and the pool log, within a bounded time.

FAILURE_NOTICE_S_MAX = 1.5
LEAVE_S_MAX = 2.0

_log = structlog.get_logger("headwater.worker")


async def shutdown_after_failure(
    intake: RequestIntake, held: LeaseHandle | None, incarnation: Incarnation | None, reason: str
) -> None:
    """Publish that this worker has failed. Returns within `FAILURE_NOTICE_S_MAX` and never raises."""
    requests = intake.fail_all(reason)
    _log.error("worker_failed", reason=reason, requests=requests)
    notices: dict[str, Awaitable[None]] = {"frames": intake.frames.flush()}
    if held is not None:
        notices["lease"] = held.release()
    if incarnation is not None:
        notices["log"] = incarnation.publish_failure(reason)
    await asyncio.gather(*(_send_notice(what, notice) for what, notice in notices.items()))


async def shutdown_after_drain(frames: FrameSender, incarnation: Incarnation) -> None:
    """Leave the pool: frames are flushed, the log is written, the lease is released. Takes about `LEAVE_S_MAX` at most."""
    try:
        async with asyncio.timeout(LEAVE_S_MAX):
            await frames.flush()
            await incarnation.leave()
    except TimeoutError:
        _log.warning("shutdown_notice_failed", what="log", after_s=LEAVE_S_MAX)
        await incarnation.lease.release()


async def _send_notice(what: str, notice: Awaitable[None]) -> None:
    try:
        async with asyncio.timeout(FAILURE_NOTICE_S_MAX):
            await notice
    except TimeoutError:
        _log.warning("shutdown_notice_failed", what=what, after_s=FAILURE_NOTICE_S_MAX)
    except Exception as error:
        _log.warning("shutdown_notice_failed", what=what, reason=f"{type(error).__name__}: {error}")


def describe_failure(error: BaseException) -> str:
    """An error in one line; of an exception group, those inside."""
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(describe_failure(one) for one in error.exceptions)
    return f"{type(error).__name__}: {error}"
