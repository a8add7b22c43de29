"""Who holds which block of the slab, and since when: the leases of one owner, as a state machine without memory
or network.

    held ──► offered ──► claimed ──► free, by the reader's word that its reading is over
     │          │           └──────► quarantined ──► free: nobody saw the reading end
     │          └──► free, expired or withdrawn: nobody was ever told to read it
     └──► free, or quarantined after a reading *into* it whose end nobody saw

Time passes only when something is asked: everything that is due happens first, so a buffer is never handed out
by one call while another call would still have called it leased.
"""

import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable
from itertools import count
from typing import Final, Literal

from headwater.engines.transfer.port import Stats
from headwater.engines.transfer.slab import Block, Slab
from headwater.schemas.clock import Clock
from headwater.schemas.transfer import LeaseId, OfferClaim, OfferReleased, Outcome, Refusal

State = Literal["held", "offered", "claimed", "quarantined", "free"]

REMEMBERED: Final = 4096
"""Ended leases whose end is known by name; claims on older ones are refused as unknown."""

SLACK: Final = 64
"""Outdated entries that the queue of due times may hold beyond its own size."""

ENDED_READING: Final[frozenset[Outcome]] = frozenset({"read", "checksum_mismatch", "unused"})
"""Outcomes by which a reader says that no reading of the buffer goes on."""


class Hold:
    """One block in use. `due_s` is when the present state ends by itself; `lease` is empty while there is none."""

    __slots__ = ("block", "due_s", "lease", "reader", "state")

    def __init__(self, block: Block) -> None:
        self.block = block
        self.state: State = "held"
        self.due_s = float("inf")
        self.lease: LeaseId = b""
        self.reader: tuple[str, int] | None = None


class Ledger:
    """All blocks of one slab in one epoch. `new_lease` returns 16 random bytes, never the same twice.

    A claimed buffer waits `claim_s` for its reader's word, then rests `quarantine_s` before anyone gets it.
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
        """A block to write or to read into; it stays held until given on. Raises `SlabFull`."""
        self._sweep()
        hold = Hold(self._slab.allocate(nbytes))
        self._holds[hold.block.offset] = hold
        return hold

    def give_back(self, hold: Hold) -> None:
        """A held block of which it is sure that nothing writes to it any more."""
        self._expect(hold, "held")
        self._free(hold)

    def quarantine(self, hold: Hold) -> None:
        """A held block to which something may still write: free after its quarantine."""
        self._expect(hold, "held")
        self._become(hold, "quarantined", self._quarantine_s)

    def offer(self, hold: Hold, ttl_s: float) -> LeaseId:
        """Lease a held block, now written, to whoever claims it within `ttl_s`."""
        self._sweep()
        self._expect(hold, "held")
        hold.lease = self._new_lease()
        if hold.lease in self._leases or hold.lease in self._ended:
            raise ValueError("the source of lease ids repeats itself")
        self._leases[hold.lease] = hold
        self._become(hold, "offered", ttl_s)
        return hold.lease

    def claim(self, claim: OfferClaim) -> Hold | Refusal:
        """Give the lease to this reader and attempt, once; or why not."""
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
        """The reader of a lease is done. False for everyone but the reader of a lease that is still open."""
        self._sweep()
        hold = self._leases.get(message.lease)
        reader = (message.consumer, message.attempt)
        if hold is None or message.epoch != self._epoch or hold.reader != reader:
            return False
        if message.outcome in ENDED_READING:
            # Also out of quarantine: the reader, if late, has seen the end of its reading.
            self._counts[message.outcome] += 1
            self._free(hold)
        elif hold.state == "claimed":
            self._counts[message.outcome] += 1
            self._become(hold, "quarantined", self._quarantine_s)
        return True

    def withdraw(self, lease: LeaseId) -> None:
        """End a lease for our own reasons. Its reader, if it has one, may be reading: so quarantine."""
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
        """Leases that are being read now."""
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
        """Everything that is due."""
        now = self._clock.monotonic_s()
        while self._due and self._due[0][0] <= now:
            due_s, _, hold = heapq.heappop(self._due)
            if hold.due_s != due_s:
                continue  # it has gone on since
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
            # Most entries are of states that ended before their time.
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
