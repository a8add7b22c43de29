"""A writer of one subject: takes events without waiting, appends them in packed messages, one call at a time.

Whoever has an event calls `offer` and goes on; the log never holds up a token. `run` packs what came within a few
milliseconds into messages and appends them until they are stored, with the same messages each time.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import structlog

from headwater.events.errors import LogError, LogFull, LogRefused
from headwater.events.log import ATOMIC_MESSAGES_MAX, AppendResult, Entry, Fenced, Log, Stored, Unknown
from headwater.schemas.clock import Clock
from headwater.schemas.envelope import SCHEMA_VERSION, Batch, Event, Sealed
from headwater.schemas.pool import seal, size_of

DELAY_S = 0.002
BATCH_EVENTS_MAX = 512
BATCH_BYTES_MAX = 256 * 1024
CALL_MESSAGES_MAX = 64
PENDING_EVENTS_MAX = 200_000

RETRY_S = 0.5
FULL_RETRY_S = 2.0
"""Pause while the store is full: somebody has to make room first."""

_log = structlog.get_logger("headwater.writer")


class WriterFenced(Exception):
    """A later life of this writer took over: this one must stop writing."""


class Writer:
    """Appends the events of one (subject, writer, epoch) in order.

    With a `fence` (another subject of this writer, see `Log.ingest`) its messages are streamed, without one each
    call is atomic. At most `PENDING_EVENTS_MAX` events wait; past that `offer` refuses, and counts what it refused
    in `refused`: the owner then declares a gap once the log is back. `stamp` sees the events of each message
    at the moment when it is made, and may put one more behind them. `on_stored` hears each message's
    position and events once they are stored, position 0 where the log does not tell it. After `probe_s` without
    events (0: never) an empty message is appended, so that `stalled_s` tells of a log that takes none.
    """

    def __init__(
        self,
        log: Log,
        subject: str,
        writer: str,
        epoch: int,
        clock: Clock,
        *,
        fence: str = "",
        probe_s: float = 0.0,
        stamp: Callable[[Sequence[Event]], Event] | None = None,
        on_stored: Callable[[int, Sequence[Event]], None] | None = None,
    ) -> None:
        self.subject = subject
        self._log = log
        self._writer = writer
        self._epoch = epoch
        self._clock = clock
        self._fence = fence
        self._probe_s = probe_s
        self._trying_since: float | None = None
        self._stamp = stamp
        self._on_stored = on_stored
        self._pending: deque[tuple[Event, str]] = deque()
        self._seq = 0
        self._previous = b""
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self.refused = 0
        self.position = 0

    def offer(self, event: Event, trace: str = "") -> bool:
        """Queue an event. False if the queue is full and it was not taken."""
        if len(self._pending) >= PENDING_EVENTS_MAX:
            self.refused += 1
            return False
        self._pending.append((event, trace))
        self._wake.set()
        self._idle.clear()
        return True

    @property
    def pending(self) -> int:
        """Events that are not known to be stored."""
        return len(self._pending)

    @property
    def stalled_s(self) -> float:
        """Seconds since the append under way was first tried, 0 while there is none."""
        return 0.0 if self._trying_since is None else self._clock.monotonic_s() - self._trying_since

    async def flush(self) -> None:
        """Wait until everything offered so far is stored. `run` must be running."""
        await self._idle.wait()

    async def run(self) -> None:
        """Append for ever. Raises `WriterFenced` when a later life of this writer has written."""
        while True:
            if not await self._woken():
                await self._append([((), "")])
                continue
            self._wake.clear()
            await self._clock.sleep(DELAY_S)
            while self._pending:
                await self._append(pack(self._pending, CALL_MESSAGES_MAX))
            self._idle.set()

    async def _woken(self) -> bool:
        """Wait for events; False if a probe is due before any came."""
        if not self._probe_s:
            return await self._wake.wait()
        try:
            async with asyncio.timeout(self._probe_s):
                return await self._wake.wait()
        except TimeoutError:
            return False

    async def _append(self, packed: list[tuple[Sequence[Event], str]]) -> None:
        self._trying_since = self._clock.monotonic_s()
        try:
            await self._store(packed)
        finally:
            # Also where this incarnation is over: then nothing waits to be stored any more.
            self._trying_since = None

    async def _store(self, packed: list[tuple[Sequence[Event], str]]) -> None:
        await self._find_place()
        messages = [self._seal(events, trace) for events, trace in packed]
        self.position = await stored(
            lambda: self._send(messages), self._clock, self.subject, lambda: len(self._pending)
        )
        for index, (events, _) in enumerate(packed):
            for _ in events:
                self._pending.popleft()
            if self._on_stored is not None:
                behind = len(packed) - 1 - index
                # Those of an atomic append stand together; between streamed ones there may be others.
                self._on_stored(0 if self._fence and behind else self.position - behind, events)

    async def _send(self, messages: list[Sealed]) -> AppendResult:
        if self._fence:
            return await self._log.ingest(self.subject, *messages, fence=self._fence)
        return await self._log.append(*(Entry(self.subject, message) for message in messages))

    async def _find_place(self) -> None:
        """Learn behind which message this life's first one goes."""
        while not self._previous:
            try:
                self._previous = (await self._log.newest(self.subject)).digest
            except LogError as error:
                if not error.retryable:
                    raise
                _log.warning("append_waits", subject=self.subject, reason=str(error))
                await self._clock.sleep(RETRY_S)

    def _seal(self, events: Sequence[Event], trace: str) -> Sealed:
        if self._stamp is not None:
            events = [*events, self._stamp(events)]
        self._seq += 1
        batch: Batch[Any] = Batch(
            version=SCHEMA_VERSION,
            writer=self._writer,
            epoch=self._epoch,
            seq=self._seq,
            wall_ns=self._clock.wall_ns(),
            events=tuple(events),
            trace=trace,
            previous=self._previous,
        )
        message = seal(batch)
        self._previous = message.digest
        return message

    async def begin(self, *events: Event) -> list[Entry]:
        """The first messages of this life, for an atomic append together with those of other subjects.

        The caller appends them, with `stored`, before `run` is started.
        """
        await self._find_place()
        packed = pack(((event, "") for event in events), ATOMIC_MESSAGES_MAX) or [((), "")]
        return [Entry(self.subject, self._seal(part, trace)) for part, trace in packed]


