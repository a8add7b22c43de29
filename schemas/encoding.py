"""The codec of the log's messages, and its events as one type.

The messages of one subject form a hash chain: each contains the digest of the previous one and ends with its own. A reader
verifies that a message was not altered (its own digest), and that the message before it is the one that preceded it when
it was written.

Fields of an event are only appended, with defaults. Any other change is a new tag: the old struct moves here under its old
tag, with a function that converts it to its replacement, so that readers handle only current events. A struct stays here
as long as logs may contain it.

A reader of the release before finds fields that it does not know, which it ignores, and tags that it does not know: those events
become `UnknownEvent`, and the others of their message are read. So release N may write events that release N-1 does not have, while
both run. What such an event means is then missing from a fold of N-1, which counts it, and says so; `STATE_VERSION` in
`router.state` keeps N from taking that fold for its own.
"""

from collections.abc import Callable
from hashlib import blake2b
from typing import Annotated, Any, Final, Generic, NamedTuple, TypeVar, Union, get_args

import msgspec

from headwater.schemas.events import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    EnginesWeighted,
    Event,
    KvGap,
    LoadReported,
    RequestAccepted,
    RequestCheckpoint,
    RequestEnded,
    RequestEvent,
    RequestsHeld,
    TrafficSplit,
    UnknownEvent,
    WorkerChanged,
    WorkerControlled,
    WorkerDraining,
    WorkerJoined,
    WorkerLeft,
)
from headwater.schemas.hashing import unpack_hashes
from headwater.schemas.routing import Decision, DecisionVoided, Shadowed

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

    `epoch` is the revision of the writer's lease, so a higher epoch is a later incarnation; `seq` counts that incarnation's
    batches on this subject from 1 and identifies the batch in retries; `wall_ns` is data, which no fold compares. `trace` is not
    written any more: each request has its own in the event of its acceptance. `previous` is the digest of the
    subject's message before this one, `digest` its own: BLAKE2b over all bytes before it, last in the message.
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


# Retired events, which are no longer written, and their conversion to their replacements.

Upcasters = dict[type[Event], Callable[[Any], Event]]

UPCASTERS: Upcasters = {}
"""Each retired event's conversion, to the event that replaced it or to a retired one between them."""


# Messages.

PoolEvent = (
    BlocksStored
    | BlocksRemoved
    | BlocksCleared
    | KvGap
    | LoadReported
    | RequestsHeld
    | Decision
    | DecisionVoided
    | Shadowed
    | WorkerJoined
    | WorkerChanged
    | WorkerControlled
    | WorkerDraining
    | WorkerLeft
    | EnginesWeighted
    | TrafficSplit
)
LogEvent = PoolEvent | RequestEvent

EVENT_BYTES: Final = 64
NAME_BYTES: Final = 40
"""Assumed bytes of an event without its variable-size fields, and of a request's name."""

NO_HASH: Final = bytes(8)

_encoder = msgspec.msgpack.Encoder()


class UnreadableBatch(ValueError):
    """Bytes in the log that are not a batch, were altered, or come from a newer release."""


def digest_of(data: bytes | bytearray) -> bytes:
    """The digest with which a message of these bytes must end."""
    return blake2b(memoryview(data)[:-DIGEST_BYTES], digest_size=DIGEST_BYTES).digest()


def encode_batch(batch: Batch[Any]) -> bytes:
    """Bytes of one log message, with its computed digest in place of `batch.digest`."""
    data = bytearray()
    _encoder.encode_into(batch, data)
    data[-DIGEST_BYTES:] = digest_of(data)
    return bytes(data)


def seal(batch: Batch[Any]) -> Sealed:
    """The batch in the form that is appended."""
    return Sealed(batch.writer, batch.epoch, batch.seq, encode_batch(batch))


