"""A writer of one subject: takes events without waiting, appends them in packed batches, one at a time.

Whoever has an event calls `offer` and goes on; the log never holds up a token. `run` packs what came within
a few milliseconds into one message and appends it until it is stored, with the same batch each time.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

import structlog

from headwater.events.errors import LogError, LogRefused
from headwater.events.log import Fenced, Log, Stored, Unknown
from headwater.schemas.clock import Clock
from headwater.schemas.envelope import SCHEMA_VERSION, Batch, Event

DELAY_S = 0.002
BATCH_EVENTS_MAX = 512
BATCH_BYTES_MAX = 256 * 1024
PENDING_EVENTS_MAX = 200_000
EVENT_BYTES = 64
"""Assumed size of an event without its packed hashes; only bounds the size of a batch."""

_log = structlog.get_logger("headwater.writer")


class WriterFenced(Exception):
    """A later life of this writer took over: this one must stop writing."""


class Writer:
    """Appends the events of one (subject, writer, epoch) in order.

    At most `PENDING_EVENTS_MAX` events wait; past that `offer` refuses, and counts what it refused in
    `refused`: the owner then declares a gap once the log is back.
    """

    def __init__(
        self,
        log: Log,
        subject: str,
        writer: str,
        epoch: int,
        clock: Clock,
        *,
        on_stored: Callable[[int, tuple[Event, ...]], None] | None = None,
    ) -> None:
        self._log = log
        self._subject = subject
        self._writer = writer
        self._epoch = epoch
        self._clock = clock
        self._on_stored = on_stored
        self._pending: deque[tuple[Event, int]] = deque()
        self._seq = 0
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self.refused = 0
        self.position = 0

    def offer(self, event: Event, size: int = EVENT_BYTES) -> bool:
        """Queue an event of about `size` bytes. False if the queue is full and it was not taken."""
        if len(self._pending) >= PENDING_EVENTS_MAX:
            self.refused += 1
            return False
        self._pending.append((event, size))
        self._wake.set()
        self._idle.clear()
        return True

    @property
    def pending(self) -> int:
        """Events that are not known to be stored."""
        return len(self._pending)

    async def flush(self) -> None:
        """Wait until everything offered so far is stored. `run` must be running."""
        await self._idle.wait()

    async def run(self) -> None:
        """Append for ever. Raises `WriterFenced` when a later life of this writer has written."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            await self._clock.sleep(DELAY_S)
            while self._pending:
                await self._append(self._pack())
            self._idle.set()

    async def append_now(self, *events: Event) -> int:
        """Append these events by themselves, at once, and return their position.

        For facts whose order against other subjects matters, before `run` is started.
        """
        self._pending.extend((event, EVENT_BYTES) for event in events)
        while self._pending:
            await self._append(self._pack())
        self._idle.set()
        return self.position

    def _pack(self) -> tuple[Event, ...]:
        packed: list[Event] = []
        size = 0
        for event, event_size in self._pending:
            if packed and (size + event_size > BATCH_BYTES_MAX or len(packed) >= BATCH_EVENTS_MAX):
                break
            packed.append(event)
            size += event_size
        return tuple(packed)

    async def _append(self, events: tuple[Event, ...]) -> None:
        self._seq += 1
        batch: Batch[Any] = Batch(
            SCHEMA_VERSION, self._writer, self._epoch, self._seq, self._clock.wall_ns(), events
        )
        while True:
            try:
                result = await self._log.append(self._subject, batch)
            except LogRefused:
                raise
            except LogError as error:
                result = Unknown(str(error))
            match result:
                case Stored(position=position):
                    break
                case Fenced(epoch=epoch):
                    raise WriterFenced(
                        f"{self._subject}: epoch {self._epoch} of {self._writer} is over, {epoch} writes now"
                    )
                case Unknown(reason=reason):
                    _log.warning(
                        "append_retried", subject=self._subject, reason=reason, pending=len(self._pending)
                    )
                    await self._clock.sleep(0.5)
        self.position = position
        for _ in events:
            self._pending.popleft()
        if self._on_stored is not None:
            self._on_stored(position, events)
