"""The `Log` port: one stream, appended under a fence and read by position.

Held to one contract suite over JetStream and memory (tests/contract/test_log.py).
"""

from collections.abc import AsyncIterator
from typing import Any, NamedTuple, Protocol

from headwater.events.retention import Retention
from headwater.schemas.envelope import Batch
from headwater.schemas.pool import LogEvent


class Stored(NamedTuple):
    """The batch is in the log at `position`; `again` if an earlier try had already put it there."""

    position: int
    again: bool = False


class Fenced(NamedTuple):
    """A later life of this writer (`epoch`) has written to the subject: nothing was appended."""

    epoch: int


class Unknown(NamedTuple):
    """The deadline passed without an answer. The batch may be stored; appending it again is safe."""

    reason: str


AppendResult = Stored | Fenced | Unknown


class Record(NamedTuple):
    """One log message. `stored_ns` is the server's clock when it was stored."""

    position: int
    subject: str
    stored_ns: int
    batch: Batch[LogEvent]


class Gap(NamedTuple):
    """Positions `first` to `last` can not be read any more: purged, or the stream was replaced."""

    first: int
    last: int
    reason: str


class Unreadable(NamedTuple):
    """A message that is no batch of ours. It is skipped, counted and named, never guessed at."""

    position: int
    subject: str
    reason: str


class Slice(NamedTuple):
    """What one wake-up of a reader brings, in log order; a gap comes before the records.

    `lag` counts the messages that were in the stream behind the last record; 0 means caught up.
    """

    records: list[Record]
    lag: int
    gap: Gap | None = None
    unreadable: tuple[Unreadable, ...] = ()


class Bounds(NamedTuple):
    """First and last position held. `last` is first - 1 for an empty log."""

    first: int
    last: int


class Log(Protocol):
    """One ordered stream of batches. Positions start at 1 and only rise."""

    async def append(self, subject: str, batch: Batch[Any], *, deadline_s: float = 5.0) -> AppendResult:
        """Append one batch, at most once per (subject, writer, epoch, seq).

        Appends of one subject are taken one at a time in call order. Raises `LogRefused` when the server
        rejects the message for good (too large, no space), never for a lost fence.
        """
        ...

    def read(self, after: int, *, follow: bool) -> AsyncIterator[Slice]:
        """Yield everything behind position `after` in order.

        Ends at the position that was last when reading began, or with `follow` never. Survives the loss
        of the server by reading on from the last position; a slice without records says that the reader
        is caught up.
        """
        ...

    async def bounds(self) -> Bounds:
        """First and last position."""
        ...

    async def retention(self, after: int) -> Retention:
        """What the log holds and may hold, with the age of the first message behind position `after`.

        `next_age_s` is by the clock of whoever keeps the log, and 0.0 when nothing is behind `after`.
        """
        ...
