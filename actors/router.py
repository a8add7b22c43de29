"""The router actor: a fold of the pool log that answers where requests go.

Subjects in
    hw.<ns>.route.<pool> (queue group `router`); the pool log; the lease table
Subjects out
    decisions to whoever asked, and the pool log: route events (its decisions), fleet events (workers whose
    lease lapsed)
State
    `RouterState` at a log position, plus its own decisions that the log does not hold yet
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
    answers what was asked, writes its decisions, saves a snapshot
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from headwater.actors import lease
from headwater.actors.actor import Actor
from headwater.actors.bus_port import Message, Subscription
from headwater.actors.fleet_watch import PERIOD_S, FleetWatch
from headwater.actors.metrics import RouterMetrics
from headwater.actors.snapshot_keeper import SnapshotKeeper
from headwater.actors.world import World
from headwater.events.errors import LogUnavailable
from headwater.events.log import Gap, Log, Record, Slice, Unreadable
from headwater.events.writer import PENDING_EVENTS_MAX, Writer
from headwater.router.decide import Standing, decide, prompt_of
from headwater.router.state import RouterState, apply_to_loads, in_order
from headwater.schemas import subjects
from headwater.schemas.route import Decision, RouteQuery, RouteRefused, Weights

LAG_MESSAGES_MAX = 2_000
"""Behind the log by more than this, decisions say that they are degraded."""

LAG_S_MAX = 2.0
"""So do they when an own decision has not come back from the log for this long."""

RECENT_MAX = 4_096
"""Decisions remembered in case their query comes again."""

SETTLE_S = 0.25
"""How long queries wait at most for the log to tell all decisions, so that a snapshot can be taken."""

_query = msgspec.msgpack.Decoder(RouteQuery)
_encode = msgspec.msgpack.Encoder().encode


class RouterActor(Actor):
    """See the module. One router serves one pool; several of one pool share its queries."""

    kind = "router"

    def __init__(self, world: World, name: str, pool: str, *, weights: Weights | None = None) -> None:
        super().__init__(world, name)
        self.pool = pool
        self.state = RouterState()
        self.log = self.log.bind(pool=pool)
        self._weights = weights or Weights()
        self._metrics = RouterMetrics(pool)
        self._lease: lease.LeaseHandle | None = None
        self._writer: Writer | None = None
        self._fleet: Writer | None = None
        self._log: Log | None = None
        self._snapshots = SnapshotKeeper(
            world, pool, state=lambda: self.state, settled=self._settled, quiet=self._quiet
        )
        self._subscription: Subscription | None = None
        self._number = 0
        self._seen = 0
        self._lag = 0
        self._lag_s = 0.0
        self._recent: OrderedDict[str, Decision] = OrderedDict()
        self._unseen_s: deque[float] = deque(maxlen=PENDING_EVENTS_MAX)
        self._answering = asyncio.Event()
        self._answering.set()
        self._caught_up = asyncio.Event()

    def stats(self) -> dict[str, Any]:
        """See `Actor.stats`."""
        return {
            "state": "ready" if self._caught_up.is_set() else "catching up",
            "pool": self.pool,
            "position": self.state.position,
            "lag_messages": self._lag,
            "lag_s": round(self._lag_s, 3),
            "workers": len(self.state.loads.workers),
            "cold": len(self.state.cold),
            "blocks": self.state.index.rows,
            "decisions": self._number,
            "digest": self.state.digest(),
        }

    async def start(self) -> None:
        """See `Actor.start`. Queries are answered only once the fold has caught up with the log."""
        world = self.world
        self._log = await world.pool_log(self.pool)
        self._lease = await lease.take(
            world.leases, "router", self.name, world.clock, pool=self.pool, ids=world.ids()
        )
        epoch = self._lease.epoch

        def writer(kind: subjects.PoolKind) -> Writer:
            subject = subjects.pool_subject(world.ns, self.pool, kind, self.name)
            return Writer(self._require_log(), subject, self.name, epoch, world.clock)

        self._writer, self._fleet = writer("route"), writer("fleet")
        began = world.clock.monotonic_s()
        # Held from the first moment: a large snapshot takes longer to fetch than a lease lasts.
        self.spawn(self._hold(), "lease")
        self.state = await self._snapshots.restore(self._log) or self.state
        from_snapshot = self.state.position
        self.spawn(self._tail(), "tail")
        await self._caught_up.wait()
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

    async def _tail(self) -> None:
        while True:
            self.state.log = await self._identity()
            async for piece in self._require_log().read(self.state.position, follow=True):
                async with self._snapshots.folding():
                    if piece.gap is not None and piece.gap.first <= self.state.position:
                        # What was folded is gone: this is another log, read it from its start.
                        self._on_gap(piece.gap._replace(last=0))
                        break
                    self._fold(piece)
                if piece.lag == 0:
                    self._caught_up.set()

    async def _identity(self) -> str:
        """Which log this is; an unreachable server is waited for."""
        while True:
            try:
                return await self._require_log().identity()
            except LogUnavailable as error:
                self.log.warning("log_waits", reason=str(error))
                await self.world.clock.sleep(0.5)

    def _fold(self, piece: Slice) -> None:
        if piece.gap is not None:
            self._on_gap(piece.gap)
        for message in in_order(piece):
            if isinstance(message, Unreadable):
                self._metrics.unreadable.inc()
                self.log.error("log_message_unreadable", log_position=message.position, reason=message.reason)
                self.state.skip(message)
            else:
                self._fold_record(message)
        self._lag = piece.lag
        last_ns = piece.records[-1].stored_ns if piece.records and piece.lag else 0
        self._lag_s = max(0.0, (self.world.clock.wall_ns() - last_ns) / 1e9) if last_ns else 0.0
        self._metrics.position.set(self.state.position)
        self._metrics.lag.set(piece.lag)
        self._metrics.lag_seconds.set(self._lag_s)
        self._metrics.blocks.set(self.state.index.rows)
        self._metrics.workers.set(len(self.state.loads.workers))

    def _fold_record(self, record: Record) -> None:
        batch = record.batch
        own = batch.writer == self.name and self._lease is not None and batch.epoch == self._lease.epoch
        events, broken = self.state.admit(record)
        if broken is not None:
            self._metrics.breaks.inc()
            self.log.error("log_chain_broken", **broken._asdict())
        for event in events:
            self.state.apply_to_index(batch, event)
            if own and isinstance(event, Decision):
                # Applied when it was made.
                self._note_seen(event.number)
            else:
                apply_to_loads(self.state.loads, batch, event)

    def _on_gap(self, gap: Gap) -> None:
        """What was lost may have changed anything: begin from nothing and let the workers tell."""
        self.log.error("log_gap", first=gap.first, last=gap.last, reason=gap.reason)
        self._metrics.gaps.inc()
        self.state = RouterState(whole=False)
        self.state.position = gap.last
        self._note_seen(self._number)

    def _note_seen(self, number: int) -> None:
        """The log has told own decisions up to this one."""
        self._seen = number
        while len(self._unseen_s) > self._number - number:
            self._unseen_s.popleft()

    def _degraded(self) -> bool:
        """Is the fold known to be behind, or are our own decisions not coming back from the log?"""
        # The oldest one counts: on a busy pool there is always one under way.
        oldest_s = self._unseen_s[0] if self._unseen_s else self.world.clock.monotonic_s()
        return self._lag > LAG_MESSAGES_MAX or self.world.clock.monotonic_s() - oldest_s > LAG_S_MAX

    def _settled(self) -> bool:
        """Does the state hold nothing that the log did not tell?"""
        return self._seen == self._number

    @asynccontextmanager
    async def _quiet(self) -> AsyncIterator[None]:
        """Let queries wait, for `SETTLE_S` at most, until the log has told all decisions."""
        self._answering.clear()
        until = self.world.clock.monotonic_s() + SETTLE_S
        try:
            while not self._settled() and self.world.clock.monotonic_s() < until:
                await self.world.clock.sleep(0.002)
            yield
        finally:
            self._answering.set()

    async def _on_query(self, message: Message) -> None:
        await self._answering.wait()
        try:
            query = _query.decode(message.data)
            reply = self._decide(query)
        except (msgspec.DecodeError, ValueError) as error:
            reply = RouteRefused(f"unreadable query: {error}")
        await self.world.bus.publish(message.reply, _encode(reply))

    def _decide(self, query: RouteQuery) -> Decision | RouteRefused:
        """Decide, apply and queue for the log, in one turn of the loop: nothing comes in between.

        A query that comes again gets the same answer: two decisions for one request would leave the load that
        the second one counts behind for ever.
        """
        made = self._recent.get(query.request)
        if made is not None:
            return made
        began = self.world.clock.monotonic_s()
        standing = Standing(
            number=self._number + 1,
            position=self.state.position,
            seen=self._seen,
            wall_ns=self.world.clock.wall_ns(),
            weights=self._weights,
            degraded=self._degraded(),
        )
        decision = decide(
            self.state.index, self.state.loads, self.state.cold, prompt_of(query), query, standing
        )
        if isinstance(decision, RouteRefused):
            self._metrics.refused.inc()
            self.log.info("route_refused", request=query.request, reason=decision.reason)
            return decision
        self._number += 1
        self._unseen_s.append(began)
        self._recent[query.request] = decision
        if len(self._recent) > RECENT_MAX:
            self._recent.popitem(last=False)
        self.state.loads.decide(decision)
        if self._writer is not None and not self._writer.offer(decision):
            self._metrics.unrecorded.inc()
        self._metrics.decided.inc()
        self._metrics.seconds.observe(self.world.clock.monotonic_s() - began)
        return decision

    async def _reconcile(self, watch: FleetWatch) -> None:
        """Bring the log and the leases to agree again, wherever they do not."""
        await watch.known()
        while True:
            await self.world.clock.sleep(PERIOD_S)
            for life in watch.gone(self.state):
                watch.tell_left(life)
            for worker in watch.doubtful(self.state):
                self.spawn(watch.ask_resync(worker), "resync")

    async def drain(self) -> None:
        """See `Actor.drain`."""
        self.log.info("draining", log_position=self.state.position)
        if self._subscription is not None:
            await self._subscription.unsubscribe()
        for writer in (self._writer, self._fleet):
            if writer is not None:
                try:
                    async with asyncio.timeout(2.0):
                        await writer.flush()
                except TimeoutError:
                    self.log.warning("events_not_written", pending=writer.pending)
        for _ in range(40):
            if self._seen == self._number:
                break
            await self.world.clock.sleep(0.05)
        await self._snapshots.save(self._require_log())
        if self._lease is not None:
            await self._lease.release()

    async def close(self) -> None:
        """See `Actor.close`."""
        if self._subscription is not None:
            await self._subscription.unsubscribe()
