"""Decisions of one router, chosen on its fold and queued for the log: singly, and in bursts.

While a snapshot waits for the log to hold all decisions, no further ones are made (`pause`).

Bursts: no query is delayed to form a batch: what one read of the connection brought is decided in the next turn, and answered
once all of it is decided. Both orders are those of `router.queue.waiting`. That of the decisions costs as much again as deciding,
so a router that falls behind decides in order of arrival.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, NamedTuple, Protocol

from headwater.actors.bus import Message
from headwater.actors.metrics import RouterMetrics
from headwater.actors.router.follower import LogFollower
from headwater.events.writer import Writer
from headwater.router.decision.decide import DecisionContext, decide, prompt_of
from headwater.router.decision.names import DEFAULT_POLICY
from headwater.router.fold.state import RouterState
from headwater.router.queue.waiting import BURST_MAX, order_by_prompt, order_by_regret
from headwater.schemas.clock import Clock
from headwater.schemas.events.route import (
    Decision,
    DecisionVoided,
    RouteQuery,
    RouteRefused,
    RouteReply,
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
            queries = [one.query for one in batch]
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
