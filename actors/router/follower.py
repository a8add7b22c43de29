"""A router's fold as it follows the log (the state, its own decisions that the log does not hold yet, the lag), and its snapshots.

An own decision is applied when it is made and skipped when the log delivers it. A range that the log can no longer deliver
(a gap, another log under the same name) may have changed anything: the fold then starts from an empty state after it, and
the workers reannounce their caches.

Loads are folded twice: `state.loads` with own decisions ahead of the log, `logged` in the log's order only. The digest that
routers compare is taken of the latter. It cannot be derived from the former by undoing unwritten decisions: credited blocks
that were evicted, and stages that arrived before their decision, are not kept.

Taking a snapshot has three parts. On the event loop: the loads as plain values, because decisions keep changing them.
In a thread, while the fold is stopped and queries are answered: one pass over the index. Then, with the fold
running: hashing, the object store and the local cache.
"""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any, Final, Protocol

import msgspec

from headwater.actors.metrics import RouterMetrics
from headwater.actors.router.divergence import DivergenceCheck, Marks, in_thread
from headwater.actors.runtime.ports import Ports, SnapshotReader
from headwater.events.ports import Gap, Log, LogError, LogUnavailable, Record, Slice, Unreadable
from headwater.events.snapshot_store import Policy, RetentionGuard, Snapshot, Tail, due
from headwater.events.writer import PENDING_EVENTS_MAX
from headwater.router.load import Loads, Split
from headwater.router.state import RouterState, apply_to_loads, in_order
from headwater.schemas.clock import Clock
from headwater.schemas.events import UnknownEvent
from headwater.schemas.routing import Decision

LAG_MESSAGES_MAX: Final = 2_000
"""The limit of unread messages, beyond which decisions are marked `degraded`."""

LAG_S_MAX: Final = 2.0
"""The time after which decisions are also marked `degraded`, if the log has not delivered an own decision."""

RETRY_S: Final = 0.5


