"""The router actor: a fold of the pool log that answers route queries.

Subjects in
    hw.<ns>.route.<pool> (queue group `router`), hw.<ns>.wait.<pool>.<router>.<epoch> (`actors.router.queries`); the pool log;
    the lease table; hw.<ns>.digest.<pool> (`actors.router.divergence`); hw.<ns>.weights.<pool> and
    hw.<ns>.split.<pool> (`actors.router.commands`)
Subjects out
    decisions, as replies; the pool log: route events (its decisions), fleet events (workers whose lease lapsed, engine weights, traffic splits);
    hw.<ns>.digest.<pool>
State
    `RouterState` at a log position, plus its own decisions that the log does not hold yet; queued queries
On lag
    answers from the last known state; decisions are marked `degraded`, and the lag is a metric
On loss of the log
    as on lag; decisions wait in a bounded queue, and beyond its bound are not recorded (counted)
On a gap in the log
    starts from an empty state after the gap; workers that hold a lease but are not in the fold are requested to
    reannounce themselves and their caches
On a broken chain
    the worker whose messages are incomplete counts as cold, and is requested to reannounce its cache
On stop
    answers pending queries (queued ones are refused, to be sent to another router), writes its decisions, saves a snapshot
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from headwater.actors.metrics import RouterMetrics
from headwater.actors.router.commands import EngineWeightsKeeper, TrafficSplitKeeper
from headwater.actors.router.divergence import PERIOD_S, DivergenceCheck, LeaseReconciler
from headwater.actors.router.follower import LogFollower, SnapshotKeeper
from headwater.actors.router.queries import BurstBatcher, DecisionMaker, RouteQueue, RoutingSettings
from headwater.actors.runtime import lease
from headwater.actors.runtime.actor import Actor
from headwater.actors.runtime.ports import BusError, Message, Persistence, Ports, Subscription
from headwater.events.ports import Log
from headwater.events.writer import Writer
from headwater.router.decide import prompt_of
from headwater.router.queue import QueueSettings
from headwater.router.state import RouterState
from headwater.schemas import subjects
from headwater.schemas.names import TraceContext
from headwater.schemas.routing import DEFAULT_POLICY, Decision, RouteQuery, RouteRefused, RouteReply, Weights

_query = msgspec.msgpack.Decoder(RouteQuery)
_encode = msgspec.msgpack.Encoder().encode


class RouterActor(Actor):
    """The router as an actor. A router serves one pool; routers of one pool share its queries."""

    kind = "router"
    _log: Log
    """That of the pool, once it has started."""

    def __init__(
        self,
        ports: Ports,
        name: str,
        pool: str,
        *,
        weights: Weights | None = None,
        policy: str = DEFAULT_POLICY,
        temperature: float = 0.0,
        queue: QueueSettings | None = None,
        probe_s: float = 0.0,
    ) -> None:
        super().__init__(ports, name)
        self.pool = pool
        self._probe_s = probe_s
        self._persistence = Persistence(ports.clock, self.log)
        self.log = self.log.bind(pool=pool)
        metrics = self._metrics = RouterMetrics(pool)
        self._divergence = DivergenceCheck(ports, name, pool, metrics)
        self._follower = LogFollower(ports.clock, self.log, metrics, self._divergence)
        settings = RoutingSettings(weights or Weights(), policy, temperature)
        self.decisions = DecisionMaker(ports.clock, self._follower, settings, metrics)
        self._queue = RouteQueue(
            ports, name, pool, self.decisions, queue or QueueSettings(), metrics, self.spawn
        )
        self._bursts = BurstBatcher(self)
        self._snapshots = SnapshotKeeper(ports, pool, self)
        self._lease: lease.LeaseHandle | None = None
        self._fleet: Writer | None = None
        self._policy = policy
        self._commands: tuple[EngineWeightsKeeper, TrafficSplitKeeper] | None = None
        self._subscription: Subscription | None = None

    @property
    def state(self) -> RouterState:
        """The fold."""
        return self._follower.state

    @property
    def is_settled(self) -> bool:
        """See `SnapshotSource`."""
        return self._follower.settled

    @property
    def is_sound(self) -> bool:
        """See `SnapshotSource`."""
        return not self._divergence.diverged

    @asynccontextmanager
    async def pause(self) -> AsyncIterator[None]:
        """See `SnapshotSource`."""
        try:
            async with self.decisions.pause():
                yield
        finally:
            self._queue.serve()

    def stats(self) -> dict[str, Any]:
        """See `Actor.stats`."""
        return {
            "state": "ready" if self._follower.caught_up.is_set() else "catching up",
            "pool": self.pool,
            "position": self.state.position,
            **self._follower.lag(),
            "workers": len(self.state.loads.workers),
            "cold": len(self.state.cold),
            "blocks": self.state.index.rows,
            "decisions": self._follower.number,
            **self._queue.stats(),
            "digest": self.state.digest(),
            **self._divergence.stats(),
        }

    def log_fields(self) -> dict[str, Any]:
        """See `Actor.log_fields`."""
        return {**super().log_fields(), "pool": self.pool, "log_position": lambda: self.state.position}

    async def start(self) -> None:
        """See `Actor.start`. Queries are answered only after the fold has caught up with the log."""
        ports = self.ports
        log = self._log = await ports.pool_log(self.pool)
        decisions = subjects.pool_subject(ports.ns, self.pool, "route", self.name)
        fleet = subjects.pool_subject(ports.ns, self.pool, "fleet", self.name)
        held = self._lease = await lease.take(
            ports.leases,
            "router",
            self.name,
            ports.clock,
            pool=self.pool,
            ids=ports.ids(),
            newest=lease.newest_epoch(log, decisions, fleet),
        )
        epoch = held.epoch
        writer = Writer(log, decisions, self.name, epoch, ports.clock, probe_s=self._probe_s)
        self.decisions.writer = writer
        self._fleet = Writer(log, fleet, self.name, epoch, ports.clock)
        held.persistence = self._persistence
        self._persistence.watch("pool log", writer)
        self._persistence.measure("decisions", writer)
        self._persistence.watch("lease store", held)
        self.spawn(self._persistence.run(), "persistence")
        # Renewed from the start: fetching a large snapshot takes longer than a lease lasts.
        self.spawn(self._hold_lease(), "lease")
        await self._catch_up(log, epoch)
        self.spawn(writer.run(), "decisions")
        self.spawn(self._fleet.run(), "fleet")
        reconciler = LeaseReconciler(ports, self.pool, self._fleet)
        self.spawn(reconciler.watch_leases(), "leases")
        self._commands = (
            EngineWeightsKeeper(ports, self.name, self.pool, self._follower, self._fleet),
            TrafficSplitKeeper(ports, self.pool, self._follower, self._fleet, self._policy),
        )
        self.spawn(self._reconcile(reconciler, writer), "reconcile")
        self.spawn(self._snapshots.run(log), "snapshots")
        await self._queue.subscribe(epoch)
        self.spawn(self._queue.run(), "queue")
        self.spawn(self._bursts.run(), "queries")
        for keeper in self._commands:
            await keeper.subscribe()
        self._subscription = await ports.bus.subscribe(
            subjects.route_query(ports.ns, self.pool), self._on_query, queue="router"
        )

    async def _catch_up(self, log: Log, epoch: int) -> None:
        """Restore the newest snapshot and fold the log from there, up to its end and then on."""
        began_s = self.ports.clock.monotonic_s()
        self._follower.state = await self._snapshots.restore(log) or self.state
        from_snapshot = self.state.position
        await self._divergence.start(epoch)
        following = self._follower.follow(
            log, (self.name, epoch), self._snapshots.folding, self._queue.on_fold_advanced
        )
        self.spawn(following, "tail")
        await self._follower.caught_up.wait()
        self.log.info(
            "router_caught_up",
            log_position=self.state.position,
            from_snapshot=from_snapshot,
            blocks=self.state.index.rows,
            seconds=round(self.ports.clock.monotonic_s() - began_s, 3),
        )

    async def _hold_lease(self) -> None:
        """A lost lease ends this incarnation: the supervisor starts the next one from snapshot and tail."""
        if self._lease is not None:
            raise lease.LeaseLost(await self._lease.hold())

    async def _on_query(self, message: Message) -> None:
        self.requests.total += 1
        try:
            query = _query.decode(message.data)
            prompt_of(query)
        except (msgspec.DecodeError, ValueError) as error:
            self.requests.errors += 1
            refused = RouteRefused(f"unreadable query: {error}")
            await self.ports.bus.publish(message.reply, _encode(refused))
            return
        self._bursts.enqueue(message, query)

    def preview(self, query: RouteQuery) -> Decision | RouteRefused | None:
        """See `QueryHandler`."""
        return self.decisions.preview(query)

    async def decide(self, query: RouteQuery) -> RouteReply:
        """See `QueryHandler`."""
        await self.decisions.wait_unpaused()
        # A repeated query gets the same answer. A second decision for the request would never be accepted by a worker,
        # and its load would count until it is voided.
        return self.decisions.find_recent(query.request) or self._queue.offer(query)

    async def send(self, message: Message, query: RouteQuery, reply: RouteReply) -> None:
        """See `QueryHandler`."""
        self.requests.errors += isinstance(reply, RouteRefused)
        if isinstance(reply, Decision) and self.log.is_enabled_for(logging.DEBUG):
            self.log.debug(
                "route_decided",
                attempt=query.request,
                trace=TraceContext(query.trace).trace_of_attempt(query.request),
                worker=reply.worker,
                epoch=reply.epoch,
            )
        try:
            await self.ports.bus.publish(message.reply, _encode(reply))
        except BusError as error:
            trace = TraceContext(query.trace).trace_of_attempt(query.request)
            self.log.warning("answer_not_sent", attempt=query.request, trace=trace, reason=str(error))

    async def _reconcile(self, reconciler: LeaseReconciler, writer: Writer) -> None:
        """Make the log, the leases and the decisions agree again."""
        await reconciler.wait_known()
        while True:
            await self.ports.clock.sleep(PERIOD_S)
            for incarnation in reconciler.find_lapsed(self.state):
                reconciler.publish_left(incarnation)
                self._metrics.lapsed.inc()
            for voided in reconciler.find_unaccepted(self.state):
                writer.offer(voided)
                self._metrics.voided.inc()
            for keeper in self._commands or ():
                keeper.republish_lost()
            for worker in reconciler.find_unsynced(self.state):
                self._metrics.resyncs.inc()
                self.spawn(reconciler.request_resync(worker), "resync")

    async def drain(self) -> None:
        """See `Actor.drain`."""
        self.log.info("draining", log_position=self.state.position)
        if self._subscription is not None:
            await self._subscription.unsubscribe()
        for keeper in self._commands or ():
            await keeper.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2.0):
                await self._bursts.wait_drained()
        self._queue.refuse_all()
        for writer in (self.decisions.writer, self._fleet):
            if writer is not None:
                try:
                    async with asyncio.timeout(2.0):
                        await writer.flush()
                except TimeoutError:
                    self.log.warning("events_not_written", pending=writer.pending)
        for _ in range(40):
            if self.is_settled:
                break
            await self.ports.clock.sleep(0.05)
        await self._snapshots.save(self._log)
        if self._lease is not None:
            await self._lease.release()

    async def close(self) -> None:
        """See `Actor.close`."""
        for keeper in self._commands or ():
            await keeper.close()
        await self._queue.close()
        await self._divergence.stop()
        if self._subscription is not None:
            await self._subscription.unsubscribe()
