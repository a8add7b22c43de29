"""The prefix index: which worker holds which block, on which tier.

A radix tree over blocks. A block hash names its whole prefix, so the tree needs no walk by tokens: each block is a row that
refers to its parent, and a prompt's blocks are found by their hashes. A block whose parent no worker holds (a gap, an eviction in
the middle) has a row but cannot be reached from the start of any prompt, so it is never a hit until the missing part
returns: unknown parents are thus parked.

Copies are counted per (worker, tier, block): engines announce each physical copy, and a removal removes one.

Memory. Rows are in the slab (`update`); a hash table of 8 bytes an entry finds them (`hash_table`). A block takes 16 bytes,
8 for each tier and each 64 workers, and 10 to 11.5 in the table, which is filled up to 0.8 and grows by 1.15: 34 to 35.5 for up to 64
workers on one tier. The system provides the slab's memory on first use, so its spare half costs none. Slots of
workers that left are reused; thousands of workers make rows wide (4,096 workers: 512 bytes for each tier; stores then
run at 1.3 M blocks/s, and a find of 64 blocks takes 12 microseconds).

Bound. The index holds at most `max_blocks` distinct blocks. A block beyond them is refused: it is not stored, `refused`
counts it, and its worker has fewer known hits until it stores the block again while there is room. Which blocks are refused
depends on the events alone, so a replay refuses the same ones. Blocks that are in the index are accepted from every worker.
"""

import numpy as np
from numpy.typing import NDArray

from headwater.router.index import hash_table, match, pack, update
from headwater.router.index.update import CHAINS, PAD, PAGE_BITS, TOP
from headwater.schemas.hashing import U64, as_read_only

MAX_BLOCKS = 1 << 26
"""64 Mi blocks: 2.4 GB; with 16 tokens a block, the cache of 10⁹ tokens."""

ROWS_MIN = 1 << 10
GROWTH = 1.15
WORD_BITS = 64
LOW = 0xFFFFFFFF

Pages = NDArray[np.uint16]


