"""Offers of tensors and reads of them (`TensorTransfer`): leases, claims, checksums, and buffers after each kind of end.

`NixlTransfer` moves the bytes between processes and machines, `SharedTransfer` on one machine, `LocalTransfer` within one process and under
injected faults; one contract suite (tests/contract/transfer/test_transfer.py) runs over them.

The slab's buffer is registered once, because registering costs as much as moving megabytes; its parts are allocated here. No bytes
are accessed: the same allocator serves host and device memory.

    held ──► offered ──► claimed ──► free, when the reader reports the end of its read
     │          │           └──────► quarantined ──► free: the end of the read was not observed
     │          └──► free, expired or withdrawn: no reader was admitted
     └──► free, or quarantined after a read *into* it whose end was not observed

Every call first applies all timeouts that are due, so all calls agree on which blocks are leased.
"""

import asyncio
import heapq
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from itertools import count
from typing import Any, Final, Literal, NamedTuple, TypeVar

import msgspec
import structlog

from headwater.engines.transfer.port import (
    ChecksumMismatch,
    Control,
    Form,
    Memory,
    OfferConsumed,
    OfferExpired,
    OfferVoid,
    PeerGone,
    ReadTimedOut,
    SlabFull,
    Stats,
    TransferClosed,
    TransferError,
    TransferFailed,
    form_of,
)
from headwater.schemas.clock import Clock
from headwater.schemas.media import (
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

ALIGNMENT = 4096
"""A page: page-aligned copies between processes are fastest, and GPUs require 256."""


class Block(NamedTuple):
    """Bytes [offset, offset + nbytes) of the slab; `nbytes` is a multiple of the alignment."""

    offset: int
    nbytes: int


class Slab:
    """Allocates parts of `capacity` bytes (rounded down to the alignment)."""

    def __init__(self, capacity: int, alignment: int = ALIGNMENT) -> None:
        if alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"alignment must be a power of two, got {alignment}")
        self.capacity = capacity // alignment * alignment
        if not self.capacity:
            raise ValueError(f"a slab of {capacity} bytes is too small for an alignment of {alignment}")
        self._alignment = alignment
        # Sorted, disjoint and never adjacent.
        self._free = [Block(0, self.capacity)]
        self._used: set[Block] = set()

    @property
    def free_bytes(self) -> int:
        """Free bytes, in any number of pieces."""
        return sum(block.nbytes for block in self._free)

    @property
    def largest_free(self) -> int:
        """The largest block that `allocate` can return now."""
        return max((block.nbytes for block in self._free), default=0)

    def allocate(self, nbytes: int) -> Block:
        """Allocate at least `nbytes`, in the first sufficient gap. Raises `SlabFull`; ValueError below one byte."""
        if nbytes < 1:
            raise ValueError(f"a block has at least one byte, got {nbytes}")
        needed = -(-nbytes // self._alignment) * self._alignment
        index = next((at for at, gap in enumerate(self._free) if gap.nbytes >= needed), None)
        if index is None:
            raise SlabFull(
                f"no space for {nbytes} bytes: of {self.capacity} {self.free_bytes} are free, "
                f"{self.largest_free} in one piece. Use a larger slab, or shorter leases"
            )
        gap = self._free[index]
        block = Block(gap.offset, needed)
        rest = Block(gap.offset + needed, gap.nbytes - needed)
        self._free[index : index + 1] = [rest] if rest.nbytes else []
        self._used.add(block)
        return block

    def free(self, block: Block) -> None:
        """Free a block. Raises ValueError for one that is not in use."""
        if block not in self._used:
            raise ValueError(f"{block} is not in use")
        self._used.remove(block)
        index = bisect_left(self._free, block)
        start, end = block.offset, block.offset + block.nbytes
        first, last = index, index
        if index and sum(self._free[index - 1]) == start:
            first, start = index - 1, self._free[index - 1].offset
        if index < len(self._free) and self._free[index].offset == end:
            last, end = index + 1, sum(self._free[index])
        self._free[first:last] = [Block(start, end - start)]


# The leases of one owner on blocks of its slab, as a state machine without memory or network.

State = Literal["held", "offered", "claimed", "quarantined", "free"]

REMEMBERED: Final = 4096
"""Bound on ended leases whose outcome is recorded; claims on older ones are rejected as unknown."""

SLACK: Final = 64
"""Outdated entries that the queue of due times may contain beyond its own size."""

ENDED_READING: Final[frozenset[Outcome]] = frozenset({"read", "checksum_mismatch", "unused"})
"""Outcomes by which a reader reports that its read of the buffer ended."""


class Hold(msgspec.Struct, eq=False):
    """One block in use. `due_s` is when its state times out; `lease` is empty without a lease."""

    block: Block
    state: State = "held"
    due_s: float = float("inf")
    lease: LeaseId = b""
    reader: tuple[str, int] | None = None


class TransferLedger:
    """All blocks of one slab in one epoch. `new_lease` returns 16 random bytes, unique.

    A claimed buffer waits `claim_s` for its reader's report, then is quarantined for `quarantine_s`.
    """

    def __init__(
        self,
        slab: Slab,
        epoch: int,
        clock: Clock,
        new_lease: Callable[[], bytes],
        *,
        claim_s: float,
        quarantine_s: float,
    ) -> None:
        self._slab = slab
        self._epoch = epoch
        self._clock = clock
        self._new_lease = new_lease
        self.claim_s = claim_s
        self._quarantine_s = quarantine_s
        self._holds: dict[int, Hold] = {}
        self._leases: dict[LeaseId, Hold] = {}
        self._ended: OrderedDict[LeaseId, Refusal] = OrderedDict()
        self._due: list[tuple[float, int, Hold]] = []
        self._numbers = count()
        self._counts: Counter[str] = Counter()
        self.closing = False

    def take(self, nbytes: int) -> Hold:
        """Allocate a block to write or to read into; it is held until offered or released. Raises `SlabFull`."""
        self._sweep()
        hold = Hold(self._slab.allocate(nbytes))
        self._holds[hold.block.offset] = hold
        return hold

    def give_back(self, hold: Hold) -> None:
        """Free a held block to which certainly nothing writes any more."""
        self._expect(hold, "held")
        self._free(hold)

    def quarantine(self, hold: Hold) -> None:
        """Quarantine a held block to which a read may still write; it is freed afterwards."""
        self._expect(hold, "held")
        self._become(hold, "quarantined", self._quarantine_s)

    def offer(self, hold: Hold, ttl_s: float) -> LeaseId:
        """Lease a held block, now written, to the first reader that claims it within `ttl_s`."""
        self._sweep()
        self._expect(hold, "held")
        hold.lease = self._new_lease()
        if hold.lease in self._leases or hold.lease in self._ended:
            raise ValueError("lease ids are not unique")
        self._leases[hold.lease] = hold
        self._become(hold, "offered", ttl_s)
        return hold.lease

    def claim(self, claim: OfferClaim) -> Hold | Refusal:
        """Grant the lease to this reader and attempt, once; otherwise returns the reason."""
        self._sweep()
        if claim.epoch != self._epoch:
            return "stale_epoch"
        hold = self._leases.get(claim.lease)
        if hold is None:
            return self._ended.get(claim.lease, "unknown")
        if hold.state != "offered":
            return "consumed"
        if self.closing:
            return "closing"
        hold.reader = (claim.consumer, claim.attempt)
        self._become(hold, "claimed", self.claim_s)
        return hold

    def release(self, message: OfferReleased) -> bool:
        """The reader of a lease reports its end. False for other readers, and for leases that have ended."""
        self._sweep()
        hold = self._leases.get(message.lease)
        reader = (message.consumer, message.attempt)
        if hold is None or message.epoch != self._epoch or hold.reader != reader:
            return False
        if message.outcome in ENDED_READING:
            # Also out of quarantine: a late reader has observed the end of its read.
            self._counts[message.outcome] += 1
            self._free(hold)
        elif hold.state == "claimed":
            self._counts[message.outcome] += 1
            self._become(hold, "quarantined", self._quarantine_s)
        return True

    def withdraw(self, lease: LeaseId) -> None:
        """End a lease by the owner. A reader may be reading, so a claimed block is quarantined."""
        self._sweep()
        hold = self._leases.get(lease)
        if hold is None or hold.state == "quarantined":
            return
        self._counts["withdrawn"] += 1
        if hold.state == "offered":
            self._free(hold, "expired")
        else:
            self._become(hold, "quarantined", self._quarantine_s)

    def claimed(self) -> int:
        """Number of leases that are being read."""
        self._sweep()
        return sum(hold.state == "claimed" for hold in self._leases.values())

    def stats(self) -> Stats:
        """Bytes by state, and how leases ended."""
        self._sweep()
        nbytes: Counter[State] = Counter()
        for hold in self._holds.values():
            nbytes[hold.state] += hold.block.nbytes
        states = (nbytes["held"], nbytes["offered"], nbytes["claimed"], nbytes["quarantined"])
        return Stats(self._slab.capacity, self._slab.free_bytes, *states, dict(self._counts))

    def _sweep(self) -> None:
        """Apply all timeouts that are due."""
        now = self._clock.monotonic_s()
        while self._due and self._due[0][0] <= now:
            due_s, _, hold = heapq.heappop(self._due)
            if hold.due_s != due_s:
                continue  # its state has changed since
            if hold.state == "claimed":
                self._counts["unreleased"] += 1
                self._become(hold, "quarantined", self._quarantine_s, since_s=due_s)
            elif hold.state == "offered":
                self._counts["expired"] += 1
                self._free(hold, "expired")
            else:
                self._free(hold)

    def _become(self, hold: Hold, state: State, for_s: float, since_s: float | None = None) -> None:
        hold.state = state
        hold.due_s = (self._clock.monotonic_s() if since_s is None else since_s) + for_s
        if len(self._due) > 2 * len(self._holds) + SLACK:
            # Most entries belong to states that ended before their timeout.
            self._due = [entry for entry in self._due if entry[2].due_s == entry[0]]
            heapq.heapify(self._due)
        heapq.heappush(self._due, (hold.due_s, next(self._numbers), hold))

    def _free(self, hold: Hold, refusal: Refusal = "consumed") -> None:
        if hold.lease:
            del self._leases[hold.lease]
            self._ended[hold.lease] = refusal
            if len(self._ended) > REMEMBERED:
                self._ended.popitem(last=False)
        del self._holds[hold.block.offset]
        self._slab.free(hold.block)
        hold.state = "free"
        hold.due_s = float("inf")

    def _expect(self, hold: Hold, state: State) -> None:
        if hold.state != state:
            raise ValueError(f"the block at {hold.block.offset} is {hold.state}, not {state}")


# The transfer, without the read of bytes.

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
"""Up to this many bytes are copied on the event loop, which is cheaper than a thread."""

REFUSED: Final[dict[Refusal, tuple[type[TransferError], str]]] = {
    "unknown": (OfferVoid, "has no such lease"),
    "stale_epoch": (OfferVoid, "is in another epoch"),
    "expired": (OfferExpired, "has expired the offer"),
    "consumed": (OfferConsumed, "granted the offer to a reader before"),
    "closing": (PeerGone, "is shutting down"),
}

_log = structlog.get_logger("headwater.transfer")


class TensorTransfer(ABC):
    """One slab of registered memory, its offers, and reads into it. Used from one event loop only.

    `owner` and `epoch` are those of the actor that it serves.
    """

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
        """Copy `array` into the slab and lease it to the first reader that claims it within `ttl_s`.

        A numpy array, or a torch tensor where the slab is one. `dtype` gives the element type where the array
        cannot (bfloat16 as the uint16 of its bits). Raises `SlabFull`, `TransferClosed`; ValueError for an
        array that is empty or of another type.
        """
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
        """Owner: grant or reject a claim on an offer. A repeated claim is rejected."""
        hold = self._ledger.claim(claim)
        if not isinstance(hold, Hold):
            return ClaimRefused(claim.lease, hold)
        self._expect_reader(self._ledger.claim_s)
        metadata = self._metadata if claim.needs_metadata else b""
        return ClaimGranted(claim.lease, int(self._ledger.claim_s * 1000), metadata)

    def released(self, message: OfferReleased) -> bool:
        """Owner: a reader finished. False, without effect, for messages of others than the lease's reader."""
        known = self._ledger.release(message)
        if known and not self._ledger.claimed():
            self._expect_reader(0.0)
        return known

    def withdraw(self, lease: LeaseId) -> None:
        """Owner: withdraw an offer. If it is claimed its memory is quarantined; unknown leases are ignored."""
        self._ledger.withdraw(lease)

    async def read(self, offer: Offer, control: Control, *, attempt: int = 1) -> Any:
        """Claim, read and verify an offer; returns a copy: numpy, or torch where the slab is a tensor.

        The block to read into is allocated before the claim, so a full slab consumes no offer. The owner is notified
        of every end. bfloat16 is returned as uint16 where the slab is host memory. Raises `SlabFull`, `OfferExpired`,
        `OfferConsumed`, `OfferVoid`, `PeerGone`, `ReadTimedOut`, `ChecksumMismatch`, `TransferFailed`,
        `TransferClosed`, and errors of `control.claim`. After none of them may the same offer be claimed again.
        """
        hold, array = await self._receive(offer, control, attempt, self._memory.get)
        self._ledger.give_back(hold)
        return array

    @asynccontextmanager
    async def borrow(self, offer: Offer, control: Control, *, attempt: int = 1) -> AsyncIterator[Any]:
        """Read like `read`, without the copy: the array is in the slab, and must not be used after the block.

        Faster for large tensors, whose copy costs more than their transfer; for callers that copy them at once, for
        example to a GPU.
        """
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
        """Current use of the slab."""
        return self._ledger.stats()

    async def close(self, *, drain_s: float = 0.0) -> None:
        """Reject new claims, wait up to `drain_s` for readers, then end. Idempotent."""
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

    async def _copy(self, nbytes: int, work: Callable[[], T]) -> T:
        """Run a copy of `nbytes` between slab and array; returns only when it has ended, cancelled or not."""
        return await run_copy(nbytes, work)

    @abstractmethod
    async def _end(self) -> None:
        """Close the transport. Idempotent."""


OpenTransfer = Callable[[], Awaitable[TensorTransfer]]
"""Makes this process's slab. Raises `TransferUnavailable`."""


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
