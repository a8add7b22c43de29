"""The leases of one owner on blocks of its slab, as a state machine without memory or network.

    held ──► offered ──► claimed ──► free, when the reader reports the end of its read
     │          │           └──────► quarantined ──► free: the end of the read was not observed
     │          └──► free, expired or withdrawn: no reader was admitted
     └──► free, or quarantined after a read *into* it whose end was not observed

Every call first applies all timeouts that are due, so all calls agree on which blocks are leased.
"""

import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable
from itertools import count
from typing import Final, Literal

from headwater.engines.transfer.port import Stats
from headwater.engines.transfer.slab import Block, Slab
from headwater.schemas.clock import Clock
from headwater.schemas.messages.transfer import LeaseId, OfferClaim, OfferReleased, Outcome, Refusal

State = Literal["held", "offered", "claimed", "quarantined", "free"]

REMEMBERED: Final = 4096
"""Bound on ended leases whose outcome is recorded; claims on older ones are rejected as unknown."""

SLACK: Final = 64
"""Outdated entries that the queue of due times may contain beyond its own size."""

ENDED_READING: Final[frozenset[Outcome]] = frozenset({"read", "checksum_mismatch", "unused"})
"""Outcomes by which a reader reports that its read of the buffer ended."""


class Hold:
    """One block in use. `due_s` is when its state times out; `lease` is empty without a lease."""

    __slots__ = ("block", "due_s", "lease", "reader", "state")

    def __init__(self, block: Block) -> None:
        self.block = block
        self.state: State = "held"
        self.due_s = float("inf")
        self.lease: LeaseId = b""
        self.reader: tuple[str, int] | None = None


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
