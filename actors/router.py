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
    starts from nothing behind the gap and asks every worker to announce itself and its cache anew
On stop
    answers what was asked, writes its decisions, saves a snapshot
"""

import asyncio
from typing import Any

import msgspec

from headwater.actors import lease
from headwater.actors.actor import Actor
from headwater.actors.bus_port import BusError, Message, Subscription
from headwater.actors.metrics import RouterMetrics
from headwater.actors.snapshot_keeper import SnapshotKeeper
from headwater.actors.world import World
from headwater.events.log import Gap, Log, Slice
from headwater.events.writer import EVENT_BYTES, Writer
from headwater.router.decide import Standing, decide, prompt_of
from headwater.router.state import RouterState, apply_to_loads
from headwater.schemas import subjects
from headwater.schemas.card import Lease
from headwater.schemas.fleet import WorkerLeft
from headwater.schemas.route import Decision, RouteQuery, RouteRefused, Weights

LAG_MESSAGES_MAX = 2_000
"""Behind the log by more than this, decisions say that they are degraded."""

RECONCILE_PERIOD_S = 0.5
CANDIDATE_BYTES = 64

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
            world, pool, state=lambda: self.state, settled=lambda: self._seen == self._number
        )
        self._subscription: Subscription | None = None
        self._number = 0
        self._seen = 0
        self._lag = 0
        self._live: set[str] = set()
        self._leases_known = asyncio.Event()
        self._left: set[tuple[str, int]] = set()
        self._caught_up = asyncio.Event()

    def stats(self) -> dict[str, Any]:
        """See `Actor.stats`."""
        return {
            "state": "ready" if self._caught_up.is_set() else "catching up",
            "pool": self.pool,
            "position": self.state.position,
            "lag_messages": self._lag,
            "workers": len(self.state.loads.workers),
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
        self.spawn(self._watch_leases(), "leases")
        self.spawn(self._reconcile(), "reconcile")
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
            async for piece in self._require_log().read(self.state.position, follow=True):
                async with self._snapshots.folding():
                    if piece.gap is not None and piece.gap.first <= self.state.position:
                        # What was folded is gone: this is another log, read it from its start.
                        self._on_gap(piece.gap._replace(last=0))
                        break
                    self._fold(piece)
                if piece.lag == 0:
                    self._caught_up.set()

    def _fold(self, piece: Slice) -> None:
        if piece.gap is not None:
            self._on_gap(piece.gap)
        for unreadable in piece.unreadable:
            self._metrics.unreadable.inc()
            self.log.error(
                "log_message_unreadable", log_position=unreadable.position, reason=unreadable.reason
            )
        for record in piece.records:
            batch = record.batch
            own = batch.writer == self.name and self._lease is not None and batch.epoch == self._lease.epoch
            for event in batch.events:
                self.state.apply_to_index(batch, event)
                if own and isinstance(event, Decision):
                    # Applied when it was made.
                    self._seen = event.number
                else:
                    apply_to_loads(self.state.loads, batch, event)
            self.state.position = record.position
        self._lag = piece.lag
        self._metrics.position.set(self.state.position)
        self._metrics.lag.set(piece.lag)
        self._metrics.blocks.set(self.state.index.rows)
        self._metrics.workers.set(len(self.state.loads.workers))

    def _on_gap(self, gap: Gap) -> None:
        """What was lost may have changed anything: begin from nothing and let the workers tell."""
        known = [(worker.name, worker.epoch) for worker in self.state.loads.workers.values()]
        self.log.error("log_gap", first=gap.first, last=gap.last, reason=gap.reason, workers=len(known))
        self._metrics.gaps.inc()
        self.state = RouterState()
        self.state.position = gap.last
        self._seen = self._number
        if known:
            self.spawn(self._ask_resync(known), "resync")

    async def _ask_resync(self, workers: list[tuple[str, int]]) -> None:
        for name, epoch in workers:
            subject = subjects.engine(self.world.ns, name, epoch, "resync")
            try:
                await self.world.bus.request(subject, b"", timeout_s=2.0)
            except BusError as error:
                self.log.warning("resync_unanswered", worker=name, reason=str(error))

    async def _on_query(self, message: Message) -> None:
        try:
            query = _query.decode(message.data)
            reply = self._decide(query)
        except (msgspec.DecodeError, ValueError) as error:
            reply = RouteRefused(f"unreadable query: {error}")
        await self.world.bus.publish(message.reply, _encode(reply))

    def _decide(self, query: RouteQuery) -> Decision | RouteRefused:
        """Decide, apply and queue for the log, in one turn of the loop: nothing comes in between."""
        began = self.world.clock.monotonic_s()
        standing = Standing(
            number=self._number + 1,
            position=self.state.position,
            seen=self._seen,
            wall_ns=self.world.clock.wall_ns(),
            weights=self._weights,
            degraded=self._lag > LAG_MESSAGES_MAX,
        )
        decision = decide(
            self.state.index, self.state.loads, self.state.cold, prompt_of(query), query, standing
        )
        if isinstance(decision, RouteRefused):
            self._metrics.refused.inc()
            self.log.info("route_refused", request=query.request, reason=decision.reason)
            return decision
        self._number += 1
        self.state.loads.decide(decision)
        if self._writer is not None and not self._writer.offer(decision, _size(decision)):
            self._metrics.unrecorded.inc()
        self._metrics.decided.inc()
        self._metrics.seconds.observe(self.world.clock.monotonic_s() - began)
        return decision

    async def _watch_leases(self) -> None:
        async for entries in self.world.leases.watch():
            for entry in entries:
                kind, _, name = entry.key.partition(".")
                if kind != "worker":
                    continue
                if entry.value is None:
                    self._live.discard(name)
                elif msgspec.json.decode(entry.value, type=Lease).pool == self.pool:
                    self._live.add(name)
            self._leases_known.set()

    async def _reconcile(self) -> None:
        """Workers in the state whose lease is gone have left: put that into the log."""
        await self._leases_known.wait()
        missing: dict[tuple[str, int], int] = {}
        while True:
            await self.world.clock.sleep(RECONCILE_PERIOD_S)
            gone = {
                (worker.name, worker.epoch)
                for worker in self.state.loads.workers.values()
                if worker.name not in self._live
            }
            missing = {life: missing.get(life, 0) + 1 for life in gone}
            for life, rounds in missing.items():
                # Twice in a row: a worker's joining may be in the log before its lease is watched.
                if rounds >= 2 and life not in self._left and self._fleet is not None:
                    self._left.add(life)
                    self.log.warning("worker_lease_lapsed", worker=life[0], epoch=life[1])
                    self._fleet.offer(WorkerLeft(life[0], life[1], "lease lapsed"))

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


def _size(decision: Decision) -> int:
    return EVENT_BYTES + 200 + CANDIDATE_BYTES * len(decision.candidates)
