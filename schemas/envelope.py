"""What every appended message starts with: who wrote it, in which life, in which order, and after which message.

The messages of one subject form a chain: each names the digest of the one before it and ends with its own. So a
reader knows of every message whether it is as it was written (its own digest), and whether the one it has before
it is the one that was there when it was written.
"""

from hashlib import blake2b
from typing import Annotated, Final, Generic, NamedTuple, TypeVar

import msgspec

EventT = TypeVar("EventT")

SCHEMA_ID: Final = "headwater"
"""Names this family of event schemas; a log written in another one is not guessed at."""

SCHEMA_VERSION: Final = 2
"""Version of the event schemas written by this release. 1 had no chain."""

DIGEST_BYTES: Final = 8
NO_DIGEST: Final = bytes(DIGEST_BYTES)
"""Stands where there is no message before, and in a batch that was not sealed yet."""

Digest = Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]


class Batch(msgspec.Struct, Generic[EventT], frozen=True, array_like=True):
    """One log message: the events of one writer, in the order they happened.

    `epoch` is the revision of the writer's lease, so a higher epoch is a later life; `seq` counts that
    life's batches on this subject from 1 and names the batch for retries; `wall_ns` is data and never
    decides anything in a fold. `trace` is the W3C trace id that all events of the batch belong to, empty
    where they belong to several. `previous` is the digest of the subject's message before this one, `digest`
    its own: BLAKE2b over all bytes before it, last in the message.
    """

    version: int
    writer: str
    epoch: int
    seq: int
    wall_ns: int
    events: tuple[EventT, ...]
    schema: str = SCHEMA_ID
    trace: str = ""
    previous: Digest = NO_DIGEST
    digest: Digest = NO_DIGEST


class Sealed(NamedTuple):
    """A batch as it goes into the log: its identity, and its bytes with the digest at their end."""

    writer: str
    epoch: int
    seq: int
    data: bytes

    @property
    def digest(self) -> bytes:
        """What the next message of the subject names as the one before it."""
        return self.data[-DIGEST_BYTES:]


def digest_of(data: bytes | bytearray) -> bytes:
    """The digest that a message with these bytes must end with."""
    return blake2b(memoryview(data)[:-DIGEST_BYTES], digest_size=DIGEST_BYTES).digest()


class Event(msgspec.Struct, frozen=True, array_like=True):
    """Base of every event. Concrete events set a tag, which is for ever."""
