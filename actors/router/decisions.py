"""Decisions of one router: chosen on its fold, applied to it at once, and queued for the log.

While a snapshot waits for the log to hold all decisions, no further ones are made (`pause`).
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, NamedTuple

from headwater.actors.metrics import RouterMetrics
from headwater.actors.router.follower import LogFollower
from headwater.events.writer import Writer
from headwater.router.decision.decide import DecisionContext, decide, prompt_of
from headwater.router.decision.names import DEFAULT_POLICY
from headwater.router.fold.state import RouterState
from headwater.schemas.clock import Clock
from headwater.schemas.events.route import Decision, DecisionVoided, RouteQuery, RouteRefused, Weights

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
    """See the module. `writer` takes the events for the log, once the router has its lease."""

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
        """What would be decided now; None for a query that is decided already."""
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
        if self.writer is not None and not self.writer.offer(decision):
            self._metrics.unrecorded.inc()
        self._metrics.decided.inc()
        worker = self.state.loads.current(decision.worker, decision.epoch)
        if worker is not None:
            self._metrics.decided_for(worker.engine)
        return decision

    def void(self, decision: Decision) -> None:
        """Publish that the request will not be sent to its worker, unless the worker has accepted it."""
        worker = self.state.loads.current(decision.worker, decision.epoch)
        if self.writer is not None and worker is not None and decision.request in worker.unaccepted:
            self.writer.offer(DecisionVoided(decision.request, decision.worker, decision.epoch))
