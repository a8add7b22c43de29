"""The common part of all `TensorTransfer` implementations: leases, claims, checksums, and buffers after each kind of end.

An implementation adds the read of bytes from another slab into a block of this one.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final, TypeVar

import structlog

from headwater.engines.transfer.ledger import ENDED_READING, Hold, TransferLedger
from headwater.engines.transfer.memory import Form, Memory, form_of
from headwater.engines.transfer.port import (
    ChecksumMismatch,
    Control,
    OfferConsumed,
    OfferExpired,
    OfferVoid,
    PeerGone,
    ReadTimedOut,
    Stats,
    TransferClosed,
    TransferError,
    TransferFailed,
)
from headwater.engines.transfer.slab import Slab
from headwater.schemas.clock import Clock
from headwater.schemas.messages.transfer import (
    ClaimGranted,
    ClaimRefused,
    ClaimReply,
    DType,
    LeaseId,
    Offer,
    OfferClaim,
    OfferReleased,
    Outcome,
    Place,
    Refusal,
)

T = TypeVar("T")
Take = Callable[[int, Offer], tuple[Any, int]]

CLAIM_S: Final = 20.0
"""How long a reader has from its claim; vLLM gives an encoder's cache as much."""

QUARANTINE_S: Final = 60.0
"""Quarantine of a buffer whose read did not end observably; a started DMA cannot be cancelled."""

REPORT_S: Final = 1.0
"""How long a reader tries to report its end, before it relies on the owner's timeouts."""

DRAIN_POLL_S: Final = 0.02

AT_ONCE: Final = 64 * 1024
"""Up to so many bytes are copied on the event loop, which is cheaper than a thread."""

REFUSED: Final[dict[Refusal, tuple[type[TransferError], str]]] = {
    "unknown": (OfferVoid, "has no such lease"),
    "stale_epoch": (OfferVoid, "is in another epoch"),
    "expired": (OfferExpired, "has expired the offer"),
    "consumed": (OfferConsumed, "granted the offer to a reader before"),
    "closing": (PeerGone, "is shutting down"),
}

_log = structlog.get_logger("headwater.transfer")


