"""The ports of storage: an append-only log and a store of blobs, with their errors.

There are two ways to append. `append` is atomic and fenced by the expected last sequence of each subject: all messages
are stored or none. It is for facts that must be recorded exactly once and in order: membership, decisions, request
lifecycle. `ingest` streams messages of one subject without waiting for each acknowledgement, for frequent events (KV
blocks, load). When it fails a prefix may be stored, and a retry continues after that prefix.

One contract suite runs over JetStream and memory (tests/contract/log/test_log.py).

    LogError
    ├── LogUnavailable   retryable: the server did not answer in time, or has no leader
    │   └── LogFull      retryable once an operator freed space: the store's limit or the disk is reached
    ├── LogRefused       not retryable: the server rejected the request; the message contains its reason
    │   └── AccessDenied not retryable: authentication failed, or the client lacks a permission
    └── StreamMissing    not retryable: the stream was deleted or never created

Losing a fence is not an error: `Log.append` returns `Fenced`.
"""

import hashlib
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple, Protocol

from headwater.schemas.encoding import NO_DIGEST, Batch, LogEvent, Sealed, UnreadableBatch, decode_batch

ATOMIC_MESSAGES_MAX: Final = 1_000
"""Messages of one `append`: the server's own bound."""


def check_count(action: str, count: int) -> None:
    """Raises `ValueError` for too few or too many messages of one call."""
    if not 1 <= count <= ATOMIC_MESSAGES_MAX:
        raise ValueError(f"{action} accepts 1 to {ATOMIC_MESSAGES_MAX} messages, got {count}")


class Stored(NamedTuple):
    """All messages are stored, the last at `position`; `again` if an earlier attempt had stored them."""

    position: int
    again: bool = False


class Fenced(NamedTuple):
    """A later incarnation of this writer (`epoch`) has written to the subject: nothing was appended."""

    epoch: int


class Unknown(NamedTuple):
    """The deadline passed without an answer. All, some or none may be stored; repeating the call is safe."""

    reason: str


AppendResult = Stored | Fenced | Unknown


class Record(NamedTuple):
    """One log message. `stored_ns` is the server's clock when it was stored."""

    position: int
    subject: str
    stored_ns: int
    batch: Batch[LogEvent]


class StoredMessage(NamedTuple):
    """One log message as it is stored: `data` is an encoded batch, or was meant to be one."""

    position: int
    subject: str
    stored_ns: int
    data: bytes


class Gap(NamedTuple):
    """Positions `first` to `last` are no longer readable: purged, or the stream was replaced."""

    first: int
    last: int
    reason: str


class Unreadable(NamedTuple):
    """A message that does not decode as a batch. It is skipped, counted and reported."""

    position: int
    subject: str
    reason: str


class Slice(NamedTuple):
    """Records delivered together, in log order; a gap precedes the records.

    `lag` counts the messages in the stream after the last record; 0 means caught up.
    """

    records: list[Record]
    lag: int
    gap: Gap | None = None
    unreadable: tuple[Unreadable, ...] = ()

    @classmethod
    def decode(
        cls, messages: Iterable[tuple[int, str, int, bytes]], lag: int, gap: Gap | None = None
    ) -> "Slice":
        """The slice of some messages, with the fields of `StoredMessage`: each becomes a record, or is unreadable."""
        records: list[Record] = []
        unreadable: list[Unreadable] = []
        for position, subject, stored_ns, data in messages:
            try:
                records.append(Record(position, subject, stored_ns, decode_batch(data)))
            except UnreadableBatch as error:
                unreadable.append(Unreadable(position, subject, str(error)))
        return cls(records, lag, gap, tuple(unreadable))

    def events(self) -> Iterator[tuple[Record, Any]]:
        """Each event with its record."""
        for record in self.records:
            for event in record.batch.events:
                yield record, event


class Newest(NamedTuple):
    """The newest message of a subject: its position, writer and digest."""

    position: int
    writer: str
    epoch: int
    seq: int
    digest: bytes

    @classmethod
    def of(cls, position: int, message: Sealed) -> "Newest":
        """Return it for a message that is stored at this position."""
        return cls(position, message.writer, message.epoch, message.seq, message.digest)

    def has(self, message: Sealed) -> bool:
        """Is the message stored on this subject, too?"""
        return (self.writer, self.epoch) == (message.writer, message.epoch) and self.seq >= message.seq


NOTHING: Final = Newest(0, "", 0, 0, NO_DIGEST)
"""`Newest` of a subject without messages."""


class Entry(NamedTuple):
    """A message and its subject."""

    subject: str
    message: Sealed


class Bounds(NamedTuple):
    """First and last stored position. `last` is first - 1 for an empty log."""

    first: int
    last: int


class Retention(NamedTuple):
    """Contents and limits of a log; 0 is no limit. `next_age_s`: see `Log.retention`."""

    first: int
    last: int
    bytes: int
    max_bytes: int
    max_messages: int
    max_age_s: float
    next_age_s: float


