"""The prefix index: which worker holds which block, on which tier.

A radix tree over blocks. Since a sequence hash names its whole prefix, the tree needs no walk by tokens:
a prompt's blocks are looked up in one table, each row knowing its parent. A block whose parent nobody holds
(a gap, an eviction in the middle) is in the table but can not be reached from the start of any prompt, so it
is never a hit until the missing part comes back: that is how unknown parents are parked.

Copies are counted per (worker, tier, block): engines announce each physical copy, and a removal takes one.
"""

import numpy as np
from numpy.typing import NDArray

from headwater.router import kernels
from headwater.schemas.hashing import U64

CAPACITY_MIN = 1 << 12
FILL_MAX = 0.7
TIERS_MIN = 2
WORD_BITS = 64
LOW = 0xFFFFFFFF


class PrefixIndex:
    """Blocks of all workers of one pool. Every method is deterministic and none does IO."""

    def __init__(self) -> None:
        self.words = 1
        self.tiers = TIERS_MIN
        self.table: U64 = np.zeros((CAPACITY_MIN, 2 + TIERS_MIN), np.uint64)
        self.rows = 0
        self.slots: dict[str, int] = {}
        self.blocks: dict[str, int] = {}
        self.copies: dict[tuple[str, int], dict[int, int]] = {}
        self._repeated: NDArray[np.int64] = np.zeros(64, np.int64)
        self._one_parent: U64 = np.zeros(1, np.uint64)
        self._one_length: NDArray[np.int64] = np.zeros(1, np.int64)
        self._state: U64 = np.zeros(1 + 2 * WORD_BITS + 1, np.uint64)
        self._depths: U64 = self._state[1:-1].reshape(2, WORD_BITS)

    def reserve(self, rows: int) -> None:
        """Make room for `rows` blocks at once instead of growing to it."""
        capacity = self._capacity_for(rows)
        if capacity > self.table.shape[0]:
            self._rebuild(capacity, self.words, self.tiers)

    def add_worker(self, worker: str) -> None:
        """Give a worker its bit. Adding one that is there is fine."""
        if worker in self.slots:
            return
        taken = set(self.slots.values())
        slot = next(number for number in range(len(taken) + 1) if number not in taken)
        if slot >= self.words * WORD_BITS:
            self._rebuild(self.table.shape[0], self.words * 2, self.tiers)
        self.slots[worker] = slot
        self.blocks[worker] = 0
        self._note_present()

    def store(self, worker: str, tier: int, parent: int, hashes: U64) -> None:
        """A chain of blocks behind `parent` is now held by `worker` on `tier`. `hashes`: uint64, shape (n,)."""
        self._one_parent[0] = parent
        self._one_length[0] = len(hashes)
        self.store_chains(worker, tier, self._one_parent, self._one_length, hashes)

    def store_chains(
        self, worker: str, tier: int, parents: U64, lengths: NDArray[np.int64], hashes: U64
    ) -> None:
        """Several chains at once: chain i is the next `lengths[i]` of `hashes`, behind `parents[i]`.

        As many calls of `store` would do the same, but each costs more than the blocks of a short chain.
        """
        slot = self.slots[worker]
        if tier >= self.tiers:
            self._rebuild(self.table.shape[0], self.words, tier + 1)
        if self.rows + len(hashes) > FILL_MAX * self.table.shape[0]:
            self._rebuild(self._capacity_for(self.rows + len(hashes)), self.words, self.tiers)
        if len(hashes) > len(self._repeated):
            self._repeated = np.zeros(2 * len(hashes), np.int64)
        added, again, _ = kernels.store(
            self.table, self.words, slot, tier, parents, lengths, hashes, self._repeated
        )
        self.rows += added
        self.blocks[worker] += len(hashes) - again
        if again:
            copies = self.copies.setdefault((worker, tier), {})
            for block in hashes[self._repeated[:again]].tolist():
                copies[block] = copies.get(block, 0) + 1

    def remove(self, worker: str, tier: int, hashes: U64) -> int:
        """One copy of each block left `tier` of `worker`. Returns how many it was not known to hold."""
        if tier >= self.tiers:
            return len(hashes)
        copies = self.copies.get((worker, tier))
        if copies:
            hashes = self._take_copies(worker, tier, copies, hashes)
        dropped, absent, _ = kernels.remove(self.table, self.words, self.slots[worker], tier, hashes)
        self.rows -= dropped
        self.blocks[worker] -= len(hashes) - absent
        return int(absent)

    def clear(self, worker: str) -> None:
        """All blocks of `worker` are gone, on all tiers."""
        if self.blocks[worker]:
            self.rows -= kernels.remove_worker(self.table, self.words, self.slots[worker])
        self.blocks[worker] = 0
        for key in [key for key in self.copies if key[0] == worker]:
            del self.copies[key]

    def drop_worker(self, worker: str) -> None:
        """Forget a worker and its blocks. Dropping an unknown one is fine."""
        if worker in self.slots:
            self.clear(worker)
            del self.slots[worker], self.blocks[worker]
            self._note_present()

    def find(self, hashes: U64) -> tuple[int, U64]:
        """How many leading blocks each worker holds.

        Returns the deepest depth and a uint64 array of shape (2, slots): row 0 on GPU, row 1 on any tier,
        indexed by `slots[worker]`. The array is reused by the next call.
        """
        return kernels.find(self.table, self.words, hashes, self._state), self._depths

    def path(self, deepest: int, longest: int) -> U64 | None:
        """The hashes from the start of a prompt to block `deepest`, at most `longest` of them.

        None if the index does not hold block `deepest`, or the chain is longer.
        """
        out: U64 = np.zeros(longest, np.uint64)
        length = kernels.path(self.table, deepest >> 32, deepest & LOW, out)
        return out[longest - length :] if length > 0 else None

    def digest(self) -> int:
        """A number for the content, the same however the table came to hold it."""
        return int(kernels.digest(self.table, self.words))

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

    @staticmethod
    def _capacity_for(rows: int) -> int:
        capacity = CAPACITY_MIN
        while rows > FILL_MAX * capacity:
            capacity *= 2
        return capacity

    def _rebuild(self, capacity: int, words: int, tiers: int) -> None:
        table: U64 = np.empty((capacity, 2 + tiers * words), np.uint64)
        # Written, not just reserved: the system then gives the memory here and not block by block later.
        table.fill(0)
        kernels.rehash(self.table, self.words, table, words)
        self.adopt(table, self.rows, words, tiers)

    def adopt(self, table: U64, rows: int, words: int, tiers: int) -> None:
        """Take over a table, as a snapshot brings it."""
        self.table, self.rows, self.words, self.tiers = table, rows, words, tiers
        slots = WORD_BITS * words
        self._state = np.zeros(words + 2 * slots + 1, np.uint64)
        self._depths = self._state[words:-1].reshape(2, slots)
        self._note_present()

    def _note_present(self) -> None:
        present = [0] * self.words
        for slot in self.slots.values():
            present[slot // WORD_BITS] |= 1 << slot % WORD_BITS
        self._state[: self.words] = np.array(present, np.uint64)
