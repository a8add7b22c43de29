"""A router's fold while it follows the log: the state, its own decisions that the log does not hold yet, and the lag.

A decision is applied when it is made, and passed over when the log brings it. What the log can not bring any more
(a gap, another log under the same name) may have changed anything: the fold then begins from nothing behind it, and
the workers tell everything anew.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import msgspec

from headwater.actors.metrics import RouterMetrics
from headwater.actors.replicas import Marks
from headwater.events.errors import LogUnavailable
from headwater.events.log import Gap, Log, Record, Slice, Unreadable
from headwater.events.writer import PENDING_EVENTS_MAX
from headwater.router.load import Loads
from headwater.router.state import RouterState, apply_to_loads, in_order
from headwater.schemas.clock import Clock
from headwater.schemas.route import Decision

LAG_MESSAGES_MAX = 2_000
"""Behind the log by more than this, decisions say that they are degraded."""

LAG_S_MAX = 2.0
"""So do they when an own decision has not come back from the log for this long."""

RETRY_S = 0.5


OnMark = Callable[[RouterState, Loads], Awaitable[None]]


class LiveFold:
    """See the module. `number` and `seen` count own decisions: made, and brought back by the log.

    `logged` are the loads as the log alone tells them. At the positions that `Marks` names, `on_mark` is given the
    state and those loads.
    """

    def __init__(self, clock: Clock, log: Any, metrics: RouterMetrics) -> None:
        self.state = RouterState()
        self.number = 0
        self.seen = 0
        self.caught_up = asyncio.Event()
        self.moved: Callable[[], None] = lambda: None
        """Called after each slice, outside `folding`."""
        self.logged = Loads()
        self.on_mark: OnMark | None = None
        self._marks = Marks()
        self._clock = clock
        self._log = log
        self._metrics = metrics
        self._unseen: deque[float] = deque(maxlen=PENDING_EVENTS_MAX)
        self._anew = 0
        self._lag = 0
        self._lag_s = 0.0
        self._events_a_message = 1.0

    @property
    def settled(self) -> bool:
        """Does the state hold nothing that the log did not tell?"""
        return self.seen == self.number

    def lag(self) -> dict[str, float]:
        """How far behind the log the fold is: messages, about how many events they hold, seconds."""
        return {
            "lag_messages": self._lag,
            "lag_events": round(self._lag * self._events_a_message),
            "lag_s": round(self._lag_s, 3),
        }

    def degraded(self) -> bool:
        """Is the fold known to be behind, or is an own decision not coming back from the log?"""
        waited_s = self._clock.monotonic_s() - self._unseen[0] if self._unseen else 0.0
        return self._lag > LAG_MESSAGES_MAX or waited_s > LAG_S_MAX

    def decided(self, decision: Decision) -> None:
        """Apply an own decision, ahead of the log."""
        self.number = decision.number
        self._unseen.append(self._clock.monotonic_s())
        self.state.loads.decide(decision)

    async def follow(
        self, log: Log, life: tuple[str, int], folding: Callable[[], AbstractAsyncContextManager[None]]
    ) -> None:
        """Fold for ever, each slice inside `folding`. `life`: whose decisions are own ones, as (name, epoch)."""
        self.logged = msgspec.convert(msgspec.to_builtins(self.state.loads), Loads)
        while True:
            self.state.log = await self._identity(log)
            async for piece in log.read(self.state.position, follow=True):
                async with folding():
                    if piece.gap is not None and piece.gap.first <= self.state.position:
                        # What was folded is gone: this is another log, read it from its start.
                        self._begin_anew(piece.gap._replace(last=0))
                        break
                    await self._fold(piece, life)
                if piece.lag == 0:
                    self.caught_up.set()
                self.moved()

    async def _identity(self, log: Log) -> str:
        """Which log this is; an unreachable server is waited for."""
        while True:
            try:
                return await log.identity()
            except LogUnavailable as error:
                self._log.warning("log_waits", reason=str(error))
                await self._clock.sleep(RETRY_S)

    async def _fold(self, piece: Slice, life: tuple[str, int]) -> None:
        if piece.gap is not None:
            self._begin_anew(piece.gap)
        for message in in_order(piece):
            if isinstance(message, Unreadable):
                self._metrics.unreadable.inc()
                self._log.error(
                    "log_message_unreadable", log_position=message.position, reason=message.reason
                )
                self.state.skip(message)
            else:
                self._fold_record(message, own=(message.batch.writer, message.batch.epoch) == life)
                await self._mark(message)
        self._note_lag(piece)

    def _fold_record(self, record: Record, *, own: bool) -> None:
        events, broken = self.state.admit(record)
        if broken is not None:
            self._metrics.breaks.inc()
            self._log.error("log_chain_broken", **broken._asdict())
        for event in events:
            self.state.apply_to_index(record.batch, event)
            apply_to_loads(self.logged, record, event)
            if own and isinstance(event, Decision) and event.number > self._anew:
                # Applied when it was made.
                self._note_seen(event.number)
            else:
                apply_to_loads(self.state.loads, record, event)

    async def _mark(self, record: Record) -> None:
        marked = self._marks.marked(record.stored_ns)
        # While it catches up, others are far ahead, and have forgotten this position.
        if marked and self.on_mark is not None and self.state.since >= 0 and self.caught_up.is_set():
            await self.on_mark(self.state, self.logged)

    def _note_seen(self, number: int) -> None:
        for _ in range(min(number - self.seen, len(self._unseen))):
            self._unseen.popleft()
        self.seen = number

    def _begin_anew(self, gap: Gap) -> None:
        self._log.error("log_gap", first=gap.first, last=gap.last, reason=gap.reason)
        self._metrics.gaps.inc()
        identity = self.state.log
        self.state = RouterState(whole=False)
        self.state.position, self.state.log = gap.last, identity
        self.state.since = gap.last + 1
        self.logged = Loads()
        self._marks.begin_anew()
        # What was decided before is in the lost state only: the log brings it again.
        self._anew = self.number
        self._note_seen(self.number)

    def _note_lag(self, piece: Slice) -> None:
        self._lag = piece.lag
        if piece.records:
            events = sum(len(record.batch.events) for record in piece.records) / len(piece.records)
            self._events_a_message += (events - self._events_a_message) / 8
        last_ns = piece.records[-1].stored_ns if piece.records and piece.lag else 0
        self._lag_s = max(0.0, (self._clock.wall_ns() - last_ns) / 1e9) if last_ns else 0.0
        metrics = self._metrics
        metrics.position.set(self.state.position)
        metrics.lag.set(piece.lag)
        metrics.lag_events.set(piece.lag * self._events_a_message)
        metrics.lag_seconds.set(self._lag_s)
        metrics.blocks.set(self.state.index.rows)
        metrics.blocks_refused.set(self.state.index.refused)
        metrics.workers.set(len(self.state.loads.workers))