def pack(events: Iterable[tuple[Event, str]], messages_max: int) -> list[tuple[Sequence[Event], str]]:
    """The first of these (event, trace) pairs as contents of at most `messages_max` messages, each with its trace."""
    packed: list[tuple[Sequence[Event], str]] = []
    part: list[Event] = []
    traces: set[str] = set()
    size = 0
    for event, trace in events:
        event_size = size_of(event)
        if part and (size + event_size > BATCH_BYTES_MAX or len(part) >= BATCH_EVENTS_MAX):
            packed.append((part, traces.pop() if len(traces) == 1 else ""))
            part, traces, size = [], set(), 0
            if len(packed) == messages_max:
                return packed
        part.append(event)
        traces.add(trace)
        size += event_size
    if part:
        packed.append((part, traces.pop() if len(traces) == 1 else ""))
    return packed


async def stored(
    attempt: Callable[[], Any], clock: Clock, subject: str, pending: Callable[[], int] = lambda: 0
) -> int:
    """Try until it is stored; returns the position. Raises `WriterFenced`, `LogRefused` or `StreamMissing`."""
    while True:
        pause_s = RETRY_S
        try:
            result: AppendResult = await attempt()
        except LogFull as error:
            result, pause_s = Unknown(str(error)), FULL_RETRY_S
        except LogRefused:
            raise
        except LogError as error:
            result = Unknown(str(error))
        match result:
            case Stored(position=position):
                return position
            case Fenced(epoch=epoch):
                raise WriterFenced(f"{subject}: this life is over, epoch {epoch} writes now")
            case Unknown(reason=reason):
                _log.warning("append_retried", subject=subject, reason=reason, pending=pending())
                await clock.sleep(pause_s)
