"""The slab: no byte to two, and every byte back."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from headwater.engines.transfer.port import SlabFull
from headwater.engines.transfer.slab import Block, Slab


class SlabAgainstModel(RuleBasedStateMachine):
    """Blocks come and go in any order; the model is a set of used units of 16 bytes."""

    @initialize(units=st.integers(1, 24), extra=st.integers(0, 15))
    def begin(self, units: int, extra: int) -> None:
        """An empty slab."""
        self.slab = Slab(units * 16 + extra, 16)
        self.capacity = units * 16
        self.blocks: list[tuple[Block, int]] = []

    @rule(nbytes=st.integers(1, 200))
    def allocate(self, nbytes: int) -> None:
        """It gets the first gap, or is refused exactly when there is no gap."""
        largest = self.slab.largest_free
        if -(-nbytes // 16) * 16 > largest:
            with pytest.raises(SlabFull, match=f"{largest} in one piece"):
                self.slab.allocate(nbytes)
        else:
            self.blocks.append((self.slab.allocate(nbytes), nbytes))

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        """A block comes back, and not twice."""
        chosen = data.draw(st.sampled_from(self.blocks))
        self.blocks.remove(chosen)
        self.slab.free(chosen[0])
        with pytest.raises(ValueError, match="not in use"):
            self.slab.free(chosen[0])

    @invariant()
    def blocks_are_apart_and_inside(self) -> None:
        """No byte is given out twice; each block is aligned and as large as asked."""
        used = [unit for block, _ in self.blocks for unit in range(block.offset, sum(block))]
        assert len(used) == len(set(used))
        assert all(0 <= unit < self.capacity for unit in used)
        assert all(block.offset % 16 == 0 and block.nbytes >= nbytes for block, nbytes in self.blocks)
        assert self.slab.free_bytes == self.capacity - len(used)

    @invariant()
    def gaps_are_joined(self) -> None:
        """The largest free piece is the largest gap: two neighbours are never kept apart."""
        used = {unit for block, _ in self.blocks for unit in range(block.offset, sum(block))}
        gap = largest = 0
        for unit in range(self.capacity):
            gap = 0 if unit in used else gap + 1
            largest = max(largest, gap)
        assert self.slab.largest_free == largest


def test_the_slab_agrees_with_its_model() -> None:
    """Any order of allocations and frees."""
    run_state_machine_as_test(SlabAgainstModel, settings=settings(stateful_step_count=40))


@given(order=st.permutations(range(6)))
@settings(max_examples=30)
def test_all_bytes_come_back_in_one_piece(order: list[int]) -> None:
    """Freed in any order."""
    slab = Slab(6 * 4096)
    blocks = [slab.allocate(4000) for _ in range(6)]
    for index in order:
        slab.free(blocks[index])
    assert slab.allocate(6 * 4096) == Block(0, 6 * 4096)


def test_what_can_not_be_a_slab_or_a_block_is_refused() -> None:
    """By name."""
    with pytest.raises(ValueError, match="power of two"):
        Slab(4096, 48)
    with pytest.raises(ValueError, match="too small"):
        Slab(100)
    with pytest.raises(ValueError, match="at least one byte"):
        Slab(4096).allocate(0)
