"""Rows in any order: everything is found and removed as where they are in order, and old snapshots are put in order."""

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.router.index import hash_table
from headwater.router.index import hash_table as index_hash_table
from headwater.router.index.prefix_index import PrefixIndex
from headwater.schemas.hashing import U64
from tests.support.data.index_model import lay, scatter

LENGTH = 400
NAMES: U64 = np.arange(1, LENGTH + 1, dtype=np.uint64) * np.uint64(0x10001)


def index_with(workers: int) -> PrefixIndex:
    """Workers w0, w1, …"""
    index = PrefixIndex()
    for number in range(workers):
        index.add_worker(f"w{number}")
    return index


@settings(max_examples=25)
@given(
    st.randoms(use_true_random=False),
    st.sampled_from([3, 130]),
    st.sampled_from([1, 2, 5, 17, 40]),
    st.sampled_from([0, 1]),
)
def test_it_makes_no_difference_where_rows_lie(
    draw: random.Random, workers: int, piece: int, tiers: int
) -> None:
    """Two indexes of the same content, one in order, one in pieces of some neighbouring rows, tell and become the same."""
    straight, mixed = index_with(workers), index_with(workers)
    told = ["w0", "w1", f"w{workers - 1}"]
    for worker in told:
        for tier in range(1 + tiers):
            length = draw.choice((0, 1, 2, 63, 64, 65, 200, LENGTH)) if worker != "w0" else LENGTH
            for index in (straight, mixed):
                index.store(worker, tier, 0, NAMES[:length])
    pieces = [range(at, min(at + piece, LENGTH)) for at in range(0, LENGTH, piece)]
    draw.shuffle(pieces)
    lay(mixed, np.array([row for rows in pieces for row in rows]))
    for _ in range(5):
        query = np.append(NAMES[: draw.choice((1, 2, 64, 65, 129, LENGTH))], np.uint64(9))
        deepest, depths = straight.find(query)
        found, others = mixed.find(query)
        assert (deepest, depths.tolist()) == (found, others.tolist())
        # Some of them twice, some that nobody holds.
        blocks = draw.choices([*NAMES.tolist(), 9, 11], k=draw.choice((1, 3, 100)))
        if draw.random() < 0.3:
            blocks = NAMES.tolist()[:: draw.choice((1, -1))]
        gone, worker, tier = np.array(blocks, np.uint64), draw.choice(told), draw.randrange(1 + tiers)
        assert straight.remove(worker, tier, gone) == mixed.remove(worker, tier, gone)
        assert (straight.rows, straight.blocks) == (mixed.rows, mixed.blocks)
        assert straight.digest() == mixed.digest()


def test_blocks_are_looked_up_together_where_guesses_fail_and_only_there() -> None:
    """In order the scratch is never written to; scattered, it holds the rows of the last blocks."""
    index = index_with(1)
    index.store("w0", 0, 0, NAMES)
    scratch = index.slab[0, -index_hash_table.SCRATCH :][: hash_table.AHEAD]
    assert index.find(NAMES)[0] == LENGTH
    assert not scratch.any()
    scatter(index, 1)
    scratch = index.slab[0, -index_hash_table.SCRATCH :][: hash_table.AHEAD]
    assert index.find(NAMES[:65])[0] == 65
    assert index.slab[0, scratch].tolist() == NAMES[1:65].tolist()


def test_another_block_of_the_same_tag_is_no_hit() -> None:
    """A candidate is taken at its key's word only: equal tags, in all orders of rows."""
    names = np.array([number << 32 | (number ^ 5) for number in range(1, 100)], np.uint64)
    assert len({int(hash_table.tag_of(name)) for name in names}) == 1
    index = index_with(1)
    index.store("w0", 0, 0, names[:80])
    scatter(index, 2)
    assert index.find(names)[0] == 80
    assert index.find(np.concatenate([names[:40], names[90:], names[40:50]]))[0] == 40
    assert index.remove("w0", 0, np.concatenate([names[40:][::3], names[40:][1::3]])) == 13
    assert index.find(names)[0] == 40
