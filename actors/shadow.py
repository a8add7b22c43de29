"""The shadow actor: decides with another policy, live, on the log of a pool's routers.

Read-only: its credentials permit publishing to the shadow subject only.

Subjects in
    the pool log; the lease table
Subjects out
    the pool log: shadow events (what its policy would have done)
State
    the routers' fold, `HOLD_S` behind the log, because a decision is stored after it was made
On lag
    continues; nothing waits for it. A decision that was stored later than `HOLD_S` after it was made is counted as late,
    and not judged
On loss of the log
    waits; its results wait in a bounded queue, and beyond its bound are not recorded (counted)
On a gap in the log
    starts from the routers' newest snapshot after the gap. Without one it starts from an empty state and learns of workers
    from later events only; it does not request them to reannounce anything, as routers do
On loss of the lease
    ends; the supervisor starts the next incarnation
On start
    from the routers' newest snapshot and the tail after it. It first reads its own events there: decisions that are
    judged already are not judged again; those of the time in which it was down are
On stop
    writes its results
"""

import asyncio
from collections import deque
from typing import Any, Final

from headwater.actors.metrics import ShadowMetrics
from headwater.actors.runtime import lease
from headwater.actors.runtime.actor import Actor
from headwater.actors.runtime.ports import Ports, SnapshotReader
from headwater.events.ports import Gap, Log, LogUnavailable, Record, Unreadable
from headwater.events.writer import Writer
from headwater.router.replay import ShadowFold
from headwater.router.state import RouterState, in_order
from headwater.schemas import subjects
from headwater.schemas.routing import Shadowed

HOLD_S: Final = 2.0
"""How long a message is held before it is folded, so that decisions made before it can arrive."""

HELD_MAX: Final = 50_000
"""Messages held. Beyond, the oldest is folded early, and decisions that it was held for may be late."""

TICK_S: Final = 0.25
RETRY_S: Final = 0.5
FLUSH_S: Final = 2.0


class ShadowActor(Actor):
    """The shadow router as an actor. `policy` decides; the policy `judge` scores its choices and the routers'."""

    kind = "shadow"

    def __init__(self, ports: Ports, name: str, pool: str, *, policy: str, judge: str = "kv") -> None:
        super().__init__(ports, name)
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
        """Its state and results."""
        return self._fold

    def log_fields(self) -> dict[str, Any]:
        """See `Actor.log_fields`."""
        return {**super().log_fields(), "pool": self.pool, "log_position": lambda: self._fold.state.position}

    def stats(self) -> dict[str, Any]:
        """See `Actor.stats`."""
        tally = self._fold.tally
        self.requests.total, self.requests.errors = tally.judged, tally.unjudged
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
        ports = self.ports
        log = await ports.pool_log(self.pool)
        subject = subjects.pool_subject(ports.ns, self.pool, "shadow", self.name)
        self._lease = await lease.take(
            ports.leases,
            "shadow",
            self.name,
            ports.clock,
            pool=self.pool,
            ids=ports.ids(),
            newest=lease.newest_epoch(log, subject),
        )
        self.spawn(self._hold_lease(), "lease")
        done = await self._continue_from(log, await self._restore(log) or RouterState())
        self._writer = Writer(log, subject, self.name, self._lease.epoch, ports.clock)
        self.spawn(self._writer.run(), "shadowed")
        self.spawn(self._follow(log), "tail")
        self.spawn(self._tick(), "tick")
        self.log.info("shadow_started", from_snapshot=self._fold.state.position, judged_before=done)

    async def _hold_lease(self) -> None:
        if self._lease is not None:
            raise lease.LeaseLost(await self._lease.hold())

    async def _continue_from(self, log: Log, state: RouterState) -> int:
        """Continue from a state; returns how many decisions after it are judged already."""
        done = await self._read_judged(log, state.position)
        tally = self._fold.tally
        self._fold = ShadowFold(state, self.policy, self.judge, done=done)
        self._fold.tally = tally
        self._held.clear()
        self._read = state.position
        return len(done)

    async def _restore(self, log: Log) -> RouterState | None:
        """The routers' newest snapshot from which the log continues, if there is one."""
        reader = SnapshotReader(self.ports, self.pool)
        while True:
            try:
                return await reader.restore(log)
            except LogUnavailable as error:
                self.log.warning("log_unavailable", reason=str(error))
                await self.ports.clock.sleep(RETRY_S)

    async def _read_judged(self, log: Log, after: int) -> set[str]:
        """Requests whose decisions were judged under this name, after a log position."""
        judged: set[str] = set()
        async for piece in log.read(after, follow=False):
            for record in piece.records:
                if record.batch.writer == self.name:
                    judged.update(
                        event.request for event in record.batch.events if isinstance(event, Shadowed)
                    )
            # Yield: a long tail must not delay the renewal of the lease.
            await asyncio.sleep(0)
        return judged

    async def _follow(self, log: Log) -> None:
        while True:
            async for piece in log.read(self._read, follow=True):
                if piece.gap is not None:
                    await self._restart_after(piece.gap, log)
                    break
                now_s = self.ports.clock.monotonic_s()
                for message in in_order(piece):
                    self._fold.read(message)
                    self._held.append((message, now_s))
                    self._read = message.position
                self._advance()
                if piece.lag == 0:
                    self._caught_up.set()
                await asyncio.sleep(0)

    async def _restart_after(self, gap: Gap, log: Log) -> None:
        self.log.error("log_gap", first=gap.first, last=gap.last, reason=gap.reason)
        # Write results first: unwritten ones would be judged again.
        self._publish(self._fold.judge())
        self._held.clear()
        if self._writer is not None:
            await self._writer.flush()
        state = await self._restore(log)
        if state is None:
            state = RouterState(whole=False)
            # Positions that were folded already mean another log: read it from its start.
            state.position = 0 if gap.first <= self._read else gap.last
            state.since = state.position + 1
        await self._continue_from(log, state)

    async def _tick(self) -> None:
        """Fold held messages although no new ones arrive."""
        while True:
            await self.ports.clock.sleep(TICK_S)
            self._advance()

    def _advance(self) -> None:
        """Fold messages that were held long enough, by the log's clock or this process's."""
        now_s = self.ports.clock.monotonic_s()
        newest_ns = _stored_ns(self._held[-1][0]) if self._held else 0
        while self._held:
            message, since_s = self._held[0]
            held_s = max(now_s - since_s, (newest_ns - (_stored_ns(message) or newest_ns)) / 1e9)
            if held_s < HOLD_S and len(self._held) <= HELD_MAX:
                break
            self._held.popleft()
            self._publish(self._fold.advance(message))
        self._publish(self._fold.judge())
        self._metrics.note(self._fold.tally, self._fold.state.position)

    def _publish(self, events: list[Shadowed]) -> None:
        for event in events:
            if self._writer is not None:
                self._writer.offer(event)

    async def drain(self) -> None:
        """See `Actor.drain`."""
        self._publish(self._fold.judge())
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
