"""The part of a router that lets queries wait while every worker that could take them is busy.

How an edge waits
    its query is answered at once with `RouteQueued`; from then on it asks what has become of it
    (`actors.route_questions`). One whose edge says that nobody waits any more, or that asks no more, is dropped; a
    decision that was made for it meanwhile is voided
Who is served
    whenever the fold moved or time passed: in the order of the room (`router.waiting`), whoever can have a worker
    that is not busy. With several routers each has a queue of its own; all see the same workers
On loss of the log
    nobody can be seen to get free: after `SILENCE_S` nothing waits, and queries are decided as the fold stands
On stop
    what waits is refused, to be asked of another router
"""

import asyncio
from typing import Final, NamedTuple, Protocol

import msgspec
import structlog

from headwater.actors.metrics import RouterMetrics
from headwater.actors.route_questions import Asked, Questions
from headwater.actors.world import World
from headwater.router.admission import AllBusy, Fleet, Stuck, admit, first_token_s, uncached_tokens
from headwater.router.busy import BusyLimits, busy_lives
from headwater.router.state import RouterState
from headwater.router.waiting import QueueLimits, Turned, WaitingRoom
from headwater.router.waiting_lines import Shape, Waiting, shape_of
from headwater.schemas.route import Decision, RouteQuery, RouteRefused, RouteReply

TICK_S: Final = 0.25
SILENCE_S: Final = 3.0
"""Every worker tells its load once a second. After so long without a word nobody is known to be busy."""

SERVED_A_TURN: Final = 64
"""Decisions in one turn of the event loop; the fold and new queries come in between."""

STUCK_MAX: Final = 1_024
"""Shapes of queries remembered for which nobody was free."""

STOPPED = RouteRefused("the router stops", 1.0)

_log = structlog.get_logger("headwater.queue")


class QueueSettings(NamedTuple):
    """When a worker is busy (by default never, so that nothing waits), and the queue's bounds."""

    busy: BusyLimits = BusyLimits()
    limits: QueueLimits = QueueLimits()


class Deciding(Asked, Protocol):
    """What the queue needs of its router."""

    @property
    def state(self) -> RouterState:
        """The fold."""
        ...

    @property
    def may_decide(self) -> bool:
        """False while decisions must wait."""
        ...

    def choose(self, query: RouteQuery) -> Decision | RouteRefused:
        """Decide and change nothing."""
        ...

    def commit(self, decision: Decision) -> Decision:
        """Apply what was just chosen."""
        ...


