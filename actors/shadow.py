"""The shadow actor: what another policy would have decided, live, beside the routers of a pool.

Subjects in
    the pool log; the lease table
Subjects out
    the pool log: shadow events (what its policy would have done), by itself only
State
    the routers' fold, `HOLD_S` behind the log, because a decision is stored after it was made
On lag
    goes on; it is nobody's turn to wait for it. A decision that was stored later than `HOLD_S` after it was made is
    counted late, and not judged
On loss of the log
    waits; what it found waits in a bounded queue, and past the bound is not recorded (counted)
On a gap in the log
    starts from the routers' newest snapshot behind the gap; without one from nothing, and then knows of a worker what it
    says from there on (it asks nobody to announce anything anew: that is for routers)
On loss of the lease
    ends; the supervisor starts the next life
On start
    from the routers' newest snapshot and the tail behind it. It first reads what the log has under its name there: a
    decision that is judged already is not judged again, one that is not (it was away, or died before it wrote) is
On stop
    writes what it has found
"""

import asyncio
from collections import deque
from typing import Any, Final

from headwater.actors import lease
from headwater.actors.actor import Actor
from headwater.actors.metrics import ShadowMetrics
from headwater.actors.snapshot_keeper import SnapshotKeeper
from headwater.actors.world import World
from headwater.events.errors import LogUnavailable
from headwater.events.log import Gap, Log, Record, Unreadable
from headwater.events.writer import Writer
from headwater.router.shadow import ShadowFold
from headwater.router.state import RouterState, in_order
from headwater.schemas import subjects
from headwater.schemas.route import Shadowed

HOLD_S: Final = 2.0
"""How long a message is held before it is folded; decisions made before it come meanwhile."""

HELD_MAX: Final = 50_000
"""Messages held; past that the oldest is folded early, and decisions that it was held for may be late."""

TICK_S: Final = 0.25
RETRY_S: Final = 0.5
FLUSH_S: Final = 2.0


