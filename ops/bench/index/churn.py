"""An aged index: the cost of lookups after its content was replaced several times, as engines replace it.

Conversations of mixed lengths grow turn by turn on one worker each, some start with a popular prompt, and a full worker evicts
as engines do: the tail of the least recently used conversation, last block first, and only as much as required.
"""

from collections import OrderedDict

import numpy as np

from headwater.ops.bench.index.shapes import SHORT_BLOCKS
from headwater.router.index.prefix_index import PrefixIndex
from headwater.router.index.update import TOP
from headwater.schemas.hashing import U64

WORKERS = 16
POPULAR, POPULAR_BLOCKS, POPULAR_SHARE = 200, 24, 0.3
CONTINUES = 0.5
TURN, LONGEST_TURN = 24, 512


class Conversation:
    """Its own blocks, `held` of which its worker has, after `parent`, the end of a popular prompt or 0."""

    def __init__(self, opening: U64, blocks: U64) -> None:
        self.opening = opening
        self.parent = int(opening[-1]) if len(opening) else 0
        self.blocks = blocks
        self.held = 0


class Churn:
    """Workers with full caches, and their index."""

    def __init__(self, blocks: int) -> None:
        self.index = PrefixIndex()
        self.names = [f"w{number}" for number in range(WORKERS)]
        self.room = max(blocks // WORKERS, 2 * LONGEST_TURN)
        self.stored = 0
        self._rng = np.random.default_rng(0)
        self._live: list[OrderedDict[int, Conversation]] = [OrderedDict() for _ in self.names]
        self._free = [self.room] * WORKERS
        self._begun = 0
        for name in self.names:
            self.index.add_worker(name)
        self._popular = [self._fresh(POPULAR_BLOCKS) for _ in range(POPULAR)]
        for prompt in self._popular:
            for name in self.names:
                self.index.store(name, 0, 0, prompt)

    def replace(self, times: int) -> None:
        """Fill the index, and store as many blocks again so many times."""
        end = self.stored + times * self.room * WORKERS
        while self.stored < end:
            draws = self._rng.random((4096, 4))
            lengths = np.minimum(self._rng.geometric(1 / TURN, 4096), LONGEST_TURN)
            for (which, continues, opening, recent), length in zip(
                draws.tolist(), lengths.tolist(), strict=True
            ):
                self._turn(
                    int(which * WORKERS), continues < CONTINUES, opening / POPULAR_SHARE, recent, length
                )

    def prompts(self, count: int) -> list[U64]:
        """The first 64 blocks of random conversations of which that many are cached."""
        whole = [
            np.concatenate([each.opening, each.blocks[: SHORT_BLOCKS - len(each.opening)]])
            for live in self._live
            for each in live.values()
            if len(each.opening) + each.held >= SHORT_BLOCKS
        ]
        return [whole[at].copy() for at in self._rng.integers(0, len(whole), count).tolist()]

    def in_order(self) -> PrefixIndex:
        """A new index of the same content."""
        fresh = PrefixIndex()
        for name in self.names:
            fresh.add_worker(name)
            for prompt in self._popular:
                fresh.store(name, 0, 0, prompt)
        for name, live in zip(self.names, self._live, strict=True):
            for each in live.values():
                fresh.store(name, 0, each.parent, each.blocks[: each.held])
        return fresh

    def behind_parents(self) -> float:
        """The share of blocks, in percent, in the row after their parent's."""
        slab, top = self.index.slab, int(self.index.scratch[TOP])
        taken = slab[0, 1:top] != 0
        behind = (slab[1, 1:top] == slab[0, : top - 1]) & taken
        return 100 * float(np.count_nonzero(behind)) / max(1, int(np.count_nonzero(taken)))

    def _turn(self, worker: int, continues: bool, opening: float, recent: float, length: int) -> None:
        live = self._live[worker]
        number = self._begun - 1 - int(recent * recent * self._begun)
        # No conversation exceeds its worker's cache, so that there is always another to evict.
        if continues and number in live and len(live[number].blocks) <= self.room // 2:
            live.move_to_end(number)
            each = live[number]
            each.blocks = np.concatenate([each.blocks, self._fresh(length)])
        else:
            prompt = self._popular[int(opening * POPULAR)] if opening < 1 else self._popular[0][:0]
            number, each = self._begun, Conversation(prompt, self._fresh(length))
            live[number] = each
            self._begun += 1
        wanted = each.blocks[each.held :]
        if self._free[worker] < len(wanted):
            self._evict(worker, len(wanted) - self._free[worker])
        before = each.blocks[each.held - 1] if each.held else each.parent
        self.index.store(self.names[worker], 0, int(before), wanted)
        self._free[worker] -= len(wanted)
        each.held = len(each.blocks)
        self.stored += len(wanted)

    def _evict(self, worker: int, wanted: int) -> None:
        live = self._live[worker]
        while wanted > 0:
            number, oldest = next(iter(live.items()))
            kept = max(0, oldest.held - wanted)
            gone = oldest.blocks[kept : oldest.held][::-1].copy()
            self.index.remove(self.names[worker], 0, gone)
            self._free[worker] += len(gone)
            wanted -= len(gone)
            oldest.held = kept
            if kept == 0:
                del live[number]

    def _fresh(self, length: int) -> U64:
        return self._rng.integers(1, 2**63, length, dtype=np.uint64)
