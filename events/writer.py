"""The writer of one subject: it queues events without blocking, and appends them in packed messages, one call at a time.

`offer` queues an event and returns at once, so the log never delays a token. `run` packs the events of a few
milliseconds into messages and retries each append, with the same messages, until it is stored.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import structlog

from headwater.events.ports import (
    ATOMIC_MESSAGES_MAX,
    AppendResult,
    Entry,
    Fenced,
    Log,
    LogError,
    LogFull,
    LogRefused,
    Stored,
    Unknown,
)
from headwater.schemas.clock import Clock
from headwater.schemas.encoding import SCHEMA_VERSION, Batch, Sealed, seal, size_of
from headwater.schemas.events import Event

DELAY_S = 0.002
BATCH_EVENTS_MAX = 512
BATCH_BYTES_MAX = 256 * 1024
CALL_MESSAGES_MAX = 64
PENDING_EVENTS_MAX = 200_000

RETRY_S = 0.5
FULL_RETRY_S = 2.0
"""Pause between attempts while the store is full: an operator has to free space first."""

_log = structlog.get_logger("headwater.writer")


class WriterFenced(Exception):
    """A later incarnation of this writer has taken over: this one must stop writing."""


class Writer:
    """Appends the events of one (subject, writer, epoch) in order.

    With a `fence` (another subject of this writer, see `Log.ingest`) its messages are streamed; without one each
    call is atomic. At most `PENDING_EVENTS_MAX` events are queued; beyond that `offer` rejects events and counts
    them in `refused`, and the owner declares a gap once the log is available again. `stamp` is called with the
    events of each message when it is built, and may append one more event. `on_stored` is called with each message's
    position and events once they are stored, with position 0 where the log does not report it. After `probe_s`
    without events (0: never) an empty message is appended, so that `stalled_s` shows a log that accepts none.
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
        self._tries = 0
        self._stamp = stamp
        self._on_stored = on_stored
        self._pending: deque[Event] = deque()
        self._seq = 0
        self._previous = b""
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self.refused = 0
        """Events that were rejected because the queue was full."""
        self.retried = 0
        """Appends that were tried again."""
        self.on_append: Callable[[float], None] | None = None
        """Called with the seconds that each append took until it was confirmed."""
        self.position = 0

    def offer(self, event: Event) -> bool:
        """Queue an event. False if the queue is full and the event was rejected."""
        if len(self._pending) >= PENDING_EVENTS_MAX:
            self.refused += 1
            return False
        if not self._pending:
            # Otherwise `run` is awake, or was told to wake: it goes on until nothing is pending.
            self._wake.set()
            self._idle.clear()
        self._pending.append(event)
        return True

    @property
    def pending(self) -> int:
        """Number of events that are not known to be stored."""
        return len(self._pending)

    @property
    def stalled_s(self) -> float:
        """Seconds since the first attempt of the current append, 0 without one."""
        return 0.0 if self._trying_since is None else self._clock.monotonic_s() - self._trying_since

    async def flush(self) -> None:
        """Wait until everything offered so far is stored. `run` must be running."""
        await self._idle.wait()

    async def run(self) -> None:
        """Append until cancelled. Raises `WriterFenced` when a later incarnation of this writer has written."""
        while True:
            if not await self._woken():
                await self._append([()])
                continue
            self._wake.clear()
            await self._clock.sleep(DELAY_S)
            while self._pending:
                await self._append(pack(self._pending, CALL_MESSAGES_MAX))
            self._idle.set()

    async def _woken(self) -> bool:
        """Wait for events; False if a probe is due before any arrived."""
        if not self._probe_s:
            return await self._wake.wait()
        try:
            async with asyncio.timeout(self._probe_s):
                return await self._wake.wait()
        except TimeoutError:
            return False

    async def _append(self, packed: list[Sequence[Event]]) -> None:
        self._trying_since = began_s = self._clock.monotonic_s()
        try:
            await self._store(packed)
            if self.on_append is not None:
                self.on_append(self._clock.monotonic_s() - began_s)
        finally:
            # Also when this incarnation ended: no event will be stored after that.
            self._trying_since = None

    async def _store(self, packed: list[Sequence[Event]]) -> None:
        await self._find_place()
        messages = [self._seal(events) for events in packed]
        self._tries = 0
        self.position = await stored(
            lambda: self._send(messages), self._clock, self.subject, lambda: len(self._pending)
        )
        for index, events in enumerate(packed):
            for _ in events:
                self._pending.popleft()
            if self._on_stored is not None:
                behind = len(packed) - 1 - index
                # Messages of an atomic append are adjacent; between streamed ones there may be others.
                self._on_stored(0 if self._fence and behind else self.position - behind, events)

    async def _send(self, messages: list[Sealed]) -> AppendResult:
        self._tries += 1
        self.retried += self._tries > 1
        if self._fence:
            return await self._log.ingest(self.subject, *messages, fence=self._fence)
        return await self._log.append(*(Entry(self.subject, message) for message in messages))

    async def _find_place(self) -> None:
        """Read the digest of the message that this incarnation's first one follows."""
        while not self._previous:
            try:
                self._previous = (await self._log.newest(self.subject)).digest
            except LogError as error:
                if not error.retryable:
                    raise
                _log.warning("append_delayed", subject=self.subject, reason=str(error))
                await self._clock.sleep(RETRY_S)

    def _seal(self, events: Sequence[Event]) -> Sealed:
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
            previous=self._previous,
        )
        message = seal(batch)
        self._previous = message.digest
        return message

    async def first_entries(self, *events: Event) -> list[Entry]:
        """The first messages of this incarnation, for an atomic append together with those of other subjects.

        The caller appends them, with `stored`, before `run` is started.
        """
        await self._find_place()
        packed = pack(events, ATOMIC_MESSAGES_MAX) or [()]
        return [Entry(self.subject, self._seal(part)) for part in packed]


def pack(events: Iterable[Event], messages_max: int) -> list[Sequence[Event]]:
    """The first of these events as contents of at most `messages_max` messages."""
    packed: list[Sequence[Event]] = []
    part: list[Event] = []
    size = 0
    for event in events:
        event_size = size_of(event)
        if part and (size + event_size > BATCH_BYTES_MAX or len(part) >= BATCH_EVENTS_MAX):
            packed.append(part)
            part, size = [], 0
            if len(packed) == messages_max:
                return packed
        part.append(event)
        size += event_size
    if part:
        packed.append(part)
    return packed


async def stored(
    attempt: Callable[[], Any], clock: Clock, subject: str, pending: Callable[[], int] = lambda: 0
) -> int:
    """Retry until it is stored; returns the position. Raises `WriterFenced`, `LogRefused` or `StreamMissing`."""
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
                raise WriterFenced(f"{subject}: this incarnation ended, epoch {epoch} writes now")
            case Unknown(reason=reason):
                _log.warning("append_retried", subject=subject, reason=reason, pending=pending())
                await clock.sleep(pause_s)
