"""The prefix index: which worker holds which block, on which tier.

A radix tree over blocks. Since a sequence hash names its whole prefix, the tree needs no walk by tokens: each block
is a row that knows its parent, and a prompt's blocks are found by their names. A block whose parent nobody holds
(a gap, an eviction in the middle) has a row but can not be reached from the start of any prompt, so it
is never a hit until the missing part comes back: that is how unknown parents are parked.

Copies are counted per (worker, tier, block): engines announce each physical copy, and a removal takes one.

Memory. Rows are in the slab (`kernels`), a table of 8 bytes a row finds them (`lookup`). A block takes 16 bytes,
8 for each tier and each 64 workers, and 10 to 11.5 in the table, which is filled to 0.8 and grows by 1.15: 34 to 35.5 for up to 64
workers on one tier. The slab's memory is given by the system where it is first used, so its spare half costs none. Slots of
workers that left are given to the next; thousands of workers make rows wide (4,096 workers: 512 bytes
for each tier; stores then run at 1.3 M blocks/s, and a find of 64 blocks takes 12 microseconds).

The bound. The index holds at most `max_blocks` different blocks. A block beyond them is refused: it is not noted, `refused`
counts it, and its worker has fewer known hits until it stores the block again with room there.
What is refused depends on the events alone, so a replay refuses the same. Blocks that are known already are never refused to anybody.
"""

import numpy as np
from numpy.typing import NDArray

from headwater.router import finding, kernels, lookup, packing
from headwater.router.kernels import CHAINS, PAD, PAGE_BITS, TOP
from headwater.schemas.hashing import U64

MAX_BLOCKS = 1 << 26
"""64 Mi blocks: 2.4 GB, and at 16 tokens a block the cache of a thousand million tokens."""

ROWS_MIN = 1 << 10
GROWTH = 1.15
WORD_BITS = 64
LOW = 0xFFFFFFFF

Pages = NDArray[np.uint16]


