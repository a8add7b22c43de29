"""Route queries at one router: decided on its fold, singly and in bursts, or queued until a worker has room.

Decisions are queued for the log. While a snapshot waits for the log to hold all of them, no further ones are made (`pause`).

Bursts: no query is delayed to form a batch: what one read of the connection brought is decided in the next turn, and answered
once all of it is decided. Both orders are those of `router.queue`. That of the decisions costs as much again as deciding,
so a router that falls behind decides in order of arrival.

The queue drives `router.admission` on real time, answers edges that wait, and reports metrics.

How an edge waits
    its query is answered at once with `RouteQueued`; from then on it polls for the outcome (`QueueWaiters`).
    A query whose client is gone, or that is not polled any more, is discarded; a decision made for it is voided
When queries are served
    whenever the fold advances or time passes, in the queue's order, each as soon as a worker that may take it is not
    saturated. Several routers have a queue each; all observe the same workers
On loss of the log
    no worker could be observed to become free: after `SILENCE_S` nothing waits, and queries are decided on the last state
On stop
    queued queries are refused, so that their edges query another router

Subjects in
    hw.<ns>.wait.<pool>.<router>.<epoch>

A poll is answered as soon as its query has an outcome, and after `HOLD_S` at the latest, so that an edge detects a dead
router within its usual timeout. A query that is not polled for `ABANDONED_S` is discarded.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, NamedTuple, Protocol

import msgspec
import structlog

from headwater.actors.metrics import RouterMetrics
from headwater.actors.router.follower import LogFollower
from headwater.actors.runtime.actor import Spawn
from headwater.actors.runtime.ports import BusError, Message, Ports, Subscription
from headwater.events.writer import Writer
from headwater.router.admission import AdmissionQueue, Now, Released
from headwater.router.decide import DecisionContext, decide, prompt_of
from headwater.router.queue import BURST_MAX, QueueSettings, order_by_prompt, order_by_regret
from headwater.router.state import RouterState
from headwater.schemas import subjects
from headwater.schemas.clock import Clock
from headwater.schemas.names import TraceContext
from headwater.schemas.routing import (
    DEFAULT_POLICY,
    Decision,
    DecisionVoided,
    RouteQuery,
    RouteQueued,
    RouteRefused,
    RouteReply,
    RouteWait,
    Weights,
)

RECENT_MAX: Final = 4_096
"""Decisions remembered so that a repeated query gets the same answer."""

SETTLE_S: Final = 0.25
"""How long a pause waits at most for the log to hold all decisions."""


class RoutingSettings(NamedTuple):
    """How a router decides queries that state no preferences of their own."""

    weights: Weights = Weights()
    policy: str = DEFAULT_POLICY
    temperature: float = 0.0


class DecisionMaker:
    """The decisions of one router. `writer` takes the events for the log, once the router has its lease."""

    def __init__(
        self, clock: Clock, follower: LogFollower, settings: RoutingSettings, metrics: RouterMetrics
    ) -> None:
        self.writer: Writer | None = None
        self._clock = clock
        self._follower = follower
        self._settings = settings
        self._metrics = metrics
        self._recent: OrderedDict[str, Decision] = OrderedDict()
        self._running = asyncio.Event()
        self._running.set()

    @property
    def state(self) -> RouterState:
        """The fold."""
        return self._follower.state

    @property
    def settled(self) -> bool:
        """Does the log hold every decision that the state includes?"""
        return self._follower.settled

    @property
    def is_paused(self) -> bool:
        """Must decisions wait for a snapshot?"""
        return not self._running.is_set()

    async def wait_unpaused(self) -> None:
        """Return once decisions may be made."""
        await self._running.wait()

    @asynccontextmanager
    async def pause(self) -> AsyncIterator[None]:
        """Make no decisions inside; entered when the log holds all of them, or after `SETTLE_S`."""
        self._running.clear()
        until_s = self._clock.monotonic_s() + SETTLE_S
        try:
            while not self.settled and self._clock.monotonic_s() < until_s:
                await self._clock.sleep(0.002)
            yield
        finally:
            self._running.set()

    def find_recent(self, request: str) -> Decision | None:
        """The decision for a request, if it was made recently."""
        return self._recent.get(request)

    def preview(self, query: RouteQuery) -> Decision | RouteRefused | None:
        """Return what would be decided now; None for a query that is decided already."""
        return None if self.find_recent(query.request) else self.choose(query)

    def choose(self, query: RouteQuery) -> Decision | RouteRefused:
        """Decide on the present state and change nothing."""
        began_s = self._clock.monotonic_s()
        state, follower, settings = self.state, self._follower, self._settings
        context = DecisionContext(
            number=follower.number + 1,
            position=state.position,
            seen=follower.seen,
            wall_ns=self._clock.wall_ns(),
            weights=settings.weights,
            degraded=follower.is_degraded(),
            policy=settings.policy,
            temperature=settings.temperature,
        )
        reply = decide(state.index, state.loads, state.cold, prompt_of(query), query, context)
        self._metrics.seconds.observe(self._clock.monotonic_s() - began_s)
        return reply

    def commit(self, decision: Decision) -> Decision:
        """Apply a decision and queue it for the log. Call in the same turn of the event loop as `choose`."""
        self._recent[decision.request] = decision
        if len(self._recent) > RECENT_MAX:
            self._recent.popitem(last=False)
        self._follower.apply_own(decision)
        if self.writer is not None:
            self.writer.offer(decision)
        worker = self.state.loads.current(decision.worker, decision.epoch)
        self._metrics.decided(worker.engine if worker is not None else "")
        if worker is not None and decision.leg != "decode":
            # A decode leg's prompt was counted with its prefill leg.
            cached = decision.chosen.cached_blocks * worker.block_size
            self._metrics.prompt_tokens.inc(decision.prompt_tokens)
            self._metrics.predicted_tokens.inc(min(cached, decision.prompt_tokens - 1))
        return decision

    def void(self, decision: Decision) -> None:
        """Publish that the request will not be sent to its worker, unless the worker has accepted it."""
        worker = self.state.loads.current(decision.worker, decision.epoch)
        if self.writer is not None and worker is not None and decision.request in worker.unaccepted:
            self.writer.offer(DecisionVoided(decision.request, decision.worker, decision.epoch))
            self._metrics.voided.inc()


# Bursts: queries that reach a router in one turn of the event loop are decided as a batch.

BEHIND_TURNS: Final = 2
"""After this many turns in a row with more queries arriving, the router counts as behind."""


class QueryHandler(Protocol):
    """What decides and answers the queries of a burst."""

    def preview(self, query: RouteQuery) -> Decision | RouteRefused | None:
        """Decide a query and change nothing."""
        ...

    async def decide(self, query: RouteQuery) -> RouteReply:
        """Decide a query, or let it wait."""
        ...

    async def send(self, message: Message, query: RouteQuery, reply: RouteReply) -> None:
        """Reply to a query."""
        ...


class _Arrived(NamedTuple):
    message: Message
    query: RouteQuery


class BurstBatcher:
    """Collects the queries of one turn of the event loop, and has them decided as a batch."""

    def __init__(self, handler: QueryHandler) -> None:
        self._handler = handler
        self._arrived: list[_Arrived] = []
        self._any = asyncio.Event()
        self._none = asyncio.Event()
        self._none.set()

    def enqueue(self, message: Message, query: RouteQuery) -> None:
        """Add a query to the next batch."""
        self._arrived.append(_Arrived(message, query))
        self._any.set()
        self._none.clear()

    async def run(self) -> None:
        """Answer queries. Does not return."""
        behind = 0
        while True:
            await self._any.wait()
            # One turn: by then everything that was read from the connection together with the first is here.
            await asyncio.sleep(0)
            batch, self._arrived = self._arrived[:BURST_MAX], self._arrived[BURST_MAX:]
            queries = [arrival.query for arrival in batch]
            ordered = behind < BEHIND_TURNS
            order = order_by_regret(queries, self._handler.preview) if ordered else range(len(batch))
            decided = [(batch[index], await self._handler.decide(queries[index])) for index in order]
            for index in order_by_prompt([reply for _, reply in decided]):
                arrived, reply = decided[index]
                await self._handler.send(arrived.message, arrived.query, reply)
            behind = behind + 1 if self._arrived else 0
            if not self._arrived:
                self._any.clear()
                self._none.set()

    async def wait_drained(self) -> None:
        """Return once every query is answered."""
        await self._none.wait()


# Edges that wait for the outcome of a queued query.

HOLD_S: Final = 1.0
"""The longest that a poll is held: well below the time after which an edge gives up on a reply."""

ABANDONED_S: Final = 5.0
"""The time after which a query that is not polled is discarded: even if two polls or replies are lost, an edge polls again within it."""

REFUSALS_MAX: Final = 4_096
"""Refusals remembered for edges that were between two polls."""

_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(RouteWait)

_log = structlog.get_logger("headwater.queue")


class _Poll(NamedTuple):
    reply: str
    until_s: float


class QueueWaiters:
    """The polls of edges for queries in the queue."""

    def __init__(
        self, ports: Ports, name: str, pool: str, decisions: DecisionMaker, queue: "RouteQueue", spawn: Spawn
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
        for request in [
            request_id for request_id, polled_s in self._polled_s.items() if now_s - polled_s > ABANDONED_S
        ]:
            self._queue.discard(request, "abandoned")
        for request in [request_id for request_id, poll in self._polls.items() if poll.until_s <= now_s]:
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


# The queue.

TICK_S: Final = 0.25

SERVED_PER_TURN: Final = 64
"""Decisions in one turn of the event loop; the fold and new queries run in between."""

STOPPED: Final = RouteRefused("the router is stopping", 1.0)


class RouteQueue:
    """The admission queue of one router."""

    def __init__(
        self,
        ports: Ports,
        name: str,
        pool: str,
        decisions: DecisionMaker,
        settings: QueueSettings,
        metrics: RouterMetrics,
        spawn: Spawn,
    ) -> None:
        self._clock = ports.clock
        self._decisions = decisions
        self._metrics = metrics
        self._spawn = spawn
        self._queue = AdmissionQueue(settings, decisions, self._now())
        self._waiting = self._queue.waiting
        self._was_silent = False
        self._waiters = QueueWaiters(ports, name, pool, decisions, self, spawn)

    def _now(self) -> Now:
        return Now(self._clock.monotonic_s(), self._clock.wall_ns())

    def stats(self) -> dict[str, int]:
        """Part of the router's statistics."""
        return {"waiting": len(self._waiting), "waiting_tokens": self._waiting.tokens}

    async def subscribe(self, epoch: int) -> None:
        """Accept polls of edges."""
        await self._waiters.subscribe(epoch)

    def refuse_all(self) -> None:
        """The router stops: refuse everything queued, to be sent to another router."""
        for queued in self._waiting.queries():
            self._queue.remove(queued.query.request, self._now())
            self._notify(Released(queued, STOPPED, "stopping"))

    async def close(self) -> None:
        """Accept no more polls. Idempotent."""
        await self._waiters.close()

    async def run(self) -> None:
        """Act on the passing of time. Does not return."""
        while True:
            await self._clock.sleep(TICK_S)
            now = self._now()
            for released in self._queue.expire(now):
                self._notify(released)
            self._waiters.expire(now.monotonic_s)
            self._metrics.busy_workers.set(len(self._queue.saturated_workers(now)))
            self._note_silence(now)
            self.serve()

    def offer(self, query: RouteQuery) -> RouteReply:
        """Decide a query, queue it, or refuse it."""
        if query.request in self._waiting:
            return self._waiters.register(query.request)
        reply, reason, displaced = self._queue.offer(query, self._now())
        for release in displaced:
            self._notify(release)
        if reason:
            self._metrics.left_queue(reason)
        if isinstance(reply, RouteRefused):
            return self._note_refused(query, reply)
        if reply is not None:
            return reply
        self._note_size()
        return self._waiters.register(query.request)

    def on_fold_advanced(self) -> None:
        """The state changed: decide what waited for that."""
        self._queue.note_fold_advanced(self._now())
        self.serve()

    def serve(self) -> None:
        """Serve the queries that can have a worker now."""
        if not self._waiting or self._decisions.is_paused:
            return
        released, more = self._queue.advance(self._now(), SERVED_PER_TURN)
        for release in released:
            self._notify(release)
        if more:
            self._spawn(self._serve_next_turn(), "queue continues")

    def discard(self, request: str, reason: str) -> None:
        """Remove a query whose client is gone, if it is queued."""
        if request in self._waiting:
            self._queue.remove(request, self._now())
            self._metrics.left_queue(reason)
            self._note_size()
        self._waiters.notify(request, None)

    async def _serve_next_turn(self) -> None:
        await asyncio.sleep(0)
        self.serve()

    def _note_silence(self, now: Now) -> None:
        silent = self._queue.is_silent(now)
        if silent and self._waiting and not self._was_silent:
            _log.warning(
                "admission_queue_bypassed", reason="nothing was read from the log", waiting=len(self._waiting)
            )
        self._was_silent = silent

    def _notify(self, released: Released) -> None:
        query, reply = released.queued.query, released.reply
        if isinstance(reply, RouteRefused):
            self._note_refused(query, reply)
            self._metrics.left_queue(released.reason)
        else:
            waited_s = self._clock.monotonic_s() - released.queued.arrived_s
            self._metrics.waited(query.flow.priority, waited_s)
        self._note_size()
        self._waiters.notify(query.request, reply)

    def _note_refused(self, query: RouteQuery, refused: RouteRefused) -> RouteRefused:
        self._metrics.refused.inc()
        trace = TraceContext(query.trace).trace_of_attempt(query.request)
        _log.info("route_refused", attempt=query.request, trace=trace, reason=refused.reason)
        return refused

    def _note_size(self) -> None:
        self._metrics.queue_requests.set(len(self._waiting))
        self._metrics.queue_tokens.set(self._waiting.tokens)