def reader_of(upcasters: Upcasters) -> Callable[[bytes], Batch[LogEvent]]:
    """`decode_batch` with a table of retired events: these are converted to their replacements."""
    kinds: Any = Union[(LogEvent, *upcasters)]
    decoder = msgspec.msgpack.Decoder(Batch[kinds])
    events = msgspec.msgpack.Decoder(kinds)
    tags = frozenset(str(kind.__struct_config__.tag) for kind in get_args(kinds))

    def current(event: Event) -> Any:
        while type(event) in upcasters:
            event = upcasters[type(event)](event)
        return event

    def decode(data: bytes) -> Batch[LogEvent]:
        """Decode a log message of any release so far. Raises `UnreadableBatch` with the reason."""
        try:
            batch = decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            later = _read_later(data, events, tags)
            if later is None:
                raise UnreadableBatch(f"not a batch of events: {error}") from error
            batch = later
        if batch.version > SCHEMA_VERSION:
            raise UnreadableBatch(
                f"written by a newer release (schema {batch.version}, this one reads up to {SCHEMA_VERSION})"
            )
        if batch.version < 1 or batch.digest != digest_of(data):
            raise UnreadableBatch("it was altered: its bytes do not match its digest")
        if batch.schema != SCHEMA_ID:
            raise UnreadableBatch(f"written in schema {batch.schema!r}, this release reads {SCHEMA_ID!r}")
        if upcasters and any(type(event) in upcasters for event in batch.events):
            batch = msgspec.structs.replace(batch, events=tuple(current(event) for event in batch.events))
        decoded: Batch[Any] = batch
        for event in decoded.events:
            check = _CHECKS.get(type(event))
            if check is not None:
                check(event)
        return decoded

    return decode


_raw = msgspec.msgpack.Decoder(Batch[msgspec.Raw])
_anything = msgspec.msgpack.Decoder()


def _read_later(data: bytes, decoder: Any, tags: frozenset[str]) -> Batch[Any] | None:
    """A batch of a later release, with `UnknownEvent` for events without one of the `tags`; None if it is none."""
    events: list[Event] = []
    unknown = False
    try:
        batch = _raw.decode(data)
        for raw in batch.events:
            fields = _anything.decode(raw)
            if not (isinstance(fields, list) and fields and isinstance(fields[0], str)):
                return None
            unknown |= fields[0] not in tags
            events.append(decoder.decode(raw) if fields[0] in tags else UnknownEvent(fields[0]))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return msgspec.structs.replace(batch, events=tuple(events)) if unknown else None


decode_batch = reader_of(UPCASTERS)


def _check_hashes(event: BlocksStored | BlocksRemoved) -> None:
    if len(event.hashes) % 8:
        raise UnreadableBatch(f"{len(event.hashes)} bytes are not packed hashes: not a multiple of 8")
    # Searching is far cheaper than comparing each; a match may span the end of one hash and the start of the next.
    if NO_HASH in event.hashes and not unpack_hashes(event.hashes).all():
        raise UnreadableBatch("a block hash is 0, which names no block")


def _check_decision(event: Decision) -> None:
    worker = event.worker
    for candidate in event.candidates:
        if candidate.worker == worker:
            return
    raise UnreadableBatch(f"a decision for {worker}, which is not one of its candidates")


_CHECKS: Final[dict[type[Event], Callable[[Any], None]]] = {
    BlocksStored: _check_hashes,
    BlocksRemoved: _check_hashes,
    Decision: _check_decision,
}
"""Checks of what types cannot express, so that folds may rely on it. They raise `UnreadableBatch`."""


def size_of(event: Event) -> int:
    """Approximate encoded size of an event in bytes, to bound the size of messages."""
    match event:
        case BlocksStored(hashes=hashes) | BlocksRemoved(hashes=hashes):
            return EVENT_BYTES + len(hashes)
        case LoadReported():
            names = len(event.accepted) + len(event.prefilled) + len(event.finished)
            return EVENT_BYTES + NAME_BYTES * names
        case RequestsHeld(requests=requests):
            return EVENT_BYTES + NAME_BYTES * len(requests)
        case Decision(candidates=candidates):
            return 4 * EVENT_BYTES + EVENT_BYTES * len(candidates)
        case RequestAccepted(body=body):
            return EVENT_BYTES + len(body)
        case WorkerControlled(arguments=arguments, detail=detail):
            return EVENT_BYTES + len(arguments) + len(detail)
        case WorkerChanged(loras=loras):
            return EVENT_BYTES + NAME_BYTES * len(loras)
        case EnginesWeighted(weights=weights):
            return EVENT_BYTES + NAME_BYTES * len(weights)
        case TrafficSplit(shares=shares, reason=reason):
            return 4 * EVENT_BYTES + NAME_BYTES * len(shares) + len(reason)
        case RequestCheckpoint(tokens=tokens):
            return EVENT_BYTES + len(tokens)
        case RequestEnded(answers=answers):
            return EVENT_BYTES + sum(map(len, answers))
        case _:
            return EVENT_BYTES
