"""The envelope of every appended message: writer, epoch, sequence number, and the digest of the previous message.

The messages of one subject form a hash chain: each contains the digest of the previous one and ends with its own. A reader
verifies that a message was not altered (its own digest), and that the message before it is the one that preceded it when
it was written.
"""

from typing import Annotated, Final, Generic, NamedTuple, TypeVar

import msgspec

EventT = TypeVar("EventT")

SCHEMA_ID: Final = "headwater"
"""Identifies this family of event schemas; a log of another one is rejected."""

SCHEMA_VERSION: Final = 1
"""Version of the event schemas written by this release."""

DIGEST_BYTES: Final = 8
NO_DIGEST: Final = bytes(DIGEST_BYTES)
"""Digest before the first message, and in a batch that was not sealed yet."""

Digest = Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]


class Batch(msgspec.Struct, Generic[EventT], frozen=True, array_like=True):
    """One log message: the events of one writer, in the order they happened.

    `epoch` is the revision of the writer's lease, so a higher epoch is a later incarnation; `seq` counts that
    incarnation's batches on this subject from 1 and identifies the batch in retries; `wall_ns` is data, which no fold
    compares. `trace` is the W3C trace id that all events of the batch belong to, empty where they belong to several. `previous` is the digest of the subject's message before this one, `digest`
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
    """An encoded batch: its identity, and its bytes, which end with the digest."""

    writer: str
    epoch: int
    seq: int
    data: bytes

    @property
    def digest(self) -> bytes:
        """The digest that the subject's next message has as `previous`."""
        return self.data[-DIGEST_BYTES:]