class LogFollower:
    """The fold of one router. `number` and `seen` count own decisions: made, and delivered by the log.

    At the positions that `Marks` selects, `divergence` publishes the digest of the state with the `logged` loads.
    """

    def __init__(self, clock: Clock, log: Any, metrics: RouterMetrics, divergence: DivergenceCheck) -> None:
        self.state = RouterState()
        self.number = 0
        self.seen = 0
        self.caught_up = asyncio.Event()
        self.logged = Loads()
        self._divergence = divergence
        self._marks = Marks()
        self._clock = clock
        self._log = log
        self._metrics = metrics
        self._lost_weights: dict[str, float] = {}
        self._lost_splits: dict[str, Split] = {}
        self._unknown: set[str] = set()
        self._unseen: deque[float] = deque(maxlen=PENDING_EVENTS_MAX)
        self._restarted_at = 0
        self._members_changed = True
        """May workers have joined, left or changed since the last note? To count thousands takes time."""
        self._lag = 0
        self._lag_s = 0.0
        self._events_per_message = 1.0

    @property
    def settled(self) -> bool:
        """Has the log delivered every own decision?"""
        return self.seen == self.number

    def lag(self) -> dict[str, float]:
        """Unread messages, an estimate of their events, and the age of the newest folded message in seconds."""
        return {
            "lag_messages": self._lag,
            "lag_events": round(self._lag * self._events_per_message),
            "lag_s": round(self._lag_s, 3),
        }

    def is_degraded(self) -> bool:
        """Does the fold lag, or is an own decision overdue from the log?"""
        waited_s = self._clock.monotonic_s() - self._unseen[0] if self._unseen else 0.0
        return self._lag > LAG_MESSAGES_MAX or waited_s > LAG_S_MAX

    def apply_own(self, decision: Decision) -> None:
        """Apply an own decision, ahead of the log."""
        self.number = decision.number
        self._unseen.append(self._clock.monotonic_s())
        self.state.loads.decide(decision)

    def take_lost_weights(self) -> dict[str, float]:
        """The engine weights that the last gap removed from the fold. Returned once."""
        lost, self._lost_weights = self._lost_weights, {}
        return lost

    def take_lost_splits(self) -> list[Split]:
        """The traffic splits that the last gap removed from the fold. Returned once."""
        lost, self._lost_splits = self._lost_splits, {}
        return list(lost.values())

    async def follow(
        self,
        log: Log,
        incarnation: tuple[str, int],
        folding: Callable[[], AbstractAsyncContextManager[None]],
        on_advanced: Callable[[], None],
    ) -> None:
        """Fold the log. Does not return. Decisions of `incarnation` (name, epoch) are own ones.

        The state changes beyond its loads only within `folding`; after each slice of the log, outside of that, `on_advanced` is called.
        """
        self.logged = msgspec.convert(msgspec.to_builtins(self.state.loads), Loads)
        while True:
            self.state.log = await self._identity(log)
            async for piece in log.read(self.state.position, follow=True):
                async with folding():
                    if piece.gap is not None and piece.gap.first <= self.state.position:
                        # The positions folded so far do not exist: this is another log. Read it from its start.
                        self._restart_after(piece.gap._replace(last=0))
                        break
                    await self._fold(piece, incarnation)
                if piece.lag == 0:
                    self.caught_up.set()
                on_advanced()

    async def _identity(self, log: Log) -> str:
        """The identity of the log. Waits while the server is unreachable."""
        while True:
            try:
                return await log.identity()
            except LogUnavailable as error:
                self._log.warning("log_unavailable", reason=str(error))
                await self._clock.sleep(RETRY_S)

    async def _fold(self, piece: Slice, incarnation: tuple[str, int]) -> None:
        if piece.gap is not None:
            self._restart_after(piece.gap)
        for message in in_order(piece):
            if isinstance(message, Unreadable):
                self._metrics.unreadable.inc()
                self._log.error(
                    "log_message_unreadable", log_position=message.position, reason=message.reason
                )
                self.state.skip(message)
            else:
                self._fold_record(message, own=(message.batch.writer, message.batch.epoch) == incarnation)
                await self._publish_digest(message)
        self._note_lag(piece)

    def _fold_record(self, record: Record, *, own: bool) -> None:
        self._members_changed |= ".fleet." in record.subject
        events, broken = self.state.admit(record)
        if broken is not None:
            self._metrics.breaks.inc()
            self._log.error("log_chain_broken", **broken._asdict())
        for event in events:
            if isinstance(event, UnknownEvent):
                self._note_unknown(record, event)
                continue
            self.state.apply_to_index(record.batch, event)
            apply_to_loads(self.logged, record, event)
            if own and isinstance(event, Decision) and event.number > self._restarted_at:
                # Applied when it was made.
                self._note_seen(event.number)
            else:
                apply_to_loads(self.state.loads, record, event)

    def _note_unknown(self, record: Record, event: UnknownEvent) -> None:
        self._metrics.unknown.inc()
        if event.kind not in self._unknown:
            self._unknown.add(event.kind)
            self._log.warning(
                "log_event_unknown",
                log_position=record.position,
                event_kind=event.kind,
                writer=record.batch.writer,
            )

    async def _publish_digest(self, record: Record) -> None:
        marked = self._marks.is_marked(record.stored_ns)
        # While this router catches up, others are far ahead and no longer keep digests of this position.
        if marked and self.state.since >= 0 and self.caught_up.is_set():
            await self._divergence.publish(self.state, self.logged)

    def _note_seen(self, number: int) -> None:
        for _ in range(min(number - self.seen, len(self._unseen))):
            self._unseen.popleft()
        self.seen = number

    def _restart_after(self, gap: Gap) -> None:
        self._log.error("log_gap", first=gap.first, last=gap.last, reason=gap.reason)
        self._metrics.gaps.inc()
        self._lost_weights = self.state.loads.engine_weights or self._lost_weights
        self._lost_splits = self.state.loads.splits or self._lost_splits
        identity = self.state.log
        self.state = RouterState(whole=False)
        self._members_changed = True
        self.state.position, self.state.log = gap.last, identity
        self.state.since = gap.last + 1
        self.logged = Loads()
        self._marks.reset()
        # Earlier own decisions were applied to the dropped state only: fold them when the log delivers them.
        self._restarted_at = self.number
        self._note_seen(self.number)

    def _note_lag(self, piece: Slice) -> None:
        self._lag = piece.lag
        if piece.records:
            events = sum(len(record.batch.events) for record in piece.records) / len(piece.records)
            self._events_per_message += (events - self._events_per_message) / 8
        last_ns = piece.records[-1].stored_ns if piece.records and piece.lag else 0
        self._lag_s = max(0.0, (self._clock.wall_ns() - last_ns) / 1e9) if last_ns else 0.0
        metrics = self._metrics
        metrics.position.set(self.state.position)
        metrics.lag.set(piece.lag)
        metrics.lag_seconds.set(self._lag_s)
        metrics.blocks.set(self.state.index.rows)
        metrics.blocks_refused.set(self.state.index.refused)
        metrics.cold.set(len(self.state.cold))
        if self._members_changed:
            self._members_changed = False
            members = self.state.loads.workers.values()
            metrics.set_workers(
                Counter((member.role, "draining" if member.draining else member.state) for member in members)
            )
        metrics.set_engine_weights(self.state.loads.engine_weights)
        metrics.set_traffic_shares(
            {
                (subject, name): share
                for subject, split in self.state.loads.splits.items()
                for name, share in split.event.shares.items()
            }
        )


