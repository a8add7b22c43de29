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
from typing import Final, Protocol

import structlog

from headwater.actors.metrics import RouterMetrics
from headwater.actors.route_questions import Asked, Questions
from headwater.actors.world import World
from headwater.router.admission_queue import AdmissionQueue, Left, Now, QueueSettings
from headwater.router.state import RouterState
from headwater.router.waiting_lines import Waiting
from headwater.schemas.route import Decision, RouteQuery, RouteRefused, RouteReply

TICK_S: Final = 0.25

SERVED_A_TURN: Final = 64
"""Decisions in one turn of the event loop; the fold and new queries come in between."""

STOPPED = RouteRefused("the router stops", 1.0)

_log = structlog.get_logger("headwater.queue")


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
    """See the module. What is admitted and served is decided by `headwater.router.admission_queue`."""

    def __init__(
        self,
        world: World,
        name: str,
        pool: str,
        router: Deciding,
        settings: QueueSettings,
        metrics: RouterMetrics,
    ) -> None:
        clock = world.clock
        self._world = world
        self._router = router
        self._queue = AdmissionQueue(
            settings,
            lambda: router.state.loads,
            router.choose,
            router.commit,
            lambda: Now(clock.monotonic_s(), clock.wall_ns()),
        )
        self._room = self._queue.room
        self._metrics = metrics
        self._silent = False
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
            self._queue.drop(one.query.request)
            self._answer(Left(one, STOPPED, "stopping"))

    async def close(self) -> None:
        """Listen no more. Again is fine."""
        await self._questions.close()

    async def run(self) -> None:
        """Look after time, for ever."""
        while True:
            await self._world.clock.sleep(TICK_S)
            for left in self._queue.overdue():
                self._answer(left)
            self._questions.look(self._world.clock.monotonic_s())
            self._metrics.busy_workers.set(len(self._queue.busy_lives()))
            self._note_silence()
            self.pump()

    def admit(self, query: RouteQuery) -> RouteReply:
        """Decide a query, or let it wait, or refuse it."""
        if query.request in self._room:
            return self._questions.expect(query.request)
        reply, reason = self._queue.admit(query)
        if reason:
            self._metrics.left_queue(reason)
        if isinstance(reply, RouteRefused):
            return self._refused(query, reply)
        if reply is not None:
            return reply
        self._note()
        return self._questions.expect(query.request)

    def moved(self) -> None:
        """The fold moved."""
        self._queue.moved()
        self.pump()

    def pump(self) -> None:
        """Serve whoever can be served now, in their order."""
        if not self._room or not self._router.may_decide:
            return
        found, more = self._queue.pump(SERVED_A_TURN)
        for left in found:
            self._answer(left)
        if more:
            self._router.spawn(self._go_on(), "queue goes on")

    async def _go_on(self) -> None:
        await asyncio.sleep(0)
        self.pump()

    def _note_silence(self) -> None:
        silent = self._queue.silent
        if silent and self._room and not self._silent:
            _log.warning("queue_lets_all_pass", why="the log tells nothing", waiting=len(self._room))
        self._silent = silent

    def _answer(self, left: Left) -> None:
        one, reply, reason = left
        if isinstance(reply, RouteRefused):
            self._refused(one.query, reply)
            self._metrics.left_queue(reason)
        else:
            self._metrics.waited(one.query.priority, self._waited_s(one))
        self._note()
        self._questions.answer(one.query.request, reply)

    def _waited_s(self, one: Waiting) -> float:
        return self._world.clock.monotonic_s() - one.arrived_s

    def _forget(self, request: str, reason: str) -> None:
        if request in self._room:
            self._queue.drop(request)
            self._metrics.left_queue(reason)
            self._note()
        self._questions.answer(request, None)

    def _refused(self, query: RouteQuery, refused: RouteRefused) -> RouteRefused:
        self._metrics.refused.inc()
        _log.info("route_refused", request=query.request, reason=refused.reason)
        return refused

    def _note(self) -> None:
        self._metrics.queue_requests.set(len(self._room))
        self._metrics.queue_tokens.set(self._room.tokens)