class PrefixIndex:
    """Blocks of all workers of one pool. Every method is deterministic and none does IO."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        if not 0 < max_blocks < LOW:
            raise ValueError(f"max_blocks is {max_blocks}: 1 to {LOW - 1} can be held")
        self.max_blocks = max_blocks
        self.refused = 0
        self.words = 1
        self.tiers = 1
        self.rows = 0
        self.slots: dict[str, int] = {}
        self.blocks: dict[str, int] = {}
        self.copies: dict[tuple[str, int], dict[int, int]] = {}
        self.desk: U64 = np.zeros(256, np.uint64)
        self.slab: U64 = packing.empty_slab(1, 1, ROWS_MIN)
        self.table: U64 = np.zeros(lookup.capacity_for(ROWS_MIN), np.uint64)
        self.pages: Pages = _pages(WORD_BITS, ROWS_MIN)
        self.used: set[int] = {2}
        self._taken = 0
        self._measure()

    @property
    def capacity(self) -> int:
        """Blocks that fit the slab as it is."""
        return self._capacity

    @property
    def nbytes(self) -> int:
        """Memory in use for the rows ever used at once, their table and what is kept of each worker."""
        top = int(self.desk[TOP])
        pages = len(self.slots) * ((top >> PAGE_BITS) + 1) * self.pages.itemsize
        return 8 * (2 + len(self.used)) * top + self.table.nbytes + pages

    def reserve(self, rows: int) -> None:
        """Make room for `rows` blocks at once, and have the system give the memory, instead of growing to it."""
        if rows > self.capacity:
            self._resize(rows, self.words, self.tiers)
        self._grow_table(rows)
        self.table[:] = self.table
        for column in (0, 1, *self.used):
            self.slab[column] = self.slab[column]

    def add_worker(self, worker: str) -> None:
        """Give a worker its bit. Adding one that is there is fine."""
        if worker in self.slots:
            return
        slot = (~self._taken & (self._taken + 1)).bit_length() - 1
        if slot >= self.words * WORD_BITS:
            self._resize(self.capacity, self.words * 2, self.tiers)
        self.slots[worker] = slot
        self.blocks[worker] = 0
        self._taken |= 1 << slot

    def store(self, worker: str, tier: int, parent: int, hashes: U64) -> None:
        """A chain of blocks behind `parent` is now held by `worker` on `tier`. `hashes`: uint64, shape (n,)."""
        desk = self.desk
        desk[CHAINS] = parent
        desk[CHAINS + 1] = len(hashes)
        self._store(worker, tier, 1, hashes)

    def store_chains(
        self, worker: str, tier: int, parents: U64, lengths: NDArray[np.int64], hashes: U64
    ) -> None:
        """Several chains at once: chain i is the next `lengths[i]` of `hashes`, behind `parents[i]`.

        As many calls of `store` would do the same, but each costs more than the blocks of a short chain.
        """
        end = CHAINS + 2 * len(parents)
        if end > len(self.desk):
            self._enlarge_desk(end)
        self.desk[CHAINS:end:2] = parents
        self.desk[CHAINS + 1 : end : 2] = lengths
        self._store(worker, tier, len(parents), hashes)

    def _store(self, worker: str, tier: int, chains: int, hashes: U64) -> None:
        slot = self.slots[worker]
        count = len(hashes)
        if tier >= self.tiers:
            self._resize(self.capacity, self.words, tier + 1)
        wanted = self.rows + count
        if wanted > self._fits:
            self._make_room(min(wanted, self.max_blocks))
        repeated = CHAINS + 2 * chains
        if repeated + count > len(self.desk):
            self._enlarge_desk(repeated + count)
        column = 2 + tier * self.words + slot // WORD_BITS
        if column not in self.used:
            self.used.add(column)
        added, again, refused, _ = kernels.store(
            self.slab,
            self.table,
            self.pages,
            self.desk,
            slot,
            column,
            self.max_blocks - self.rows,
            chains,
            hashes,
        )
        self.rows += added
        self.blocks[worker] += count - again - refused
        self.refused += refused
        if again:
            copies = self.copies.setdefault((worker, tier), {})
            for block in hashes[self.desk[repeated : repeated + again]].tolist():
                copies[block] = copies.get(block, 0) + 1

    def remove(self, worker: str, tier: int, hashes: U64) -> int:
        """One copy of each block left `tier` of `worker`. Returns how many it was not known to hold."""
        if tier >= self.tiers:
            return len(hashes)
        copies = self.copies.get((worker, tier))
        if copies:
            hashes = self._take_copies(worker, tier, copies, hashes)
        slot = self.slots[worker]
        column = 2 + tier * self.words + slot // WORD_BITS
        dropped, absent, _ = kernels.remove(
            self.slab, self.table, self.pages, self.desk, slot, column, hashes
        )
        self.rows -= dropped
        self.blocks[worker] -= len(hashes) - absent
        return int(absent)

    def clear(self, worker: str) -> None:
        """All blocks of `worker` are gone, on all tiers. Takes time by the blocks that it has, not by the index."""
        if self.blocks[worker]:
            slot, blocks = self.slots[worker], self.blocks[worker]
            dropped, _ = kernels.remove_worker(
                self.slab, self.table, self.pages, self.desk, self.words, slot, blocks
            )
            self.rows -= dropped
        self.blocks[worker] = 0
        for key in [key for key in self.copies if key[0] == worker]:
            del self.copies[key]

    def drop_worker(self, worker: str) -> None:
        """Forget a worker and its blocks. Dropping an unknown one is fine."""
        if worker in self.slots:
            self.clear(worker)
            self._taken &= ~(1 << self.slots[worker])
            del self.slots[worker], self.blocks[worker]

    def find(self, hashes: U64) -> tuple[int, U64]:
        """How many leading blocks each worker holds.

        Returns the deepest depth and a uint64 array of shape (2, slots): row 0 on GPU, row 1 on any tier,
        indexed by `slots[worker]`. The array is reused by the next call.
        """
        return finding.find(self.slab, self.table, self.words, hashes), self._depths

    def path(self, deepest: int, longest: int) -> U64 | None:
        """The hashes from the start of a prompt to block `deepest`, at most `longest` of them.

        None if the index does not hold block `deepest`, or the chain is longer.
        """
        out: U64 = np.zeros(longest, np.uint64)
        length = finding.path(self.slab, self.table, deepest >> 32, deepest & LOW, out)
        return out[longest - length :] if length > 0 else None

    def digest(self) -> int:
        """A number for the content, the same however the index came to hold it."""
        return int(finding.digest(self.slab, self.words, int(self.desk[TOP])))

    def packed(self) -> packing.Arrays:
        """All rows as a snapshot's arrays: `packing.pack`."""
        slab = packing.Slab(self.slab, self.pages, self.desk, self.used)
        return packing.pack(slab, self.words, self.rows)

    def adopt(self, arrays: packing.Arrays, rows: int, words: int, tiers: int) -> None:
        """Take over the rows that a snapshot brings, of any release; slots and block counts are set by then.

        Raises ValueError or LookupError where they do not fit each other.
        """
        if "keys" in arrays:
            slab, table = packing.unpack(arrays, words, tiers, rows)
        else:
            slab, table = packing.from_rows(
                arrays["table" if "table" in arrays else "rows"], words, tiers, rows
            )
        if any(int(slab.pages[slot].sum()) != self.blocks[name] for name, slot in self.slots.items()):
            raise ValueError("workers hold other numbers of blocks than the rows say")
        self.slab, self.pages, self.desk[:CHAINS], self.used = (
            slab.slab,
            slab.pages,
            slab.desk[:CHAINS],
            slab.used,
        )
        self.table, self.rows, self.words, self.tiers = table, rows, words, tiers
        self._taken = sum(1 << slot for slot in self.slots.values())
        self._measure()

    def _take_copies(self, worker: str, tier: int, copies: dict[int, int], hashes: U64) -> U64:
        """Use up extra copies; returns the blocks of which the last copy goes."""
        left: list[int] = []
        for block in hashes.tolist():
            extra = copies.get(block, 0)
            if extra > 1:
                copies[block] = extra - 1
            elif extra == 1:
                del copies[block]
            else:
                left.append(block)
        if not copies:
            del self.copies[worker, tier]
        return np.array(left, np.uint64)

    def _make_room(self, rows: int) -> None:
        if rows > self.capacity:
            self._resize(max(rows, min(2 * self.capacity, self.max_blocks)), self.words, self.tiers)
        self._grow_table(rows)

    def _grow_table(self, rows: int) -> None:
        if rows > lookup.FILL_MAX * len(self.table):
            table: U64 = np.zeros(max(lookup.capacity_for(rows), int(GROWTH * len(self.table))), np.uint64)
            lookup.regrow(self.table, table)
            self.table = table
        self._measure()

    def _resize(self, capacity: int, words: int, tiers: int) -> None:
        """Another slab. Only what was used of the old one is copied, so only that much memory is taken."""
        top = int(self.desk[TOP])
        slab = packing.empty_slab(words, tiers, capacity)
        slab[:2, :top] = self.slab[:2, :top]
        used: set[int] = set()
        for column in self.used:
            tier, word = divmod(column - 2, self.words)
            used.add(2 + tier * words + word)
            slab[2 + tier * words + word, :top] = self.slab[column, :top]
        pages = _pages(WORD_BITS * words, capacity)
        shown = (top >> PAGE_BITS) + 1
        pages[: len(self.pages), :shown] = self.pages[:, :shown]
        self.slab, self.pages, self.used, self.words, self.tiers = slab, pages, used, words, tiers
        self._measure()

    def _enlarge_desk(self, size: int) -> None:
        desk: U64 = np.zeros(2 * size, np.uint64)
        desk[: len(self.desk)] = self.desk
        self.desk = desk

    def _measure(self) -> None:
        """What follows from the forms of the arrays."""
        size = finding.state_size(self.words)
        slots = WORD_BITS * self.words
        self._capacity = int(self.slab.shape[1]) - PAD - size
        self._fits = min(self._capacity, int(lookup.FILL_MAX * len(self.table)))
        first = int(self.slab.shape[1]) - size + 2 * self.words
        self._depths: U64 = self.slab[0, first : first + 2 * slots].reshape(2, slots)


def _pages(slots: int, capacity: int) -> Pages:
    return np.zeros((slots, (capacity >> PAGE_BITS) + 1), np.uint16)
