"""The `Transfer` port: offer a tensor, read one, and what can go wrong with either.

`NixlTransfer` moves bytes between processes and machines, `LocalTransfer` within one process and under injected
faults; one contract suite (tests/contract/test_transfer.py) runs over both.
"""

from contextlib import AbstractAsyncContextManager
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

from headwater.engines.engine import EngineError
from headwater.schemas.transfer import ClaimReply, DType, LeaseId, Offer, OfferClaim, OfferReleased

Remedy = Literal["offer", "elsewhere", "later"]


class TransferError(EngineError):
    """Base of what transfers raise.

    `remedy` says what can help: a new `offer` of the same owner, going `elsewhere` (another owner, or computing the
    tensor oneself), or the same call `later`.
    """

    remedy: ClassVar[Remedy] = "offer"


class TransferUnavailable(TransferError):
    """Tensors can not be moved this way here; the message says what to install or change."""

    remedy = "elsewhere"


class SlabFull(TransferError):
    """No room in the slab for this tensor. Raised at once: nothing waits, and nothing that is leased is evicted."""

    remedy = "later"


class OfferExpired(TransferError):
    """The offer's time is over, or its owner took it back."""


class OfferConsumed(TransferError):
    """The offer was claimed before: each has one reader and one attempt."""


class OfferVoid(TransferError):
    """The owner does not know the lease: it is of an earlier epoch of the owner, or was never granted."""


class ChecksumMismatch(TransferError):
    """What was read is not what was offered: the buffer was overwritten, or memory is broken."""


class ReadTimedOut(TransferError):
    """The bytes did not come within the time that the owner granted."""


class TransferFailed(TransferError):
    """The transport refused or broke the read without telling that the owner is gone."""


class PeerGone(TransferError):
    """The owner's process is dead, or is about to end."""

    remedy = "elsewhere"


class TransferClosed(TransferError):
    """This side was closed."""

    remedy = "elsewhere"


class Control(Protocol):
    """How a reader talks to the owner of an offer. Written by whoever has a bus; see `Transfer.read`."""

    async def claim(self, offer: Offer, claim: OfferClaim) -> ClaimReply:
        """Bring `claim` to the owner's `answer` and its reply back. Raises `PeerGone` where nobody answers."""
        ...

    async def release(self, offer: Offer, released: OfferReleased) -> None:
        """Bring `released` to the owner's `released`. May get lost: then the owner's time-outs act."""
        ...


class Stats(NamedTuple):
    """Bytes of the slab by what holds them, and how many leases ended in which way since the start.

    `held` is being written by this side or read into; `capacity` is the sum of the other four and `held`.
    """

    capacity: int
    free: int
    held: int
    offered: int
    claimed: int
    quarantined: int
    ended: dict[str, int]


class Transfer(Protocol):
    """One slab of registered memory, its offers, and readings into it. Called from one event loop only."""

    async def offer(self, array: Any, *, ttl_s: float, dtype: DType | None = None) -> Offer:
        """Copy `array` into the slab and lease it to whoever claims it within `ttl_s`.

        A numpy array, or a torch tensor where the slab is one. `dtype` names what the elements are where the array
        can not (bfloat16 as the uint16 of its bits). Raises `SlabFull`, `TransferClosed`; ValueError for an
        array that is empty or of another type.
        """
        ...

    def answer(self, claim: OfferClaim) -> ClaimReply:
        """Owner: grant a claim on an offer of ours, or refuse it. The same claim twice is refused."""
        ...

    def released(self, message: OfferReleased) -> bool:
        """Owner: a reader is done. False, and no effect, for a message of anyone but the lease's reader."""
        ...

    def withdraw(self, lease: LeaseId) -> None:
        """Owner: take an offer back. If it is claimed its memory is quarantined; unknown leases are ignored."""
        ...

    async def read(self, offer: Offer, control: Control, *, attempt: int = 1) -> Any:
        """Claim, fetch and check an offer; returns a copy of our own: numpy, or torch where the slab is a tensor.

        Room to read into is taken before the claim, so a full slab costs no offer. However this ends, the owner
        is told. bfloat16 arrives as uint16 where the slab is host memory. Raises `SlabFull`, `OfferExpired`,
        `OfferConsumed`, `OfferVoid`, `PeerGone`, `ReadTimedOut`, `ChecksumMismatch`, `TransferFailed`,
        `TransferClosed`, and whatever `control.claim` raises. None of them may be answered by claiming again.
        """
        ...

    def borrow(self, offer: Offer, control: Control, *, attempt: int = 1) -> AbstractAsyncContextManager[Any]:
        """As `read`, without the copy: the array lies in the slab, and is not to be used after the block.

        Faster for large tensors, whose copy costs more than their transfer; meant for whoever copies them on at once, to a GPU say.
        """
        ...

    def stats(self) -> Stats:
        """Present use of the slab."""
        ...

    async def close(self, *, drain_s: float = 0.0) -> None:
        """Refuse new claims, wait up to `drain_s` for readers, end. Again is fine."""
        ...
