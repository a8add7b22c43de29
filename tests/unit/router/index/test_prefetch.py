"""Rows in any order: everything is found and removed as where they are in order, and old snapshots are put in order."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.ops.bench.index.churn import Churn
from headwater.router.index import hash_table, prefetch
from headwater.router.index.chain_order import chain_order
from headwater.router.index.pack import from_rows
from headwater.router.index.prefix_index import PrefixIndex
from headwater.router.index.update import TOP
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
    scratch = index.slab[0, -prefetch.SCRATCH :][: hash_table.AHEAD]
    assert index.find(NAMES)[0] == LENGTH
    assert not scratch.any()
    scatter(index, 1)
    scratch = index.slab[0, -prefetch.SCRATCH :][: hash_table.AHEAD]
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


def test_rows_of_early_releases_are_put_in_the_order_of_their_chains() -> None:
    """Each block behind its parent, or behind another child of it; a table in the order of hashes comes out like that."""
    index, draw = index_with(2), np.random.default_rng(3)
    for number in range(40):
        start = int(draw.integers(0, 300)) if number else 0
        own = draw.integers(1, 2**63, LENGTH - start, dtype=np.uint64) if number else NAMES
        index.store("w1", 0, int(NAMES[start - 1]) if start else 7, own)
    index.store("w0", 0, 0, NAMES)
    top = int(index.scratch[TOP])
    rows = index.slab[:, draw.permutation(top)].T.copy()
    slab, _ = from_rows(rows, 1, 1, top)
    keys, parents = slab.slab[0, :top], slab.slab[1, :top]
    place = {key: row for row, key in enumerate(keys.tolist())}
    assert all(place.get(parent, -1) < row for row, parent in enumerate(parents.tolist()))
    first = {parent: row for row, parent in reversed(list(enumerate(parents.tolist())))}
    assert all(row == place[parent] + 1 for parent, row in first.items() if parent in place)
    # Breaks: a new root, or a second child. There are 40 chains.
    assert np.count_nonzero(parents[1:] != keys[:-1]) < 40
    again = index_with(2)
    again.blocks = dict(index.blocks)
    again.adopt({"rows": rows}, index.rows, 1, 1)
    assert again.digest() == index.digest()


@pytest.mark.parametrize("count", [0, 1, 2, 63, 64, 65, 200])
def test_chain_order_has_each_row_once(count: int) -> None:
    """Also of blocks that are their own ancestors, which no engine means, and of those behind them."""
    draw = np.random.default_rng(count)
    keys = draw.permutation(np.arange(1, count + 1, dtype=np.uint64))
    for parents in (keys, np.roll(keys, 1), draw.integers(0, 2 * count + 1, count, dtype=np.uint64)):
        assert sorted(chain_order(keys, parents).tolist()) == list(range(count))
    assert keys[chain_order(keys, keys - np.uint64(1))].tolist() == list(range(1, count + 1))


def test_a_worn_index_finds_what_a_fresh_one_finds() -> None:
    """Content that was replaced twice, by turns and evictions of tails; most blocks lie behind their parents all the same."""
    churn = Churn(20_000)
    churn.replace(3)
    fresh = churn.in_order()
    assert fresh.digest() == churn.index.digest()
    assert churn.behind_parents() > 80
    for prompt in churn.prompts(50):
        deepest, depths = churn.index.find(prompt)
        found, others = fresh.find(prompt)
        assert deepest == found == 64
        assert depths.tolist() == others.tolist()