# Snapshots, taken when they are due, while queries are answered.

PERIOD_S = 1.0
SETTLE_S = 0.005
SETTLE_TRIES = 200


class SnapshotSource(Protocol):
    """The router whose state is saved."""

    @property
    def state(self) -> RouterState:
        """The fold."""
        ...

    @property
    def is_settled(self) -> bool:
        """Does the log hold every decision that the state includes? Else it is ahead of the log and must not be saved."""
        ...

    @property
    def is_sound(self) -> bool:
        """Does the state agree with other routers'? Else the next incarnation must not start from it."""
        ...

    def pause(self) -> AbstractAsyncContextManager[None]:
        """Hold back new decisions for a short time, so that the state settles on a busy pool too."""
        ...


class SnapshotKeeper(SnapshotReader):
    """Restores and takes the snapshots of one pool for one router."""

    def __init__(
        self, ports: Ports, pool: str, source: SnapshotSource, *, policy: Policy | None = None
    ) -> None:
        super().__init__(ports, pool)
        self._source = source
        self._was_sound = True
        self._policy = policy or Policy()
        self._still = asyncio.Lock()
        self._saving = asyncio.Lock()
        self._saved_position = 0
        self._saved_at_s = ports.clock.monotonic_s()
        self._fold_s = 0.0
        self._cost_s = 0.0

    @asynccontextmanager
    async def folding(self) -> AsyncIterator[None]:
        """Within it the index may change: no snapshot reads it."""
        async with self._still:
            began = self._ports.clock.monotonic_s()
            yield
            self._fold_s += self._ports.clock.monotonic_s() - began

    async def restore(self, log: Log) -> RouterState | None:
        """See `SnapshotReader.restore`. Later snapshots are due relative to this one."""
        state = await super().restore(log)
        if state is not None:
            self._note_saved(state.position)
        return state

    async def run(self, log: Log) -> None:
        """Take a snapshot when one is due, or retention is about to cut what the newest one needs. Does not return."""
        clock = self._ports.clock
        guard = RetentionGuard(log, clock)
        while True:
            await clock.sleep(PERIOD_S)
            position = self._source.state.position
            if position < self._saved_position:
                # The fold restarted on another log.
                self._saved_position = 0
            age_s = clock.monotonic_s() - self._saved_at_s
            grown = position - self._saved_position
            pressed = await guard.due(self._saved_position) if grown > 0 else ""
            if pressed or due(self._policy, Tail(grown, self._fold_s, age_s, self._cost_s)):
                # Waiting until no decision is unwritten costs nothing; on a busy pool that may not happen.
                for _ in range(SETTLE_TRIES):
                    if self._source.is_settled:
                        break
                    await clock.sleep(SETTLE_S)
                await self.save(log)

    async def save(self, log: Log) -> None:
        """Take a snapshot now, unless nothing has changed since the last one or the state does not settle."""
        # One at a time: a drain may call this while one is being written.
        async with self._saving:
            sound, self._was_sound = self._was_sound, self._source.is_sound
            if not self._was_sound:
                if sound:
                    self._log.error(
                        "snapshots_paused", reason="another router of the pool has a different state"
                    )
                return
            began = self._ports.clock.monotonic_s()
            fold_s = self._fold_s
            snapshot = await self._take()
            if snapshot is None:
                return
            try:
                manifest = await self._store.save(snapshot, log.bounds)
            except LogError as error:
                self._log.warning("snapshot_not_saved", reason=str(error))
                return
            self._cost_s = self._ports.clock.monotonic_s() - began
            self._note_saved(snapshot.position, fold_s)
            self._log.info(
                "snapshot_saved",
                log_position=snapshot.position,
                digest=snapshot.digest,
                bytes=sum(chunk.size for chunk in manifest.chunks),
                seconds=round(self._cost_s, 3),
            )

    async def _take(self) -> Snapshot | None:
        async with AsyncExitStack() as held:
            if not self._source.is_settled:
                await held.enter_async_context(self._source.pause())
            async with self._still:
                state = self._source.state
                if not self._source.is_settled or state.position == self._saved_position:
                    return None
                # No decision may be made between that check and this copy: decisions keep changing the loads.
                loads = msgspec.to_builtins(state.loads)
                await held.aclose()
                try:
                    return await in_thread(state.snapshot, loads, self._ports.clock.wall_ns())
                except ValueError as error:
                    self._log.error("snapshot_not_taken", log_position=state.position, reason=str(error))
                    return None

    def _note_saved(self, position: int, covered_s: float = 0.0) -> None:
        """A snapshot exists; `covered_s` of the time spent folding is included in it, the rest came later."""
        self._saved_position = position
        self._saved_at_s = self._ports.clock.monotonic_s()
        self._fold_s -= covered_s
