"""The prefix index as a tree: runs, their holders, what hangs under what, and the text that people read."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.router.index.prefix_index import PrefixIndex
from headwater.router.index.tree import TokenRun, text, tree
from headwater.schemas.hashing import U64
from tests.support.data.index_model import CHAINS, PARENTS, IndexModel
from tests.unit.router.index.test_pack import filled


def names(first: int, count: int) -> U64:
    """Block names that can be told apart."""
    return np.arange(first, first + count, dtype=np.uint64)


def forked() -> PrefixIndex:
    """Ten blocks of a system prompt on a and b; behind it five of a, and seven of b of which the last two are on the CPU only; three parked."""
    index = PrefixIndex()
    for name in "abc":
        index.add_worker(name)
    for name in "ab":
        index.store(name, 0, 0, names(1, 10))
    index.store("a", 0, 10, names(100, 5))
    index.store("b", 0, 10, names(200, 5))
    index.store("b", 1, 204, names(205, 2))
    index.store("c", 3, 999, names(300, 3))
    return index


def told(run: TokenRun) -> tuple[int, int, int, int, int]:
    """Its first block and its numbers."""
    return int(run.first, 16), run.depth, run.level, run.blocks, run.below


def test_runs_end_at_branches_and_where_holders_change() -> None:
    """Each behind the one it hangs under, the heavier branch first."""
    found = tree(forked())
    assert [told(run) for run in found.runs] == [
        (1, 0, 0, 10, 12),
        (200, 10, 1, 5, 2),
        (205, 15, 2, 2, 0),
        (100, 10, 1, 5, 0),
        (300, -1, 0, 3, 0),
    ]
    assert (found.total, found.blocks, found.workers, found.refused) == (5, 25, 3, 0)
    assert [run.held for run in found.runs] == [
        {"gpu": ("a", "b")},
        {"gpu": ("b",)},
        {"cpu": ("b",)},
        {"gpu": ("a",)},
        {"external": ("c",)},
    ]


def test_uses_are_counted_in_all_runs_that_lead_to_a_block() -> None:
    """With the latest; of blocks that are not in the index, and of a ring, there are none."""
    index = forked()
    index.store("a", 0, 401, names(400, 1))
    index.store("a", 0, 400, names(401, 1))
    used = (np.array([5, 10, 202, 206, 999, 400], np.uint64), np.array([9, 2, 3, 4, 8, 8], np.int64))
    found = tree(index, used=used)
    assert [(int(run.first, 16), run.uses, run.used_ns) for run in found.runs] == [
        *((1, 4, 9), (200, 2, 4), (205, 1, 4)),
        *((100, 0, 0), (300, 0, 0)),
    ]
    assert b"uses" not in msgspec.json.encode(tree(index))


def test_a_limit_keeps_the_largest_and_what_they_hang_under() -> None:
    """By all that is in and below them."""
    assert [told(run)[0] for run in tree(forked(), limit=2).runs] == [1, 200]
    assert tree(forked(), limit=0).runs == ()
    assert tree(forked(), limit=2).total == 5


def test_a_worker_is_shown_with_what_leads_to_its_blocks() -> None:
    """And nothing else; one that is not there is named, with those that are."""
    assert [told(run)[0] for run in tree(forked(), worker="a").runs] == [1, 100]
    assert [told(run)[0] for run in tree(forked(), worker="c").runs] == [300]
    with pytest.raises(LookupError, match=r"no worker x.*a, b, c"):
        tree(forked(), worker="x")
    index = forked()
    index.remove("b", 0, names(1, 10))
    assert [told(run)[0] for run in tree(index, worker="b").runs] == [1, 200, 205]


def test_a_depth_cuts_what_begins_behind_it() -> None:
    """Parked runs have no depth and stay."""
    assert [told(run)[0] for run in tree(forked(), depth=10).runs] == [1, 300]
    assert [told(run)[0] for run in tree(forked(), depth=15).runs] == [1, 200, 100, 300]


def test_the_text_is_indented_and_says_what_is_parked() -> None:
    """One line a run."""
    assert text(tree(forked())).splitlines() == [
        "25 blocks in 5 runs, 3 workers; 5 runs shown",
        "  blocks   below   depth  names and holders",
        "      10      12       0  0000000000000001..000000000000000a  gpu: a b",
        "       5       2      10    00000000000000c8..00000000000000cc  gpu: b",
        "       2       0      15      00000000000000cd..00000000000000ce  cpu: b",
        "       5       0      10    0000000000000064..0000000000000068  gpu: a",
        "       3       0       ?  000000000000012c..000000000000012e  external: c"
        " after 00000000000003e7, held by no worker",
    ]
    many = PrefixIndex(4)
    for number in range(9):
        many.add_worker(f"w{number}")
        many.store(f"w{number}", 0, 0, names(1, 5))
    assert text(tree(many)).splitlines()[2].endswith("gpu: w0 w1 w2 w3 w4 w5 and 3 more")
    assert text(tree(many)).splitlines()[0].endswith("9 blocks refused")


def test_an_empty_index_has_no_runs_and_a_ring_is_left_out() -> None:
    """Blocks that name each other as parents are reached by no prompt."""
    assert tree(PrefixIndex()).runs == ()
    index = PrefixIndex()
    index.add_worker("a")
    index.store("a", 0, 3, names(1, 3))
    index.store("a", 0, 7, names(7, 1))
    assert tree(index).runs == ()
    index.store("a", 1, 1, names(2, 1))
    assert tree(index).runs == ()
    assert msgspec.json.encode(tree(index))


@settings(max_examples=40)
@given(st.integers(0, 99), st.sampled_from([1, 5, 70]))
def test_all_blocks_are_in_the_tree_once_with_their_holders(number: int, workers: int) -> None:
    """After any life: each run is a way through the parents, and its holders are those of the model."""
    model: IndexModel = filled(number, workers)
    found = tree(model.index, limit=10_000)
    assert found.total == len(found.runs)
    assert sum(run.blocks for run in found.runs) == found.blocks == len(model.known())
    tiers = ("gpu", "cpu", "disk", "external")
    above: list[TokenRun] = []
    for run in found.runs:
        del above[run.level :]
        block = int(run.last, 16)
        for _ in range(run.blocks):
            held = {
                name: tuple(sorted(w for w, blocks in model.held.items() if blocks[tier, block]))
                for tier, name in enumerate(tiers)
            }
            assert run.held == {name: workers for name, workers in held.items() if workers}
            first, block = block, PARENTS[block]
        assert int(run.first, 16) == first
        assert run.parent == (f"{block:016x}" if block else "")
        assert (run.level == 0) == (block not in model.known())
        if above:
            assert run.parent == above[-1].last
        depth = next(chain.index(first) for chain in CHAINS if first in chain)
        assert run.depth in (-1, depth)
        above.append(run)
