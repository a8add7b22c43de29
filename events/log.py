"""The `Log` port: one stream, appended under a fence and read by position.

Two ways to append, chosen by what is written. `append` is atomic: all messages or none, in the place where their
subjects stood, for facts that must not be there twice or out of turn (who is in the fleet, how a request ended).
`ingest` streams messages of one subject without waiting for each, for what there is much of (KV blocks, load); a
prefix may be stored when it fails, and trying again goes on behind it.

Held to one contract suite over JetStream and memory (tests/contract/test_log.py).
"""

from collections.abc import AsyncIterator
from typing import Final, NamedTuple, Protocol

from headwater.events.retention import Retention
from headwater.schemas.envelope import NO_DIGEST, Batch, Sealed
from headwater.schemas.pool import LogEvent

ATOMIC_MESSAGES_MAX: Final = 1_000
"""Messages of one `append`: the server's own bound."""


class Stored(NamedTuple):
    """Everything is in the log, the last message at `position`; `again` if an earlier try had put it there."""

    position: int
    again: bool = False


class Fenced(NamedTuple):
    """A later life of this writer (`epoch`) has written to the subject: nothing was appended."""

    epoch: int


class Unknown(NamedTuple):
    """The deadline passed without an answer. All or a part may be stored; the same call again is safe."""

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


class Newest(NamedTuple):
    """The newest message of a subject: where it is, whose it is, and its digest."""

    position: int
    writer: str
    epoch: int
    seq: int
    digest: bytes


NOTHING: Final = Newest(0, "", 0, 0, NO_DIGEST)
"""`Newest` of a subject without messages."""


class Entry(NamedTuple):
    """A message and the subject it belongs to."""

    subject: str
    message: Sealed


class Bounds(NamedTuple):
    """First and last position held. `last` is first - 1 for an empty log."""

    first: int
    last: int


class Log(Protocol):
    """One ordered stream of batches. Positions start at 1 and only rise."""

    async def append(self, *entries: Entry, deadline_s: float = 5.0) -> AppendResult:
        """Append these messages together or not at all, at most once per (subject, writer, epoch, seq).

        At most `ATOMIC_MESSAGES_MAX`; messages of one subject in the order of their seq. Appends that touch
        the same subject are taken one at a time in call order. Raises `LogRefused` when the server rejects a
        message for good (too large), `LogFull` when there is no room, never for a lost fence.
        """
        ...

    async def ingest(
        self, subject: str, *messages: Sealed, fence: str, deadline_s: float = 5.0
    ) -> AppendResult:
        """Append messages of one writer's life to its subject, in order and without holes.

        `fence` is another subject of the same writer, written by `append` at the start of each life: a
        message is taken only while no later life has written there. At most `ATOMIC_MESSAGES_MAX` messages. Raises
        as `append` does.
        """
        ...

    async def newest(self, subject: str) -> Newest:
        """The newest message of a subject, `NOTHING` where there is none. Raises `LogUnavailable`."""
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

    async def identity(self) -> str:
        """Which log this is: one that was deleted and made anew under the same name has another identity."""
        ...

    async def retention(self, after: int) -> Retention:
        """What the log holds and may hold, with the age of the first message behind position `after`.

        `next_age_s` is by the clock of whoever keeps the log, and 0.0 when nothing is behind `after`.
        """
        ...