class RouteQueue:
    """See the module."""

    def __init__(
        self,
        world: World,
        name: str,
        pool: str,
        router: Deciding,
        settings: QueueSettings,
        metrics: RouterMetrics,
    ) -> None:
        self._world = world
        self._router = router
        self._busy = settings.busy
        self._room = WaitingRoom(settings.limits)
        self._metrics = metrics
        self._stuck: dict[Shape, Stuck] = {}
        self._silent = False
        self._moved_s = world.clock.monotonic_s()
        self._questions = Questions(world, name, pool, router, self._forget)

    def stats(self) -> dict[str, int]:
        """For the router's own."""
        return {"waiting": len(self._room), "waiting_tokens": self._room.tokens}

    async def open(self, epoch: int) -> None:
        """Listen to edges that wait."""
        await self._questions.listen(epoch)

    def refuse_all(self) -> None:
        """The router stops: whatever waits is to be asked of another one."""
        for one in self._room.all():
            self._leave(one, "stopping", STOPPED)

    async def close(self) -> None:
        """Listen no more. Again is fine."""
        await self._questions.close()

    async def run(self) -> None:
        """Look after time, for ever."""
        while True:
            await self._world.clock.sleep(TICK_S)
            now_s = self._world.clock.monotonic_s()
            for one, turned in self._room.overdue(now_s):
                self._leave(one, turned.reason, turned.refused)
            self._questions.look(now_s)
            self._metrics.busy_workers.set(len(self._lives()))
            self.pump()

    def admit(self, query: RouteQuery) -> RouteReply:
        """Decide a query, or let it wait, or refuse it."""
        if query.request in self._room:
            return self._questions.expect(query.request)
        verdict: Decision | RouteRefused | AllBusy
        if query.waits and self._room.has_shape(shape_of(query)):
            # Others that need the same wait already: nobody could take it, and it must not overtake them.
            verdict = self._router.choose(query)
            verdict = AllBusy(verdict) if isinstance(verdict, Decision) else verdict
        else:
            verdict = self._verdict(query, self._lives())
        if isinstance(verdict, AllBusy):
            if query.waits:
                return self._park(query, verdict.anyway)
            verdict = verdict.anyway
        if isinstance(verdict, Decision):
            late = self._late(query, verdict, 0.0)
            if late is None:
                return self._router.commit(verdict)
            self._metrics.left_queue(late.reason)
            verdict = late.refused
        return self._refused(query, verdict)

    def moved(self) -> None:
        """The fold moved."""
        self._moved_s = self._world.clock.monotonic_s()
        self.pump()

    def pump(self) -> None:
        """Serve whoever can be served now, in their order."""
        if not self._room or not self._router.may_decide:
            return
        loads, now_s = self._router.state.loads, self._world.clock.monotonic_s()
        fleet, busy = Fleet.of(loads), self._lives()
        if len(self._stuck) > STUCK_MAX:
            self._stuck.clear()
        blocked: set[Shape] = set()
        handled = 0
        while handled < SERVED_A_TURN:
            one = None if fleet.all_busy(set(busy)) else self._room.first(blocked)
            if one is None:
                return
            stuck = self._stuck.get(one.shape)
            if stuck is not None and stuck.holds(fleet, set(busy)):
                blocked.add(one.shape)
                continue
            verdict = self._verdict(one.query, busy)
            if isinstance(verdict, AllBusy):
                blocked.add(one.shape)
                self._stuck[one.shape] = Stuck.of(fleet, verdict)
                continue
            handled += 1
            if isinstance(verdict, RouteRefused):
                # Those who could have taken it are gone: as for any query, the edge decides how often it asks.
                self._leave(one, "no_worker", verdict)
            elif late := self._late(one.query, verdict, now_s - one.arrived_s):
                self._leave(one, late.reason, late.refused)
            else:
                self._serve(one, verdict, now_s)
                busy = self._lives()
        self._router.spawn(self._go_on(), "queue goes on")

    async def _go_on(self) -> None:
        await asyncio.sleep(0)
        self.pump()

    def _lives(self) -> tuple[str, ...]:
        silent = self._world.clock.monotonic_s() - self._moved_s > SILENCE_S
        if silent and self._room and not self._silent:
            _log.warning("queue_lets_all_pass", why="the log tells nothing", waiting=len(self._room))
        self._silent = silent
        if silent:
            return ()
        return busy_lives(self._router.state.loads, self._world.clock.wall_ns(), self._busy)

    def _verdict(self, query: RouteQuery, busy: tuple[str, ...]) -> Decision | RouteRefused | AllBusy:
        return admit(self._router.choose, self._router.state.loads, query, busy)

    def _late(self, query: RouteQuery, decision: Decision, waited_s: float) -> Turned | None:
        serve_s = first_token_s(decision, queued=True)
        if not query.deadline_ms or waited_s + serve_s <= query.deadline_ms / 1_000.0:
            return None
        return self._room.cannot_meet(query, 0.0, serve_s, waited_s)

    def _park(self, query: RouteQuery, anyway: Decision) -> RouteReply:
        placed = self._room.put(
            query,
            self._world.clock.monotonic_s(),
            uncached_tokens=uncached_tokens(anyway, self._router.state.loads),
            serve_s=first_token_s(anyway, queued=False),
        )
        if isinstance(placed, Turned):
            self._metrics.left_queue(placed.reason)
            return self._refused(query, placed.refused)
        self._note()
        return self._questions.expect(query.request)

    def _serve(self, one: Waiting, decision: Decision, now_s: float) -> None:
        waited_s = now_s - one.arrived_s
        decision = msgspec.structs.replace(decision, waited_ms=max(1, round(waited_s * 1_000)))
        self._room.serve(one, now_s)
        self._note()
        self._metrics.waited(one.query.priority, waited_s)
        self._questions.answer(one.query.request, self._router.commit(decision))

    def _leave(self, one: Waiting, reason: str, refused: RouteRefused) -> None:
        self._refused(one.query, refused)
        self._take_out(one.query.request, reason)
        self._questions.answer(one.query.request, refused)

    def _forget(self, request: str, reason: str) -> None:
        if request in self._room:
            self._take_out(request, reason)
        self._questions.answer(request, None)

    def _take_out(self, request: str, reason: str) -> None:
        self._room.drop(request, self._world.clock.monotonic_s())
        self._metrics.left_queue(reason)
        self._note()

    def _refused(self, query: RouteQuery, refused: RouteRefused) -> RouteRefused:
        self._metrics.refused.inc()
        _log.info("route_refused", request=query.request, reason=refused.reason)
        return refused

    def _note(self) -> None:
        self._metrics.queue_requests.set(len(self._room))
        self._metrics.queue_tokens.set(self._room.tokens)
