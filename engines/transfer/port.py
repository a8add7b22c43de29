"""The `TensorTransfer` port (offer a tensor, read one, the errors of both), and checksums.

`NixlTransfer` moves bytes between processes and machines, `LocalTransfer` within one process and under injected
faults; one contract suite (tests/contract/transfer/test_transfer.py) runs over both.

The checksum, XXH3-64, reads 15 GB/s where a transfer moves 8; zlib's crc32, with 2.3, would take three times as long as the transfer itself. It
detects accidents, not forgery.
"""

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, ClassVar, Final, Literal, NamedTuple, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from headwater.engines.engine import EngineError
from headwater.schemas.messages.transfer import ClaimReply, DType, LeaseId, Offer, OfferClaim, OfferReleased

Remedy = Literal["offer", "elsewhere", "later"]


class TransferError(EngineError):
    """Base of the errors of transfers.

    `remedy` says what can help: a new `offer` of the same owner, `elsewhere` (another owner, or computing the tensor
    locally), or the same call `later`.
    """

    remedy: ClassVar[Remedy] = "offer"


class TransferUnavailable(TransferError):
    """This transport is not available here; the message says what to install or change."""

    remedy = "elsewhere"


class SlabFull(TransferError):
    """The slab is full. Raised at once, without waiting or evicting leased blocks."""

    remedy = "later"


class OfferExpired(TransferError):
    """The offer expired, or its owner withdrew it."""


class OfferConsumed(TransferError):
    """The offer was claimed before: each has one reader and one attempt."""


class OfferVoid(TransferError):
    """The lease is unknown to the owner: it is of an earlier epoch of the owner, or was never granted."""


class ChecksumMismatch(TransferError):
    """The bytes read differ from those offered: the buffer was overwritten, or memory is faulty."""


class ReadTimedOut(TransferError):
    """The bytes were not read within the time that the owner granted."""


class TransferFailed(TransferError):
    """The transport rejected or aborted the read, without an indication that the owner ended."""


class PeerGone(TransferError):
    """The owner's process has ended, or is shutting down."""

    remedy = "elsewhere"


class TransferClosed(TransferError):
    """This side is closed."""

    remedy = "elsewhere"


class Control(Protocol):
    """A reader's channel to the owner of an offer, implemented over the bus; see `TensorTransfer.read`."""

    async def claim(self, offer: Offer, claim: OfferClaim) -> ClaimReply:
        """Deliver `claim` to the owner's `answer` and return the reply. Raises `PeerGone` without a reply."""
        ...

    async def release(self, offer: Offer, released: OfferReleased) -> None:
        """Deliver `released` to the owner's `released`. It may get lost: then the owner's timeouts apply."""
        ...


class Stats(NamedTuple):
    """Bytes of the slab by state, and ended leases by outcome since the start.

    `held` is being written by this side or read into; `capacity` is the sum of the other four and `held`.
    """

    capacity: int
    free: int
    held: int
    offered: int
    claimed: int
    quarantined: int
    ended: dict[str, int]


class TensorTransfer(Protocol):
    """One slab of registered memory, its offers, and reads into it. Used from one event loop only."""

    async def offer(self, array: Any, *, ttl_s: float, dtype: DType | None = None) -> Offer:
        """Copy `array` into the slab and lease it to the first reader that claims it within `ttl_s`.

        A numpy array, or a torch tensor where the slab is one. `dtype` gives the element type where the array
        cannot (bfloat16 as the uint16 of its bits). Raises `SlabFull`, `TransferClosed`; ValueError for an
        array that is empty or of another type.
        """
        ...

    def answer(self, claim: OfferClaim) -> ClaimReply:
        """Owner: grant or reject a claim on an offer. A repeated claim is rejected."""
        ...

    def released(self, message: OfferReleased) -> bool:
        """Owner: a reader finished. False, without effect, for messages of others than the lease's reader."""
        ...

    def withdraw(self, lease: LeaseId) -> None:
        """Owner: withdraw an offer. If it is claimed its memory is quarantined; unknown leases are ignored."""
        ...

    async def read(self, offer: Offer, control: Control, *, attempt: int = 1) -> Any:
        """Claim, read and verify an offer; returns a copy: numpy, or torch where the slab is a tensor.

        The block to read into is allocated before the claim, so a full slab consumes no offer. The owner is notified
        of every end. bfloat16 is returned as uint16 where the slab is host memory. Raises `SlabFull`, `OfferExpired`,
        `OfferConsumed`, `OfferVoid`, `PeerGone`, `ReadTimedOut`, `ChecksumMismatch`, `TransferFailed`,
        `TransferClosed`, and errors of `control.claim`. After none of them may the same offer be claimed again.
        """
        ...

    def borrow(self, offer: Offer, control: Control, *, attempt: int = 1) -> AbstractAsyncContextManager[Any]:
        """Read like `read`, without the copy: the array is in the slab, and must not be used after the block.

        Faster for large tensors, whose copy costs more than their transfer; for callers that copy them at once, for
        example to a GPU.
        """
        ...

    def stats(self) -> Stats:
        """Current use of the slab."""
        ...

    async def close(self, *, drain_s: float = 0.0) -> None:
        """Reject new claims, wait up to `drain_s` for readers, then end. Idempotent."""
        ...


OpenTransfer = Callable[[], Awaitable[TensorTransfer]]
"""Makes this process's slab. Raises `TransferUnavailable`."""


# XXH3-64, and a copy that computes it.

Bytes = NDArray[np.uint8]

PIECE: Final = 1 << 20
"""Bytes copied before they are hashed: they are then still in the core's cache, so memory is read once."""


def checksum(data: Bytes) -> int:
    """XXH3-64 of contiguous bytes. Does not hold the GIL."""
    return xxhash.xxh3_64_intdigest(data.data)


def copy_checked(into: Bytes, source: Bytes) -> int:
    """Copy `source` to `into` (contiguous, of one size); returns the checksum of what `into` has then.

    Of the copy, not of the source, which others may change.
    """
    state = xxhash.xxh3_64()
    for at in range(0, source.nbytes, PIECE):
        piece = into[at : at + PIECE]
        np.copyto(piece, source[at : at + PIECE])
        state.update(piece.data)
    return state.intdigest()
