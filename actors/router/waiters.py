"""Long polls of edges for queries that wait in a router's admission queue.

Subjects in
    hw.<ns>.wait.<pool>.<router>.<epoch>
A poll is answered as soon as its query has an outcome, and after `HOLD_S` at the latest, so that an edge detects a dead
router within its usual timeout. A query that is not polled for `ABANDONED_S` is discarded.
"""

from collections import OrderedDict
from typing import Final, NamedTuple, Protocol

import msgspec
import structlog

from headwater.actors.bus.port import BusError, Message, Subscription
from headwater.actors.router.decisions import DecisionMaker
from headwater.actors.runtime.ports import Ports
from headwater.actors.runtime.tasks import Spawn
from headwater.schemas import subjects
from headwater.schemas.events.route import Decision, RouteQueued, RouteRefused, RouteReply, RouteWait

HOLD_S: Final = 1.0
"""Well below the time after which an edge gives up on a reply."""

ABANDONED_S: Final = 5.0
"""If polls or their replies are lost, an edge polls for the third time within this."""

REFUSALS_MAX: Final = 4_096
"""Refusals remembered for edges that were between two polls."""

_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(RouteWait)

_log = structlog.get_logger("headwater.queue")


class Discarder(Protocol):
    """The owner of the queue."""

    def discard(self, request: str, reason: str) -> None:
        """Remove a query whose client is gone, if it is queued."""
        ...


class _Poll(NamedTuple):
    reply: str
    until_s: float


class QueueWaiters:
    """See the module."""

    def __init__(
        self, ports: Ports, name: str, pool: str, decisions: DecisionMaker, queue: Discarder, spawn: Spawn
    ) -> None:
        self._ports = ports
        self._name = name
        self._pool = pool
        self._decisions = decisions
        self._queue = queue
        self._spawn = spawn
        self._epoch = 0
        self._subscription: Subscription | None = None
        self._polled_s: dict[str, float] = {}
        self._polls: dict[str, _Poll] = {}
        self._refusals: OrderedDict[str, RouteRefused] = OrderedDict()

    async def subscribe(self, epoch: int) -> None:
        """Accept polls from now on."""
        self._epoch = epoch
        subject = subjects.route_wait(self._ports.ns, self._pool, self._name, epoch)
        self._subscription = await self._ports.bus.subscribe(subject, self._on_poll)

    async def close(self) -> None:
        """Accept no more polls. Idempotent."""
        if self._subscription is not None:
            await self._subscription.unsubscribe()
            self._subscription = None

    def register(self, request: str) -> RouteQueued:
        """A query waits: the reply that makes its edge poll."""
        self._polled_s.setdefault(request, self._ports.clock.monotonic_s())
        return RouteQueued(self._name, self._epoch)

    def notify(self, request: str, reply: Decision | RouteRefused | None) -> None:
        """A query left the queue with this outcome; None if its edge does not want it."""
        self._polled_s.pop(request, None)
        poll = self._polls.pop(request, None)
        if poll is not None and reply is not None:
            self._spawn(self._reply(poll.reply, reply), "queue answers")
        elif isinstance(reply, RouteRefused):
            # Decisions are remembered by the router.
            self._refusals[request] = reply
            if len(self._refusals) > REFUSALS_MAX:
                self._refusals.popitem(last=False)

    def expire(self, now_s: float) -> None:
        """Answer polls that were held for long enough, and discard queries that are not polled any more."""
        for request in [one for one, polled_s in self._polled_s.items() if now_s - polled_s > ABANDONED_S]:
            self._queue.discard(request, "abandoned")
        for request in [one for one, poll in self._polls.items() if poll.until_s <= now_s]:
            poll = self._polls.pop(request)
            self._spawn(self._reply(poll.reply, RouteQueued(self._name, self._epoch)), "queue answers")

    async def _on_poll(self, message: Message) -> None:
        try:
            wait = _decoder.decode(message.data)
        except msgspec.DecodeError as error:
            _log.warning("wait_unreadable", reason=str(error))
            return
        request, now_s = wait.request, self._ports.clock.monotonic_s()
        decision = self._decisions.find_recent(request)
        if wait.gone:
            self._queue.discard(request, "gone")
            if decision is not None:
                self._decisions.void(decision)
        elif request in self._polled_s:
            self._polled_s[request] = now_s
            self._polls[request] = _Poll(message.reply, now_s + HOLD_S)
        else:
            unknown = RouteRefused(f"router {self._name} has no such query", 1.0)
            await self._reply(message.reply, decision or self._refusals.get(request, unknown))

    async def _reply(self, subject: str, reply: RouteReply) -> None:
        if not subject:
            return
        try:
            await self._ports.bus.publish(subject, _encode(reply))
        except BusError as error:
            # The edge polls again.
            _log.warning("queue_answer_not_sent", reason=str(error))
