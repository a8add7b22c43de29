"""The blocks of an engine as a fold of its KV events."""

from collections import Counter

import numpy as np

from headwater.engines.custom.engine import HeldBlocks
from headwater.schemas import hashing
from headwater.schemas.events import BlocksCleared, BlocksRemoved, BlocksStored


def packed(*numbers: int) -> bytes:
    return hashing.pack_hashes(np.array(numbers, np.uint64))


def listed(held: HeldBlocks) -> list[tuple[int, tuple[int, ...]]]:
    return [(one.parent, tuple(hashing.unpack_hashes(one.hashes).tolist())) for one in held.stored()]


def test_stored_blocks_are_listed_parents_first() -> None:
    held = HeldBlocks()
    for event in (
        BlocksStored(0, packed(1, 2, 3)),
        BlocksStored(2, packed(4)),
        BlocksRemoved(packed(1)),
        BlocksStored(0, packed(1)),
    ):
        held.apply(event)
    known = {0}
    blocks: Counter[int] = Counter()
    for parent, run in listed(held):
        assert parent in known
        known.update(run)
        blocks.update(run)
    assert blocks == Counter([1, 2, 3, 4])
    assert len(held) == 4


def test_copies_tiers_and_ranks_are_counted_apart() -> None:
    held = HeldBlocks()
    for event in (
        BlocksStored(0, packed(1)),
        BlocksStored(0, packed(1)),
        BlocksStored(0, packed(1), tier=1),
        BlocksStored(0, packed(9), rank=1),
        BlocksRemoved(packed(1)),
    ):
        held.apply(event)
    assert sorted((one.rank, one.tier) for one in held.stored()) == [(0, 0), (0, 1), (1, 0)]
    held.apply(BlocksStored(0, packed(1)))
    assert listed(held).count((0, (1,))) == 3
    held.apply(BlocksCleared())
    assert listed(held) == [(0, (9,))]
