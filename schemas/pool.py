"""The pool log's events as one type, and its codec."""

from typing import Any

import msgspec

from headwater.schemas.envelope import SCHEMA_VERSION, Batch
from headwater.schemas.fleet import WorkerDraining, WorkerJoined, WorkerLeft
from headwater.schemas.kv import BlocksCleared, BlocksRemoved, BlocksStored, KvGap
from headwater.schemas.load import LoadReported
from headwater.schemas.request import RequestEvent
from headwater.schemas.route import Decision

PoolEvent = (
    BlocksStored
    | BlocksRemoved
    | BlocksCleared
    | KvGap
    | LoadReported
    | Decision
    | WorkerJoined
    | WorkerDraining
    | WorkerLeft
)
LogEvent = PoolEvent | RequestEvent

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Batch[LogEvent])


class UnreadableBatch(ValueError):
    """Bytes in the log that are no batch of ours, or one from a newer release."""


def encode_batch(batch: Batch[Any]) -> bytes:
    """Bytes of one log message."""
    return _encoder.encode(batch)


def decode_batch(data: bytes) -> Batch[LogEvent]:
    """Read one log message. Raises `UnreadableBatch` saying what is wrong with it."""
    try:
        batch = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UnreadableBatch(f"not a batch of events: {error}") from error
    if batch.version > SCHEMA_VERSION:
        raise UnreadableBatch(
            f"written by a newer release (schema {batch.version}, this one reads up to {SCHEMA_VERSION})"
        )
    for event in batch.events:
        _check(event)
    return batch


def _check(event: LogEvent) -> None:
    """What types do not say, so that folding never meets it. Raises `UnreadableBatch`."""
    match event:
        case BlocksStored(hashes=hashes) | BlocksRemoved(hashes=hashes):
            if len(hashes) % 8:
                raise UnreadableBatch(f"{len(hashes)} bytes are no packed hashes: not a multiple of 8")
            if any(not any(hashes[at : at + 8]) for at in range(0, len(hashes), 8)):
                raise UnreadableBatch("a block hash is 0, which names no block")
        case Decision(worker=worker, candidates=candidates):
            if all(candidate.worker != worker for candidate in candidates):
                raise UnreadableBatch(f"a decision for {worker}, which is none of its candidates")
        case _:
            pass
