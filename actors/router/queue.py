"""A router's admission queue on real time: drives `router.queue.admission_queue`, and reports to edges and metrics.

How an edge waits
    its query is answered at once with `RouteQueued`; from then on it polls for the outcome (`actors.router.waiters`).
    A query whose client is gone, or that is not polled any more, is discarded; a decision made for it is voided
When queries are served
    whenever the fold advances or time passes, in the queue's order, each as soon as a worker that may take it is not
    saturated. Several routers have a queue each; all observe the same workers
On loss of the log
    no worker could be observed to become free: after `SILENCE_S` nothing waits, and queries are decided on the last state
On stop
    queued queries are refused, so that their edges query another router
"""

import asyncio
from typing import Final

import structlog

from headwater.actors.metrics import RouterMetrics
from headwater.actors.router.decisions import DecisionMaker
from headwater.actors.router.waiters import QueueWaiters
from headwater.actors.runtime.ports import Ports
from headwater.actors.runtime.tasks import Spawn
from headwater.router.queue.admission_queue import AdmissionQueue, Now, Released
from headwater.router.queue.limits import QueueSettings
from headwater.schemas.events.route import RouteQuery, RouteRefused, RouteReply

TICK_S: Final = 0.25

SERVED_PER_TURN: Final = 64
"""Decisions in one turn of the event loop; the fold and new queries run in between."""

STOPPED: Final = RouteRefused("the router is stopping", 1.0)

_log = structlog.get_logger("headwater.queue")


class RouteQueue:
    """See the module."""

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
        for one in self._waiting.queries():
            self._queue.remove(one.query.request, self._now())
            self._notify(Released(one, STOPPED, "stopping"))

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
        for one in displaced:
            self._notify(one)
        if reason:
            self._metrics.left_queue(reason)
        if isinstance(reply, RouteRefused):
            return self._note_refused(query, reply)
        if reply is not None:
            return reply
        self._note_size()
        return self._waiters.register(query.request)

    def on_fold_advanced(self) -> None:
        """See `FoldListener`."""
        self._queue.note_fold_advanced(self._now())
        self.serve()

    def serve(self) -> None:
        """Serve the queries that can have a worker now."""
        if not self._waiting or self._decisions.is_paused:
            return
        released, more = self._queue.advance(self._now(), SERVED_PER_TURN)
        for one in released:
            self._notify(one)
        if more:
            self._spawn(self._serve_next_turn(), "queue continues")

    def discard(self, request: str, reason: str) -> None:
        """See `Discarder`."""
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
        _log.info("route_refused", request=query.request, reason=refused.reason)
        return refused

    def _note_size(self) -> None:
        self._metrics.queue_requests.set(len(self._waiting))
        self._metrics.queue_tokens.set(self._waiting.tokens)
