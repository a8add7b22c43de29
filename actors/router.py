"""The router actor: a fold of the pool log that answers where requests go.

Subjects in
    hw.<ns>.route.<pool> (queue group `router`), hw.<ns>.wait.<pool>.<router>.<epoch> (see `actors.route_queue`); the
    pool log; the lease table; hw.<ns>.digest.<pool> (see `actors.replicas`)
Subjects out
    decisions to whoever asked, and the pool log: route events (its decisions), fleet events (workers whose
    lease lapsed), hw.<ns>.digest.<pool>
State
    `RouterState` at a log position, plus its own decisions that the log does not hold yet; queries that wait
On lag
    answers from the last known state; decisions say `degraded`, and the lag is a metric
On loss of the log
    as on lag; decisions wait in a bounded queue, and past the bound are not recorded (counted)
On a gap in the log
    starts from nothing behind the gap; workers whose lease is live but whom the fold does not know are asked to
    announce themselves and their caches anew
On a broken chain
    the worker whose messages are incomplete is cold, and is asked likewise
On stop
    answers what was asked (what waits is refused, to be asked of another router), writes its decisions, saves a snapshot
"""

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from headwater.actors import lease
from headwater.actors.actor import Actor
from headwater.actors.bus_port import BusError, Message, Subscription
from headwater.actors.fleet_watch import PERIOD_S, FleetWatch
from headwater.actors.gathered import Gathered
from headwater.actors.live_fold import LiveFold
from headwater.actors.metrics import RouterMetrics
from headwater.actors.persistence import Persistence
from headwater.actors.replicas import Replicas
from headwater.actors.route_queue import RouteQueue
from headwater.actors.snapshot_keeper import SnapshotKeeper
from headwater.actors.world import World
from headwater.events.log import Log
from headwater.events.writer import Writer
from headwater.router.admission_queue import QueueSettings
from headwater.router.decide import Standing, decide, prompt_of
from headwater.router.policies import DEFAULT as POLICY
from headwater.router.state import RouterState
from headwater.schemas import subjects
from headwater.schemas.route import Decision, DecisionVoided, RouteQuery, RouteRefused, RouteReply, Weights

RECENT_MAX = 4_096
"""Decisions remembered in case their query comes again."""

SETTLE_S = 0.25
"""How long queries wait at most for the log to tell all decisions, so that a snapshot can be taken."""

_query = msgspec.msgpack.Decoder(RouteQuery)
_encode = msgspec.msgpack.Encoder().encode