class SlabTransfer(ABC):
    """See `headwater.engines.transfer.port.Transfer`. `owner` and `epoch` are those of the actor that it serves."""

    def __init__(
        self,
        owner: str,
        epoch: int,
        memory: Memory,
        clock: Clock,
        new_lease: Callable[[], bytes],
        *,
        claim_s: float = CLAIM_S,
        quarantine_s: float = QUARANTINE_S,
    ) -> None:
        self.owner = owner
        self.epoch = epoch
        self._memory = memory
        self._clock = clock
        times = {"claim_s": claim_s, "quarantine_s": quarantine_s}
        self._ledger = TransferLedger(Slab(memory.nbytes), epoch, clock, new_lease, **times)

    async def offer(self, array: Any, *, ttl_s: float, dtype: DType | None = None) -> Offer:
        """See `Transfer.offer`."""
        self._check_open()
        form = form_of(array, dtype)
        hold = self._ledger.take(form.nbytes)
        try:
            checksum = await self._copy(form.nbytes, partial(self._memory.put, hold.block.offset, array))
            self._check_open()
        except BaseException:
            self._ledger.give_back(hold)
            raise
        lease = self._ledger.offer(hold, ttl_s)
        expires_ns = self._clock.wall_ns() + round(ttl_s * 1e9)
        place = self._place(hold.block.offset)
        return Offer(
            lease, self.owner, self.epoch, form.dtype, form.shape, form.nbytes, checksum, expires_ns, place
        )

    def answer(self, claim: OfferClaim) -> ClaimReply:
        """See `Transfer.answer`."""
        hold = self._ledger.claim(claim)
        if not isinstance(hold, Hold):
            return ClaimRefused(claim.lease, hold)
        self._expect_reader(self._ledger.claim_s)
        metadata = self._metadata if claim.needs_metadata else b""
        return ClaimGranted(claim.lease, int(self._ledger.claim_s * 1000), metadata)

    def released(self, message: OfferReleased) -> bool:
        """See `Transfer.released`."""
        known = self._ledger.release(message)
        if known and not self._ledger.claimed():
            self._expect_reader(0.0)
        return known

    def withdraw(self, lease: LeaseId) -> None:
        """See `Transfer.withdraw`."""
        self._ledger.withdraw(lease)

    async def read(self, offer: Offer, control: Control, *, attempt: int = 1) -> Any:
        """See `Transfer.read`."""
        hold, array = await self._receive(offer, control, attempt, self._memory.get)
        self._ledger.give_back(hold)
        return array

    @asynccontextmanager
    async def borrow(self, offer: Offer, control: Control, *, attempt: int = 1) -> AsyncIterator[Any]:
        """See `Transfer.borrow`."""
        hold, array = await self._receive(offer, control, attempt, self._memory.lend)
        try:
            yield array
        finally:
            self._ledger.give_back(hold)

    async def _receive(self, offer: Offer, control: Control, attempt: int, take: Take) -> tuple[Hold, Any]:
        """Claim, read and verify; returns the block, still held, and the result of `take`."""
        self._check_open()
        if offer.nbytes != Form(offer.dtype, offer.shape).nbytes:
            raise TransferFailed(
                f"the offer is inconsistent: {offer.shape} of {offer.dtype}, {offer.nbytes} B"
            )
        asked_s = self._clock.monotonic_s()
        known = self._knows(offer.place)
        hold = self._ledger.take(offer.nbytes)
        # What is reported to the owner if this ends here; None where it granted nothing.
        outcome: Outcome | None = "unused"
        try:
            claim = OfferClaim(offer.lease, offer.epoch, self.owner, attempt, needs_metadata=not known)
            reply = await control.claim(offer, claim)
            if isinstance(reply, ClaimRefused):
                outcome = None
                error, why = REFUSED[reply.reason]
                raise error(f"{offer.owner} {why}")
            # Counted from before the claim was sent, so it expires here before it expires at the owner.
            until_s = asked_s + reply.read_within_ms / 1000
            if not known:
                await self._meet(offer.place, reply.metadata)
            within_s = until_s - self._clock.monotonic_s()
            if within_s <= 0:
                raise ReadTimedOut(
                    f"the claim took longer than the {reply.read_within_ms} ms that it granted"
                )
            outcome = "failed"
            try:
                await self._fetch(offer, hold.block.offset, within_s)
            except ReadTimedOut:
                outcome = "timed_out"
                raise
            outcome = "read"
            array, seen = await self._copy(offer.nbytes, partial(take, hold.block.offset, offer))
            if seen != offer.checksum:
                outcome = "checksum_mismatch"
                raise ChecksumMismatch(f"{offer.nbytes} bytes of {offer.owner} changed before they were read")
        except BaseException:
            if outcome is None or outcome in ENDED_READING:
                self._ledger.give_back(hold)
            else:
                self._ledger.quarantine(hold)
            if outcome is not None:
                await self._report_end(offer, control, attempt, outcome)
            raise
        try:
            await self._report_end(offer, control, attempt, outcome)
        except BaseException:
            self._ledger.give_back(hold)
            raise
        return hold, array

    def stats(self) -> Stats:
        """See `Transfer.stats`."""
        return self._ledger.stats()

    async def close(self, *, drain_s: float = 0.0) -> None:
        """See `Transfer.close`."""
        self._ledger.closing = True
        until_s = self._clock.monotonic_s() + drain_s
        while self._ledger.claimed() and self._clock.monotonic_s() < until_s:
            await self._clock.sleep(DRAIN_POLL_S)
        await self._end()

    async def _report_end(self, offer: Offer, control: Control, attempt: int, outcome: Outcome) -> None:
        message = OfferReleased(offer.lease, offer.epoch, self.owner, attempt, outcome)
        try:
            async with asyncio.timeout(REPORT_S):
                await control.release(offer, message)
        except Exception as error:
            # The read has its own result; the owner frees its buffer by its timeouts.
            _log.warning("read_outcome_not_sent", owner=offer.owner, outcome=outcome, error=error)

    def _check_open(self) -> None:
        if self._ledger.closing:
            raise TransferClosed(f"the transfer of {self.owner} is closed")

    _metadata = b""
    """Metadata that a reader needs once to reach this slab."""

    def _expect_reader(self, within_s: float) -> None:  # noqa: B027 (a transport may not care)
        """A reader is expected within this time; zero: none is."""

    @abstractmethod
    def _place(self, offset: int) -> Place:
        """The address of this offset of the slab for other processes."""

    @abstractmethod
    def _knows(self, place: Place) -> bool:
        """Can it be reached without metadata? Raises `TransferFailed` for a place of another transport."""

    @abstractmethod
    async def _meet(self, place: Place, metadata: bytes) -> None:
        """Register the place. Raises `PeerGone`, `TransferFailed`."""

    @abstractmethod
    async def _fetch(self, offer: Offer, offset: int, within_s: float) -> None:
        """Read the offer's bytes into `offset` of the slab. Raises `PeerGone`, `ReadTimedOut`, `TransferFailed`."""

    @abstractmethod
    async def _copy(self, nbytes: int, work: Callable[[], T]) -> T:
        """Run a copy of `nbytes` between slab and array; returns only when it has ended, cancelled or not."""

    @abstractmethod
    async def _end(self) -> None:
        """Close the transport. Idempotent."""


async def run_copy(nbytes: int, work: Callable[[], T]) -> T:
    """Run a copy of `nbytes`, a long one in a thread. Returns only when it has ended, cancelled or not."""
    if nbytes <= AT_ONCE:
        return work()
    running = asyncio.get_running_loop().run_in_executor(None, work)
    cancelled: asyncio.CancelledError | None = None
    while not running.done():
        try:
            await asyncio.wait([running])
        except asyncio.CancelledError as error:
            # A thread cannot be stopped, and its block must not be reused before it ends: a matter of milliseconds.
            cancelled = error
    if cancelled:
        raise cancelled
    return running.result()