class Log(Protocol):
    """One ordered stream of batches. Positions start at 1 and only rise."""

    async def append(self, *entries: Entry, deadline_s: float = 5.0) -> AppendResult:
        """Append these messages together or not at all, at most once per (subject, writer, epoch, seq).

        At most `ATOMIC_MESSAGES_MAX`; messages of one subject in the order of their seq. Appends to the same
        subject are serialised in call order. Raises `LogRefused` when the server rejects a message permanently
        (too large), `LogFull` when the store is full; a lost fence is a result, not an error.
        """
        ...

    async def ingest(
        self, subject: str, *messages: Sealed, fence: str, deadline_s: float = 5.0
    ) -> AppendResult:
        """Append messages of one incarnation of a writer to its subject, in order and without gaps.

        `fence` is another subject of the same writer, written by `append` at the start of each incarnation: a
        message is accepted only while no later incarnation has written there. At most `ATOMIC_MESSAGES_MAX`
        messages. Raises as `append` does.
        """
        ...

    async def newest(self, subject: str) -> Newest:
        """The newest message of a subject, `NOTHING` where there is none. Raises `LogUnavailable`."""
        ...

    def read(self, after: int, *, follow: bool) -> AsyncIterator[Slice]:
        """Yield everything after position `after` in order.

        Ends at the position that was last when reading began; with `follow`, never. When the server is lost,
        reading resumes from the last position; a slice without records means that the reader is caught up.
        """
        ...

    def scan(self, after: int, until: int, subjects: Sequence[str] = ()) -> AsyncIterator[Slice]:
        """Yield what lies after position `after`, up to `until`, of some subjects (with wildcards; empty: of all), in order.

        The others are not transferred, so positions that are missing are not reported as gaps. Ends at `until` or at the
        position that was last when the call was made. `lag` counts later messages, perhaps with those of other subjects.
        """
        ...

    def scan_raw(
        self, after: int, until: int, subjects: Sequence[str] = ()
    ) -> AsyncIterator[list[StoredMessage]]:
        """The messages of a `scan` as they are stored, without decoding them."""
        ...

    async def position_at(self, wall_ns: int) -> int:
        """The last position that was stored at this time or before, by the server's clock; the one before the first message if all are later."""
        ...

    async def bounds(self) -> Bounds:
        """First and last position."""
        ...

    async def identity(self) -> str:
        """Identity of this log: one that was deleted and re-created under the same name has another."""
        ...

    async def retention(self, after: int) -> Retention:
        """Contents and limits of the log, with the age of the first message after position `after`.

        `next_age_s` is by the clock of the log's server, and 0.0 when there is no message after `after`.
        """
        ...


# The `Blobs` port: named objects too large for a message, such as snapshots and tokenizer files.


class Blobs(Protocol):
    """Named byte strings. An object becomes visible whole or not at all, and is verified on read."""

    async def put(self, name: str, data: bytes | memoryview) -> str:
        """Store or replace an object. Returns the SHA-256 of its bytes, in hex."""
        ...

    async def get(self, name: str) -> bytes | None:
        """The object's bytes, None where it is absent. Raises `LogRefused` if its digest is wrong."""
        ...

    async def read_into(self, name: str, into: memoryview, digest: str) -> bool:
        """Read an object into a buffer: no copy is made, and its bytes are hashed once.

        `into`: bytes, writable, as long as the object. False where the object is absent. Raises `LogRefused`
        if size or SHA-256 (hex) are not as expected; the content of `into` is then undefined.
        """
        ...

    async def has(self, name: str) -> bool:
        """Is there such an object? Its bytes are neither read nor verified."""
        ...

    async def names(self, prefix: str) -> list[str]:
        """Names that start with `prefix`, sorted."""
        ...

    async def delete(self, name: str) -> None:
        """Remove an object; removing an absent one is fine."""
        ...


def sha256(data: bytes | memoryview) -> str:
    """Digest in hex. hashlib releases the GIL, so large data is hashed in a thread."""
    return hashlib.sha256(data).hexdigest()


def wrong_bytes(name: str) -> str:
    """The error message for an object whose bytes are not those that were written, with the fix."""
    return f"object {name}: its bytes do not match its digest; delete it, and it is written again"


# Errors of the log, by what the caller can do about them.


class LogError(Exception):
    """Base. `retryable`: the same call may succeed later."""

    retryable = False


class LogUnavailable(LogError):
    """No answer in time, no leader, or no connection."""

    retryable = True


class LogFull(LogUnavailable):
    """The store is full. Nothing was stored; the message names the limit."""


class LogRefused(LogError):
    """The server answered with an error. `code` is NATS's err_code."""

    def __init__(self, message: str, code: int = 0) -> None:
        super().__init__(message)
        self.code = code


class AccessDenied(LogRefused):
    """The server rejects this client, or what it requested; the message names the setting and the fix."""


class StreamMissing(LogError):
    """The stream does not exist."""
