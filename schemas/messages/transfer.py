"""Offers of tensors from one actor to another, and the messages of the two sides about them. Core NATS.

The bytes themselves are not in the messages: `Offer.place` says where they are, and the transfer reads them from
there. Only the owner of an offer grants its reading, and grants it once.
"""

from typing import Annotated, Literal

import msgspec

LEASE_BYTES = 16
DIGEST_BYTES = 16

LeaseId = Annotated[bytes, msgspec.Meta(min_length=LEASE_BYTES, max_length=LEASE_BYTES)]
"""128 random bits: only a reader that received the offer can claim it."""

Digest = Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
Count = Annotated[int, msgspec.Meta(ge=0)]

DType = Literal[
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
]
"""Types of elements, by the names that numpy and torch share (numpy has no bfloat16)."""

MemoryKind = Literal["DRAM", "VRAM"]
Refusal = Literal["unknown", "expired", "consumed", "stale_epoch", "closing"]
Outcome = Literal["read", "checksum_mismatch", "unused", "timed_out", "failed"]


class NixlPlace(msgspec.Struct, frozen=True, array_like=True, tag="nixl"):
    """Bytes in memory that a NIXL agent registered.

    `agent` names one incarnation of one process and is never reused; `metadata` is the digest of what a reader needs
    to connect to it. `address` is in that process, `device` the GPU's index (0 for DRAM).
    """

    agent: str
    metadata: Digest
    memory: MemoryKind
    device: Count
    address: Count


class LocalPlace(msgspec.Struct, frozen=True, array_like=True, tag="local"):
    """Bytes in memory of the same process: `offset` in the slab that `agent` registered."""

    agent: str
    offset: Count


class SharedPlace(msgspec.Struct, frozen=True, array_like=True, tag="shared"):
    """Bytes in memory that processes of one machine share: `offset` in the slab behind descriptor `fd` of process `pid`.

    `agent` is the name of that memory, and never reused.
    """

    agent: str
    pid: Count
    fd: Count
    offset: Count


Place = NixlPlace | LocalPlace | SharedPlace


class Offer(msgspec.Struct, frozen=True, array_like=True, tag="offer"):
    """A tensor that one reader may fetch. `checksum` is XXH3-64 of its `nbytes` bytes, in C order.

    `expires_ns` is the owner's wall clock, for information: only the owner decides whether an offer has expired. A
    lease of an earlier epoch of the owner is void.
    """

    lease: LeaseId
    owner: str
    epoch: int
    dtype: DType
    shape: tuple[Count, ...]
    nbytes: Count
    checksum: Count
    expires_ns: int
    place: Place


class OfferClaim(msgspec.Struct, frozen=True, array_like=True, tag="claim"):
    """A reader claims its one reading. `needs_metadata`: it has not connected to the owner's agent before."""

    lease: LeaseId
    epoch: int
    consumer: str
    attempt: int
    needs_metadata: bool = False


class ClaimGranted(msgspec.Struct, frozen=True, array_like=True, tag="granted"):
    """The bytes stay unchanged for `read_within_ms` from now. `metadata` is empty unless the claim needs it."""

    lease: LeaseId
    read_within_ms: Count
    metadata: bytes = b""


class ClaimRefused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """The lease cannot be read, and a repeated claim will not succeed: a new offer may."""

    lease: LeaseId
    reason: Refusal


ClaimReply = ClaimGranted | ClaimRefused


class OfferReleased(msgspec.Struct, frozen=True, array_like=True, tag="released"):
    """The reader is done. After `timed_out` and `failed` its reading may still be in progress."""

    lease: LeaseId
    epoch: int
    consumer: str
    attempt: int
    outcome: Outcome
