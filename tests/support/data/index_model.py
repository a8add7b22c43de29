"""The simplest thing that could be right: a dictionary of counts per worker, beside a real prefix index.

Block names are chosen so that many share a home at the two ends of the table: long probe sequences that wrap around,
equal tags, and removals out of their middle, happen all the time instead of almost never.
"""

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from headwater.router.index.hash_table import tag_of
from headwater.router.index.prefix_index import MAX_BLOCKS, ROWS_MIN, PrefixIndex
from headwater.router.index.update import FREE, PAD, PAGE_BITS, TOP
from headwater.schemas.hashing import U64

TIERS = 4
LENGTH = 12
LOW = 0xFFFFFFFF
TAGS = (LOW, 0, LOW - 1, 1)
UNMIX = pow(0x9E3779B1, -1, 1 << 32)
UNKNOWN = 7 << 40


def named(number: int, tag: int) -> int:
    """A block's name with this tag in the table."""
    return number << 32 | (number ^ tag * UNMIX & LOW)


def _chain(number: int) -> list[int]:
    """Block names of a prompt. Prompts of one family share their first four blocks."""
    shared = [(1 + number // 3) * 1000 + depth for depth in range(4)]
    own = [50_000 + number * 100 + depth for depth in range(4, LENGTH)]
    return [named(name, TAGS[name % len(TAGS)]) for name in shared + own]


CHAINS = [_chain(number) for number in range(6)]
PARENTS = {name: parent for chain in CHAINS for parent, name in zip([0, *chain], chain, strict=False)}
FILLER: U64 = (np.arange(1, ROWS_MIN + 2, dtype=np.uint64) << np.uint64(32)) | np.uint64(5)


def lay(index: PrefixIndex, order: NDArray[np.int64]) -> None:
    """Lay the rows of an index in another order, free ones among them."""
    arrays = {"keys": index.slab[0, order], "parents": index.slab[1, order]}
    for column in range(2, len(index.slab)):
        tier, word = divmod(column - 2, index.words)
        arrays[f"held-{tier}-{word}"] = index.slab[column, order]
    index.adopt(arrays, index.rows, index.words, index.tiers)


def scatter(index: PrefixIndex, seed: int) -> None:
    """Lay them in a random one."""
    lay(index, np.random.default_rng(seed).permutation(int(index.scratch[TOP])))


class IndexModel:
    """`held[worker][tier, block]` counts copies; the index must tell the same at any time."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self.index = PrefixIndex(max_blocks)
        self.refused = 0
        self.held: dict[str, Counter[tuple[int, int]]] = {}
        self.joined = 0

    def join(self, count: int) -> None:
        """Workers join."""
        for _ in range(count):
            name = f"w{self.joined}"
            self.joined += 1
            self.index.add_worker(name)
            self.held[name] = Counter()

    def store(self, worker: str, tier: int, run: list[int]) -> None:
        """A part of a chain is stored."""
        self.index.store(worker, tier, PARENTS[run[0]], np.array(run, np.uint64))
        for block in run:
            known = self.known()
            if block in known or len(known) < self.index.max_blocks:
                self.held[worker][tier, block] += 1
            else:
                self.refused += 1

    def known(self) -> set[int]:
        """Blocks that anybody holds."""
        return {block for held in self.held.values() for _, block in held}

    def remove(self, worker: str, tier: int, blocks: list[int]) -> None:
        """One copy of each block goes; what was not there is counted."""
        held, absent = self.held[worker], 0
        for block in blocks:
            absent += not held[tier, block]
            held[tier, block] -= bool(held[tier, block])
        self.held[worker] = +held
        assert self.index.remove(worker, tier, np.array(blocks, np.uint64)) == absent

    def clear(self, worker: str) -> None:
        """A worker loses everything and stays."""
        self.index.clear(worker)
        self.held[worker].clear()

    def drop(self, worker: str) -> None:
        """A worker goes; its place may be given to another."""
        self.index.drop_worker(worker)
        self.index.drop_worker(worker)
        del self.held[worker]

    def fill(self, worker: str) -> None:
        """So much is stored, and taken away again, that the table must have grown."""
        self.index.store(worker, 0, 0, FILLER)
        assert self.index.capacity > ROWS_MIN
        assert self.index.remove(worker, 0, FILLER) == 0

    def check_depths(self) -> None:
        """Depth on GPU and on any tier, for every worker and prompt, and the deepest of all."""
        holders = [worker for worker, held in self.held.items() if held]
        others = [slot for worker, slot in self.index.slots.items() if not self.held[worker]]
        for chain in CHAINS:
            deepest, depths = self.index.find(np.array([*chain, UNKNOWN], np.uint64))
            deepest_wanted = 0
            for worker in holders:
                held, slot = self.held[worker], self.index.slots[worker]
                gpu = _depth(chain, [(0, held)])
                anywhere = _depth(chain, [(tier, held) for tier in range(TIERS)])
                assert (depths[0, slot], depths[1, slot]) == (gpu, anywhere), worker
                deepest_wanted = max(deepest_wanted, anywhere)
            assert deepest == deepest_wanted
            assert not depths[:, others].any()

    def check_counts(self) -> None:
        """Rows are distinct blocks that anybody holds; blocks and copies are counted per worker and tier."""
        index = self.index
        assert set(index.slots) == set(index.blocks) == set(self.held)
        assert index.rows == len(self.known())
        assert index.refused == self.refused
        assert index.blocks == {worker: len(held) for worker, held in self.held.items()}
        told = {
            (worker, tier, block): count
            for (worker, tier), extra in index.copies.items()
            for block, count in extra.items()
        }
        assert told == {
            (worker, tier, block): count - 1
            for worker, held in self.held.items()
            for (tier, block), count in held.items()
            if count > 1
        }

    def check_layout(self) -> None:
        """Rows, free rows, table and pages agree."""
        index = self.index
        top = int(index.scratch[TOP])
        keys = index.slab[0, : index.capacity + PAD]
        assert set(keys[keys != 0].tolist()) == self.known()
        assert not keys[top : index.capacity + PAD].any()
        assert not index.slab[2:, : len(keys)][:, keys == 0].any(), "nobody holds a free row"
        entries = index.table[index.table != 0].tolist()
        assert sorted((entry & LOW) - 1 for entry in entries) == np.flatnonzero(keys).tolist()
        assert all(entry >> 32 == tag_of(keys[(entry & LOW) - 1]) for entry in entries)
        free, before = [], 0
        after = int(index.scratch[FREE])
        while after:
            links = int(index.slab[1, after - 1])
            assert links & LOW == before
            free.append(after - 1)
            before, after = after, links >> 32
        assert sorted(free) == np.flatnonzero(keys[:top] == 0).tolist()
        assert top <= index.capacity
        for worker, slot in index.slots.items():
            bits = index.slab[2 + slot // 64 :: index.words] >> np.uint64(slot % 64) & np.uint64(1)
            rows = np.nonzero(bits)[1] >> PAGE_BITS
            wanted = np.bincount(rows, minlength=index.pages.shape[1])
            assert index.pages[slot].tolist() == wanted.tolist(), worker

    def check_digest(self) -> None:
        """Rebuilt from the model in another order, an index has the same digest."""
        again = PrefixIndex()
        by_slot = {slot: worker for worker, slot in self.index.slots.items()}
        for slot in range(max(by_slot, default=-1) + 1):
            again.add_worker(by_slot.get(slot, f"empty{slot}"))
        for worker in reversed(self.held):
            for (tier, block), count in reversed(self.held[worker].items()):
                for _ in range(count):
                    again.store(worker, tier, PARENTS[block], np.array([block], np.uint64))
        assert again.digest() == self.index.digest()


def _depth(chain: list[int], places: list[tuple[int, Counter[tuple[int, int]]]]) -> int:
    for depth, block in enumerate(chain):
        if not any(held[tier, block] for tier, held in places):
            return depth
    return len(chain)
