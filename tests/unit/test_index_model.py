"""The prefix index against the simplest thing that could be right: a dictionary of counts per worker.

Block names are chosen so that many share a home row at the table's end: long probe sequences that wrap around,
and removals out of their middle, happen all the time instead of almost never.
"""

from collections import Counter

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from headwater.router.index import CAPACITY_MIN, FILL_MAX, PrefixIndex
from headwater.schemas.hashing import U64

TIERS = 4
LENGTH = 12
HOMES = (CAPACITY_MIN - 2, CAPACITY_MIN - 1, 0, 1)
UNKNOWN = 7 << 40


def _chain(number: int) -> list[int]:
    """Block names of a prompt. Prompts of one family share their first four blocks."""
    shared = [(1 + number // 3) * 1000 + depth for depth in range(4)]
    own = [50_000 + number * 100 + depth for depth in range(4, LENGTH)]
    return [(name << 13) | HOMES[name % len(HOMES)] for name in shared + own]


CHAINS = [_chain(number) for number in range(6)]
PARENTS = {name: parent for chain in CHAINS for parent, name in zip([0, *chain], chain, strict=False)}
FILLER: U64 = (np.arange(1, int(CAPACITY_MIN * FILL_MAX) + 2, dtype=np.uint64) << np.uint64(32)) | np.uint64(
    5
)

chains = st.sampled_from(CHAINS)
tiers = st.integers(0, TIERS - 1)
any_blocks = st.lists(st.sampled_from([*PARENTS, UNKNOWN, UNKNOWN + 1]), max_size=8)


class IndexAgainstModel(RuleBasedStateMachine):
    """`held[worker][tier, block]` counts copies; the index must tell the same at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.held: dict[str, Counter[tuple[int, int]]] = {}
        self.next_worker = 0

    @initialize(count=st.sampled_from([1, 3, 66, 130]))
    def begin(self, count: int) -> None:
        """Some workers are there from the start."""
        self.add_workers(count)

    def add_workers(self, count: int) -> None:
        """Workers join."""
        for _ in range(count if len(self.held) < 140 else 0):
            name = f"w{self.next_worker}"
            self.next_worker += 1
            self.index.add_worker(name)
            self.held[name] = Counter()

    def pick(self, data: st.DataObject) -> str:
        """The first and the last workers more often than the others: they lie in different words."""
        names = [name for name in self.held if self.held[name]] if data.draw(st.booleans()) else []
        names = names or list(self.held)
        return data.draw(st.sampled_from(names[:2] + names[-2:]) | st.sampled_from(names))

    @precondition(lambda self: self.held)
    @rule(
        data=st.data(),
        chain=chains,
        tier=tiers,
        start=st.integers(0, LENGTH - 1),
        length=st.integers(1, LENGTH),
        times=st.sampled_from([1, 1, 2, 3]),
    )
    def store(
        self, data: st.DataObject, chain: list[int], tier: int, start: int, length: int, times: int
    ) -> None:
        """A run of a chain is stored, maybe more than once."""
        worker, run = self.pick(data), chain[start : start + length]
        for _ in range(times):
            self.index.store(worker, tier, PARENTS[run[0]], np.array(run, np.uint64))
            self.held[worker].update((tier, block) for block in run)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), tier=tiers)
    def remove(self, data: st.DataObject, tier: int) -> None:
        """Blocks are removed, some of them twice, some that were never there."""
        worker = self.pick(data)
        held, absent = self.held[worker], 0
        mine = [block for place, block in held if place == tier]
        blocks = data.draw(st.lists(st.sampled_from([*mine, UNKNOWN]), max_size=12) | any_blocks)
        for block in blocks:
            absent += not held[tier, block]
            held[tier, block] -= bool(held[tier, block])
        self.held[worker] = +held
        assert self.index.remove(worker, tier, np.array(blocks, np.uint64)) == absent

    @rule(
        data=st.data(), what=st.sampled_from(["join", "join", "many join", "clear", "clear", "drop", "fill"])
    )
    def change(self, data: st.DataObject, what: str) -> None:
        """The rarer things; as one rule, so that the index is well filled when they happen."""
        if "join" in what or not self.held:
            return self.add_workers(30 if what == "many join" else 1)
        worker = self.pick(data)
        if what == "clear":
            self.index.clear(worker)
            self.held[worker].clear()
        elif what == "drop":
            self.index.drop_worker(worker)
            self.index.drop_worker(worker)
            del self.held[worker]
        else:
            self.index.store(worker, 0, 0, FILLER)
            assert self.index.table.shape[0] > CAPACITY_MIN, "it had to grow"
            assert self.index.remove(worker, 0, FILLER) == 0
        return None

    @invariant()
    def every_worker_is_found_as_deep_as_it_holds(self) -> None:
        """Depth on GPU and on any tier, for every worker and prompt, and the deepest of all."""
        for chain in CHAINS:
            deepest, depths = self.index.find(np.array([*chain, UNKNOWN], np.uint64))
            anywhere_max = 0
            for worker, held in self.held.items():
                gpu = _depth(chain, [(0, held)])
                anywhere = _depth(chain, [(tier, held) for tier in range(TIERS)])
                slot = self.index.slots[worker]
                assert (depths[0, slot], depths[1, slot]) == (gpu, anywhere), worker
                anywhere_max = max(anywhere_max, anywhere)
            assert deepest == anywhere_max

    @invariant()
    def counts_are_right(self) -> None:
        """Rows are distinct blocks that anybody holds; blocks are counted per worker and tier, once."""
        assert set(self.index.slots) == set(self.index.blocks) == set(self.held)
        assert self.index.rows == len({block for held in self.held.values() for _, block in held})
        assert self.index.rows == np.count_nonzero(self.index.table[:, 0])
        for worker, held in self.held.items():
            assert self.index.blocks[worker] == len(held)
            copies = {key: count - 1 for key, count in held.items() if count > 1}
            told = {
                (tier, block): count
                for (name, tier), extra in self.index.copies.items()
                if name == worker
                for block, count in extra.items()
            }
            assert told == copies

    def teardown(self) -> None:
        """Rebuilt from the model in another order, the index has the same digest."""
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


def test_the_index_agrees_with_its_model() -> None:
    """Any sequence of stores, removals, clears, joins and leaves, with growth in between, is told right."""
    run_state_machine_as_test(
        IndexAgainstModel, settings=settings(deadline=None, max_examples=40, stateful_step_count=30)
    )