class ShadowActor(Actor):
    """See the module. `policy` decides in the shadow; by `judge` its choices and the routers' are judged."""

    kind = "shadow"

    def __init__(self, world: World, name: str, pool: str, *, policy: str, judge: str = "kv") -> None:
        super().__init__(world, name)
        self.pool = pool
        self.policy = policy
        self.judge = judge
        self.log = self.log.bind(pool=pool, policy=policy, judge=judge)
        self._metrics = ShadowMetrics(pool, policy, judge)
        self._fold = ShadowFold(RouterState(), policy, judge)
        self._held: deque[tuple[Record | Unreadable, float]] = deque()
        self._read = 0
        self._caught_up = asyncio.Event()
        self._writer: Writer | None = None
        self._lease: lease.LeaseHandle | None = None

    @property
    def fold(self) -> ShadowFold:
        """What it knows and has found."""
        return self._fold

    def stats(self) -> dict[str, Any]:
        """See `Actor.stats`."""
        tally = self._fold.tally
        return {
            "state": "ready" if self._caught_up.is_set() else "catching up",
            "pool": self.pool,
            "policy": self.policy,
            "judge": self.judge,
            "position": self._fold.state.position,
            "held": len(self._held),
            "judged": tally.judged,
            "agreement": round(tally.agreed / tally.judged, 4) if tally.judged else None,
            "regret_chosen": round(tally.regret_chosen / tally.judged, 4) if tally.judged else None,
            "regret_shadow": round(tally.regret_shadow / tally.judged, 4) if tally.judged else None,
            "late": tally.late,
            "unjudged": tally.unjudged,
        }

    async def start(self) -> None:
        """See `Actor.start`."""
        world = self.world
        log = await world.pool_log(self.pool)
        subject = subjects.pool_subject(world.ns, self.pool, "shadow", self.name)
        self._lease = await lease.take(
            world.leases,
            "shadow",
            self.name,
            world.clock,
            pool=self.pool,
            ids=world.ids(),
            newest=lease.newest_epoch(log, subject),
        )
        self.spawn(self._hold(), "lease")
        done = await self._begin(log, await self._restored(log) or RouterState())
        self._writer = Writer(log, subject, self.name, self._lease.epoch, world.clock)
        self.spawn(self._writer.run(), "shadowed")
        self.spawn(self._follow(log), "tail")
        self.spawn(self._tick(), "tick")
        self.log.info("shadow_started", from_snapshot=self._fold.state.position, judged_before=done)

    async def _hold(self) -> None:
        if self._lease is not None:
            raise lease.LeaseLost(await self._lease.hold())

    async def _begin(self, log: Log, state: RouterState) -> int:
        """Fold on from a state; returns how many decisions behind it are judged already."""
        done = await self._done(log, state.position)
        tally = self._fold.tally
        self._fold = ShadowFold(state, self.policy, self.judge, done=done)
        self._fold.tally = tally
        self._held.clear()
        self._read = state.position
        return len(done)

    async def _restored(self, log: Log) -> RouterState | None:
        """The routers' newest state that the log continues, if there is one. None is ever saved here."""
        keeper = SnapshotKeeper(self.world, self.pool, state=RouterState, settled=lambda: False)
        while True:
            try:
                return await keeper.restore(log)
            except LogUnavailable as error:
                self.log.warning("log_waits", reason=str(error))
                await self.world.clock.sleep(RETRY_S)

    async def _done(self, log: Log, after: int) -> set[str]:
        """Requests whose decisions the log has judged under this name."""
        found: set[str] = set()
        async for piece in log.read(after, follow=False):
            for record in piece.records:
                if record.batch.writer == self.name:
                    found.update(one.request for one in record.batch.events if isinstance(one, Shadowed))
            # A long tail must not cost the lease.
            await asyncio.sleep(0)
        return found

    async def _follow(self, log: Log) -> None:
        while True:
            async for piece in log.read(self._read, follow=True):
                if piece.gap is not None:
                    await self._behind(piece.gap, log)
                    break
                now_s = self.world.clock.monotonic_s()
                for message in in_order(piece):
                    self._fold.read(message)
                    self._held.append((message, now_s))
                    self._read = message.position
                self._advance()
                if piece.lag == 0:
                    self._caught_up.set()
                await asyncio.sleep(0)

    async def _behind(self, gap: Gap, log: Log) -> None:
        self.log.error("log_gap", first=gap.first, last=gap.last, reason=gap.reason)
        # What is found and not stored yet would be found again.
        self._tell(self._fold.judge())
        self._held.clear()
        if self._writer is not None:
            await self._writer.flush()
        state = await self._restored(log)
        if state is None:
            state = RouterState(whole=False)
            # Where the numbers are those folded already, it is another log: from its start.
            state.position = 0 if gap.first <= self._read else gap.last
            state.since = state.position + 1
        await self._begin(log, state)

    async def _tick(self) -> None:
        """Where nothing new comes, time passes nevertheless."""
        while True:
            await self.world.clock.sleep(TICK_S)
            self._advance()

    def _advance(self) -> None:
        """Fold what was held for long enough, by the log's clock or by this one's."""
        now_s = self.world.clock.monotonic_s()
        newest_ns = _stored_ns(self._held[-1][0]) if self._held else 0
        while self._held:
            message, since_s = self._held[0]
            held_s = max(now_s - since_s, (newest_ns - (_stored_ns(message) or newest_ns)) / 1e9)
            if held_s < HOLD_S and len(self._held) <= HELD_MAX:
                break
            self._held.popleft()
            self._tell(self._fold.advance(message))
        self._tell(self._fold.judge())
        self._metrics.note(self._fold.tally, self._fold.state.position)

    def _tell(self, found: list[Shadowed]) -> None:
        for one in found:
            if self._writer is not None and not self._writer.offer(one):
                self._metrics.unrecorded.inc()

    async def drain(self) -> None:
        """See `Actor.drain`."""
        self._tell(self._fold.judge())
        if self._writer is not None:
            try:
                async with asyncio.timeout(FLUSH_S):
                    await self._writer.flush()
            except TimeoutError:
                self.log.warning("events_not_written", pending=self._writer.pending)
        if self._lease is not None:
            await self._lease.release()

    async def close(self) -> None:
        """See `Actor.close`."""


def _stored_ns(message: Record | Unreadable) -> int:
    return message.stored_ns if isinstance(message, Record) else 0
