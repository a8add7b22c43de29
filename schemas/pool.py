"""The log's events as one type, and the codec of its messages."""

from typing import Any, Final

import msgspec

from headwater.schemas.envelope import (
    DIGEST_BYTES,
    NO_DIGEST,
    SCHEMA_ID,
    SCHEMA_VERSION,
    Batch,
    Event,
    Sealed,
    digest_of,
)
from headwater.schemas.fleet import (
    WorkerChanged,
    WorkerControlled,
    WorkerDraining,
    WorkerJoined,
    WorkerLeft,
)
from headwater.schemas.hashing import unpack_hashes
from headwater.schemas.kv import BlocksCleared, BlocksRemoved, BlocksStored, KvGap
from headwater.schemas.load import LoadReported, RequestsHeld
from headwater.schemas.request import RequestAccepted, RequestCheckpoint, RequestEnded, RequestEvent
from headwater.schemas.route import Decision, DecisionVoided, Shadowed
from headwater.schemas.upcast import UPCASTERS, RetiredEvent

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
)
LogEvent = PoolEvent | RequestEvent

EVENT_BYTES: Final = 64
NAME_BYTES: Final = 40
"""Assumed sizes of an event without what it carries, and of a request's name."""

NO_HASH: Final = bytes(8)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Batch[LogEvent | RetiredEvent])


class UnreadableBatch(ValueError):
    """Bytes in the log that are no batch of ours, were altered, or come from a newer release."""


def encode_batch(batch: Batch[Any]) -> bytes:
    """Bytes of one log message, with the digest that `batch.digest` gives way to."""
    data = bytearray()
    _encoder.encode_into(batch, data)
    data[-DIGEST_BYTES:] = digest_of(data)
    return bytes(data)


def seal(batch: Batch[Any]) -> Sealed:
    """The batch as it is appended."""
    return Sealed(batch.writer, batch.epoch, batch.seq, encode_batch(batch))


def decode_batch(data: bytes) -> Batch[LogEvent]:
    """Read one log message of any release so far; retired events come as what replaced them.

    Raises `UnreadableBatch` saying what is wrong with it.
    """
    try:
        batch = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UnreadableBatch(f"not a batch of events: {error}") from error
    if batch.version == SCHEMA_VERSION:
        if batch.digest != digest_of(data):
            raise UnreadableBatch("it was altered: its bytes do not match the digest it ends with")
    elif batch.version > SCHEMA_VERSION:
        raise UnreadableBatch(
            f"written by a newer release (schema {batch.version}, this one reads up to {SCHEMA_VERSION})"
        )
    elif batch.version < 1 or batch.digest != NO_DIGEST:
        raise UnreadableBatch(f"it was altered: schema version {batch.version} has no digest")
    if batch.schema != SCHEMA_ID:
        raise UnreadableBatch(f"written in schema {batch.schema!r}, this release reads {SCHEMA_ID!r}")
    if any(type(event) in UPCASTERS for event in batch.events):
        batch = msgspec.structs.replace(batch, events=tuple(_replaced(event) for event in batch.events))
    current: Batch[Any] = batch
    for event in current.events:
        _check(event)
    return current


def _replaced(event: Event) -> Any:
    """What a retired event became, over as many releases as it takes."""
    while type(event) in UPCASTERS:
        event = UPCASTERS[type(event)](event)
    return event


def _check(event: LogEvent) -> None:
    """What types do not say, so that folding never meets it. Raises `UnreadableBatch`."""
    match event:
        case BlocksStored(hashes=hashes) | BlocksRemoved(hashes=hashes):
            if len(hashes) % 8:
                raise UnreadableBatch(f"{len(hashes)} bytes are no packed hashes: not a multiple of 8")
            # Searching is far cheaper than looking at each; what it finds may be the end of one and the start of another.
            if NO_HASH in hashes and not unpack_hashes(hashes).all():
                raise UnreadableBatch("a block hash is 0, which names no block")
        case Decision(worker=worker, candidates=candidates):
            if all(candidate.worker != worker for candidate in candidates):
                raise UnreadableBatch(f"a decision for {worker}, which is none of its candidates")
        case _:
            pass


def size_of(event: Event) -> int:
    """About how many bytes an event takes in a message; bounds the size of messages, no more."""
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
        case RequestCheckpoint(tokens=tokens):
            return EVENT_BYTES + len(tokens)
        case RequestEnded(answers=answers):
            return EVENT_BYTES + sum(map(len, answers))
        case _:
            return EVENT_BYTES