class PrefixIndex:
    """Blocks of all workers of one pool. Methods are deterministic and do no IO."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        if not 0 < max_blocks < LOW:
            raise ValueError(f"max_blocks is {max_blocks}: must be from 1 to {LOW - 1}")
        self.max_blocks = max_blocks
        self.refused = 0
        self.words = 1
        self.tiers = 1
        self.rows = 0
        self.slots: dict[str, int] = {}
        self.slots_version = 0
        self.blocks: dict[str, int] = {}
        self.copies: dict[tuple[str, int], dict[int, int]] = {}
        self.scratch: U64 = np.zeros(256, np.uint64)
        self.slab: U64 = pack.empty_slab(1, 1, ROWS_MIN)
        self.table: U64 = np.zeros(hash_table.capacity_for(ROWS_MIN), np.uint64)
        self.pages: Pages = _pages(WORD_BITS, ROWS_MIN)
        self.used: set[int] = {2}
        self._taken = 0
        self._measure()

    @property
    def capacity(self) -> int:
        """Blocks that fit into the slab at its present size."""
        return self._capacity

    @property
    def nbytes(self) -> int:
        """Bytes in use: rows up to the highest one used, the hash table, and per-worker page counts."""
        top = int(self.scratch[TOP])
        pages = len(self.slots) * ((top >> PAGE_BITS) + 1) * self.pages.itemsize
        return 8 * (2 + len(self.used)) * top + self.table.nbytes + pages

    def reserve(self, rows: int) -> None:
        """Allocate memory for `rows` blocks now, instead of growing step by step."""
        if rows > self.capacity:
            self._resize(rows, self.words, self.tiers)
        self._grow_table(rows)
        self.table[:] = self.table
        for column in (0, 1, *self.used):
            self.slab[column] = self.slab[column]

    def add_worker(self, worker: str) -> None:
        """Give a worker its bit. Idempotent."""
        if worker in self.slots:
            return
        slot = (~self._taken & (self._taken + 1)).bit_length() - 1
        if slot >= self.words * WORD_BITS:
            self._resize(self.capacity, self.words * 2, self.tiers)
        self.slots[worker] = slot
        self.slots_version += 1
        self.blocks[worker] = 0
        self._taken |= 1 << slot

    def store(self, worker: str, tier: int, parent: int, hashes: U64) -> None:
        """`worker` now holds a chain of blocks after `parent` on `tier`. `hashes`: uint64, shape (n,)."""
        scratch = self.scratch
        scratch[CHAINS] = parent
        scratch[CHAINS + 1] = len(hashes)
        self._store(worker, tier, 1, hashes)

    def store_chains(
        self, worker: str, tier: int, parents: U64, lengths: NDArray[np.int64], hashes: U64
    ) -> None:
        """Store several chains: chain i is the next `lengths[i]` of `hashes`, after `parents[i]`.

        Equivalent to a call of `store` for each, whose overhead exceeds the work for a short chain.
        """
        end = CHAINS + 2 * len(parents)
        if end > len(self.scratch):
            self._grow_scratch(end)
        self.scratch[CHAINS:end:2] = parents
        self.scratch[CHAINS + 1 : end : 2] = lengths
        self._store(worker, tier, len(parents), hashes)

    def _store(self, worker: str, tier: int, chains: int, hashes: U64) -> None:
        slot = self.slots[worker]
        count = len(hashes)
        if tier >= self.tiers:
            self._resize(self.capacity, self.words, tier + 1)
        rows_needed = self.rows + count
        if rows_needed > self._fits:
            self._make_room(min(rows_needed, self.max_blocks))
        repeated = CHAINS + 2 * chains
        if repeated + count > len(self.scratch):
            self._grow_scratch(repeated + count)
        column = 2 + tier * self.words + slot // WORD_BITS
        if column not in self.used:
            self.used.add(column)
        added, again, refused, _ = update.store(
            self.slab,
            self.table,
            self.pages,
            self.scratch,
            slot,
            column,
            self.max_blocks - self.rows,
            chains,
            as_read_only(hashes),
        )
        self.rows += added
        self.blocks[worker] += count - again - refused
        self.refused += refused
        if again:
            copies = self.copies.setdefault((worker, tier), {})
            for block in hashes[self.scratch[repeated : repeated + again]].tolist():
                copies[block] = copies.get(block, 0) + 1

    def remove(self, worker: str, tier: int, hashes: U64) -> int:
        """Remove one copy of each block from `tier` of `worker`. Returns how many it was not known to hold."""
        if tier >= self.tiers:
            return len(hashes)
        copies = self.copies.get((worker, tier))
        if copies:
            hashes = self._take_copies(worker, tier, copies, hashes)
        slot = self.slots[worker]
        column = 2 + tier * self.words + slot // WORD_BITS
        dropped, absent, _ = update.remove(
            self.slab, self.table, self.pages, self.scratch, slot, column, as_read_only(hashes)
        )
        self.rows -= dropped
        self.blocks[worker] -= len(hashes) - absent
        return int(absent)

    def clear(self, worker: str) -> None:
        """Remove all blocks of `worker` from all tiers. Takes time proportional to its blocks, not to the index."""
        if self.blocks[worker]:
            slot, blocks = self.slots[worker], self.blocks[worker]
            dropped, _ = update.remove_worker(
                self.slab, self.table, self.pages, self.scratch, self.words, slot, blocks
            )
            self.rows -= dropped
        self.blocks[worker] = 0
        for key in [key for key in self.copies if key[0] == worker]:
            del self.copies[key]

    def drop_worker(self, worker: str) -> None:
        """Remove a worker and its blocks. Idempotent."""
        if worker in self.slots:
            self.clear(worker)
            self._taken &= ~(1 << self.slots[worker])
            del self.slots[worker], self.blocks[worker]
            self.slots_version += 1

    def find(self, hashes: U64) -> tuple[int, U64]:
        """The overlap of each worker with a prompt: how many leading blocks it holds.

        Returns the greatest depth and a uint64 array of shape (2, slots): row 0 on GPU, row 1 on any tier,
        indexed by `slots[worker]`. The array is reused by the next call.
        """
        return match.find(self.slab, self.table, self.words, as_read_only(hashes)), self._depths

    def path(self, deepest: int, longest: int) -> U64 | None:
        """The hashes from the start of a prompt to block `deepest`, at most `longest` of them.

        None if the index does not hold block `deepest`, or the chain is longer.
        """
        out: U64 = np.zeros(longest, np.uint64)
        length = match.path(self.slab, self.table, deepest >> 32, deepest & LOW, out)
        return out[longest - length :] if length > 0 else None

    def digest(self) -> int:
        """A 64-bit digest of the content, independent of the order of insertions."""
        return int(match.digest(self.slab, self.words, int(self.scratch[TOP])))

    def packed(self) -> pack.Arrays:
        """All rows as a snapshot's arrays: `pack.pack`."""
        slab = pack.PackedSlab(self.slab, self.pages, self.scratch, self.used)
        return pack.pack(slab, self.words, self.rows)

    def adopt(self, arrays: pack.Arrays, rows: int, words: int, tiers: int) -> None:
        """Load the rows of a snapshot; slots and block counts must be set before.

        Raises ValueError or LookupError if they are inconsistent.
        """
        slab, table = pack.unpack(arrays, words, tiers, rows)
        if any(int(slab.pages[slot].sum()) != self.blocks[name] for name, slot in self.slots.items()):
            raise ValueError("block counts of workers do not match the rows")
        self.slab, self.pages, self.scratch[:CHAINS], self.used = (
            slab.slab,
            slab.pages,
            slab.scratch[:CHAINS],
            slab.used,
        )
        self.table, self.rows, self.words, self.tiers = table, rows, words, tiers
        self._taken = sum(1 << slot for slot in self.slots.values())
        self.slots_version += 1
        self._measure()

    def _take_copies(self, worker: str, tier: int, copies: dict[int, int], hashes: U64) -> U64:
        """Remove extra copies; returns the blocks whose last copy is removed."""
        removed: list[int] = []
        for block in hashes.tolist():
            extra = copies.get(block, 0)
            if extra > 1:
                copies[block] = extra - 1
            elif extra == 1:
                del copies[block]
            else:
                removed.append(block)
        if not copies:
            del self.copies[worker, tier]
        return np.array(removed, np.uint64)

    def _make_room(self, rows: int) -> None:
        if rows > self.capacity:
            self._resize(max(rows, min(2 * self.capacity, self.max_blocks)), self.words, self.tiers)
        self._grow_table(rows)

    def _grow_table(self, rows: int) -> None:
        if rows > hash_table.FILL_MAX * len(self.table):
            table: U64 = np.zeros(
                max(hash_table.capacity_for(rows), int(GROWTH * len(self.table))), np.uint64
            )
            hash_table.regrow(self.table, table)
            self.table = table
        self._measure()

    def _resize(self, capacity: int, words: int, tiers: int) -> None:
        """Replace the slab. Only used rows and columns are copied, so no other memory is touched."""
        top = int(self.scratch[TOP])
        slab = pack.empty_slab(words, tiers, capacity)
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

    def _grow_scratch(self, size: int) -> None:
        scratch: U64 = np.zeros(2 * size, np.uint64)
        scratch[: len(self.scratch)] = self.scratch
        self.scratch = scratch

    def _measure(self) -> None:
        """Recompute what follows from the shapes of the arrays."""
        size = match.state_size(self.words)
        slots = WORD_BITS * self.words
        self._capacity = int(self.slab.shape[1]) - PAD - size
        self._fits = min(self._capacity, int(hash_table.FILL_MAX * len(self.table)))
        first = int(self.slab.shape[1]) - size + 2 * self.words
        self._depths: U64 = self.slab[0, first : first + 2 * slots].reshape(2, slots)


def _pages(slots: int, capacity: int) -> Pages:
    return np.zeros((slots, (capacity >> PAGE_BITS) + 1), np.uint16)