class RouterActor(Actor):
    """See the module. One router serves one pool; several of one pool share its queries."""

    kind = "router"

    def __init__(
        self,
        world: World,
        name: str,
        pool: str,
        *,
        weights: Weights | None = None,
        policy: str = POLICY,
        temperature: float = 0.0,
        queue: QueueSettings | None = None,
        probe_s: float = 0.0,
    ) -> None:
        super().__init__(world, name)
        self.pool = pool
        self._probe_s = probe_s
        self._persistence = Persistence(world.clock, self.log)
        self.log = self.log.bind(pool=pool)
        self._weights = weights or Weights()
        self._policy = policy
        self._temperature = temperature
        self._metrics = RouterMetrics(pool)
        self._fold = LiveFold(world.clock, self.log, self._metrics)
        self._replicas = Replicas(world, name, pool, self._metrics)
        self._fold.on_mark = self._replicas.mark
        self._lease: lease.LeaseHandle | None = None
        self._writer: Writer | None = None
        self._fleet: Writer | None = None
        self._log: Log | None = None
        self._snapshots = SnapshotKeeper(
            world,
            pool,
            state=lambda: self.state,
            settled=lambda: self._fold.settled,
            quiet=self._quiet,
            sound=lambda: not self._replicas.diverged,
        )
        self._subscription: Subscription | None = None
        self._recent: OrderedDict[str, Decision] = OrderedDict()
        self._answering = asyncio.Event()
        self._answering.set()
        self._queue = RouteQueue(world, name, pool, self, queue or QueueSettings(), self._metrics)
        self._fold.moved = self._queue.moved
        self._gathered = Gathered(self._look, self._answer)

    @property
    def state(self) -> RouterState:
        """The fold as it stands."""
        return self._fold.state

    def stats(self) -> dict[str, Any]:
        """See `Actor.stats`."""
        return {
            "state": "ready" if self._fold.caught_up.is_set() else "catching up",
            "pool": self.pool,
            "position": self.state.position,
            **self._fold.lag(),
            "workers": len(self.state.loads.workers),
            "cold": len(self.state.cold),
            "blocks": self.state.index.rows,
            "decisions": self._fold.number,
            **self._queue.stats(),
            "digest": self.state.digest(),
            **self._replicas.stats(),
        }

    async def start(self) -> None:
        """See `Actor.start`. Queries are answered only once the fold has caught up with the log."""
        world = self.world
        self._log = await world.pool_log(self.pool)
        decisions = subjects.pool_subject(world.ns, self.pool, "route", self.name)
        fleet = subjects.pool_subject(world.ns, self.pool, "fleet", self.name)
        self._lease = await lease.take(
            world.leases,
            "router",
            self.name,
            world.clock,
            pool=self.pool,
            ids=world.ids(),
            newest=lease.newest_epoch(self._log, decisions, fleet),
        )
        epoch = self._lease.epoch
        writer = Writer(self._log, decisions, self.name, epoch, world.clock, probe_s=self._probe_s)
        self._writer = writer
        self._fleet = Writer(self._log, fleet, self.name, epoch, world.clock)
        held = self._lease
        held.is_stalled = lambda: self._persistence.is_stalled
        self._persistence.add("pool log", lambda: writer.stalled_s)
        self._persistence.add("lease store", lambda: held.stalled_s)
        self.spawn(self._persistence.run(), "persistence")
        began = world.clock.monotonic_s()
        # Held from the first moment: a large snapshot takes longer to fetch than a lease lasts.
        self.spawn(self._hold(), "lease")
        self._fold.state = await self._snapshots.restore(self._log) or self.state
        from_snapshot = self.state.position
        life = (self.name, epoch)
        await self._replicas.start(epoch)
        self.spawn(self._fold.follow(self._log, life, self._snapshots.folding), "tail")
        await self._fold.caught_up.wait()
        self.log.info(
            "router_caught_up",
            log_position=self.state.position,
            from_snapshot=from_snapshot,
            blocks=self.state.index.rows,
            seconds=round(world.clock.monotonic_s() - began, 3),
        )
        self.spawn(self._writer.run(), "decisions")
        self.spawn(self._fleet.run(), "fleet")
        watch = FleetWatch(world, self.pool, self._fleet)
        self.spawn(watch.watch_leases(), "leases")
        self.spawn(self._reconcile(watch), "reconcile")
        self.spawn(self._snapshots.run(self._log), "snapshots")
        await self._queue.open(epoch)
        self.spawn(self._queue.run(), "queue")
        self.spawn(self._gathered.run(), "queries")
        self._subscription = await world.bus.subscribe(
            subjects.route_query(world.ns, self.pool), self._on_query, queue="router"
        )

    def _require_log(self) -> Log:
        if self._log is None:
            raise RuntimeError("the router is not started")
        return self._log

    async def _hold(self) -> None:
        """A lost lease ends this life: the supervisor starts the next one from snapshot and tail."""
        if self._lease is not None:
            raise lease.LeaseLost(await self._lease.hold())

    @asynccontextmanager
    async def _quiet(self) -> AsyncIterator[None]:
        """Let queries wait, for `SETTLE_S` at most, until the log has told all decisions."""
        self._answering.clear()
        until = self.world.clock.monotonic_s() + SETTLE_S
        try:
            while not self._fold.settled and self.world.clock.monotonic_s() < until:
                await self.world.clock.sleep(0.002)
            yield
        finally:
            self._answering.set()
            self._queue.pump()

    async def _on_query(self, message: Message) -> None:
        try:
            query = _query.decode(message.data)
            prompt_of(query)
        except (msgspec.DecodeError, ValueError) as error:
            refused = RouteRefused(f"unreadable query: {error}")
            await self.world.bus.publish(message.reply, _encode(refused))
            return
        self._gathered.put(message, query)

    def _look(self, query: RouteQuery) -> Decision | RouteRefused | None:
        """What would be decided now, for queries that are not decided yet."""
        return None if self.made(query.request) else self.choose(query)

    async def _answer(self, message: Message, query: RouteQuery) -> None:
        await self._answering.wait()
        # A query that comes again gets the same answer: two decisions for one request would leave the load that
        # the second one counts behind for ever.
        reply: RouteReply = self.made(query.request) or self._queue.admit(query)
        try:
            await self.world.bus.publish(message.reply, _encode(reply))
        except BusError as error:
            self.log.warning("answer_not_sent", request=query.request, reason=str(error))

    @property
    def may_decide(self) -> bool:
        """Not while a snapshot waits for the log to tell all decisions."""
        return self._answering.is_set()

    def made(self, request: str) -> Decision | None:
        """What was decided for a request, if that was lately."""
        return self._recent.get(request)

    def choose(self, query: RouteQuery) -> Decision | RouteRefused:
        """Decide on the present state, and change nothing."""
        began = self.world.clock.monotonic_s()
        standing = Standing(
            number=self._fold.number + 1,
            position=self.state.position,
            seen=self._fold.seen,
            wall_ns=self.world.clock.wall_ns(),
            weights=self._weights,
            degraded=self._fold.degraded(),
            policy=self._policy,
            temperature=self._temperature,
        )
        decision = decide(
            self.state.index, self.state.loads, self.state.cold, prompt_of(query), query, standing
        )
        self._metrics.seconds.observe(self.world.clock.monotonic_s() - began)
        return decision

    def commit(self, decision: Decision) -> Decision:
        """Apply a decision just chosen and queue it for the log, in the same turn of the loop: nothing in between."""
        self._recent[decision.request] = decision
        if len(self._recent) > RECENT_MAX:
            self._recent.popitem(last=False)
        self._fold.decided(decision)
        if self._writer is not None and not self._writer.offer(decision):
            self._metrics.unrecorded.inc()
        self._metrics.decided.inc()
        return decision

    def void(self, decision: Decision) -> None:
        """Nobody will send the request to its worker: tell the log so."""
        worker = self.state.loads.current(decision.worker, decision.epoch)
        if self._writer is not None and worker is not None and decision.request in worker.unaccepted:
            self._writer.offer(DecisionVoided(decision.request, decision.worker, decision.epoch))

    async def _reconcile(self, watch: FleetWatch) -> None:
        """Bring the log and the leases to agree again, wherever they do not."""
        await watch.known()
        while True:
            await self.world.clock.sleep(PERIOD_S)
            for life in watch.gone(self.state):
                watch.tell_left(life)
            for voided in watch.stale(self.state):
                if self._writer is not None:
                    self._writer.offer(voided)
            for worker in watch.doubtful(self.state):
                self.spawn(watch.ask_resync(worker), "resync")

    async def drain(self) -> None:
        """See `Actor.drain`."""
        self.log.info("draining", log_position=self.state.position)
        if self._subscription is not None:
            await self._subscription.unsubscribe()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2.0):
                await self._gathered.settled()
        self._queue.refuse_all()
        for writer in (self._writer, self._fleet):
            if writer is not None:
                try:
                    async with asyncio.timeout(2.0):
                        await writer.flush()
                except TimeoutError:
                    self.log.warning("events_not_written", pending=writer.pending)
        for _ in range(40):
            if self._fold.settled:
                break
            await self.world.clock.sleep(0.05)
        await self._snapshots.save(self._require_log())
        if self._lease is not None:
            await self._lease.release()

    async def close(self) -> None:
        """See `Actor.close`."""
        await self._queue.close()
        await self._replicas.stop()
        if self._subscription is not None:
            await self._subscription.unsubscribe()
