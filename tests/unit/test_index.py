"""The prefix index: paths, parked blocks, tiers, growth, and digests that depend on content alone."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.router.index import ROWS_MIN, PrefixIndex
from headwater.router.lookup import FILL_MAX
from headwater.schemas.hashing import U64, chain_plain, seed
from tests.unit.examples import keys


def chain(number: int, blocks: int = 8, *, root: int = 0) -> U64:
    """A prompt's block names."""
    return np.array(chain_plain([number] * blocks, 1, root), np.uint64)


def index_with(*workers: str) -> PrefixIndex:
    index = PrefixIndex()
    for worker in workers:
        index.add_worker(worker)
    return index


def depths(index: PrefixIndex, worker: str, hashes: U64) -> tuple[int, int]:
    """Blocks on GPU and on any tier."""
    _, found = index.find(hashes)
    slot = index.slots[worker]
    return int(found[0, slot]), int(found[1, slot])


def test_a_block_behind_a_hole_is_no_hit_until_the_hole_is_filled() -> None:
    """A block whose parent nobody holds is parked: counted, and unreachable from the start of a prompt."""
    index, names = index_with("a"), chain(1)
    index.store("a", 0, 0, names[:2])
    index.store("a", 0, int(names[2]), names[3:])
    assert index.rows == 7
    assert depths(index, "a", names) == (2, 2)
    index.store("a", 0, int(names[1]), names[2:3])
    assert depths(index, "a", names) == (8, 8)


def test_a_demotion_keeps_the_block_and_says_where_it_is() -> None:
    """Removed from the GPU with a copy left below, a block still counts as held, not as on the GPU."""
    index, names = index_with("a"), chain(1)
    index.store("a", 0, 0, names)
    for tier in (1, 3):
        index.store("a", tier, int(names[4]), names[5:])
    assert index.remove("a", 0, names[5:]) == 0
    assert depths(index, "a", names) == (5, 8)
    assert index.remove("a", 1, names[5:]) == 0
    assert depths(index, "a", names) == (5, 8), "the fourth tier has it still"
    assert index.remove("a", 3, names[5:]) == 0
    assert depths(index, "a", names) == (5, 5)
    assert index.rows == 5


def test_a_block_with_two_copies_is_gone_after_two_removals() -> None:
    """Copies are counted: engines announce each, and the first eviction leaves the other."""
    index, names = index_with("a"), chain(1)
    index.store("a", 0, 0, names)
    index.store("a", 0, 0, names)
    assert index.remove("a", 0, names) == 0
    assert depths(index, "a", names) == (8, 8)
    assert index.remove("a", 0, names) == 0
    assert index.remove("a", 0, names) == 8, "counts never fall below zero"
    index.store("a", 0, 0, names)
    assert index.remove("a", 0, names) == 0
    assert index.rows == 0


def test_what_one_worker_loses_another_keeps() -> None:
    """Removal, clear and leaving touch one worker's blocks only."""
    index, names = index_with("a", "b", "c", "d"), chain(1)
    for worker in "abcd":
        index.store(worker, 0, 0, names)
    index.remove("a", 0, names[4:])
    index.clear("b")
    index.drop_worker("c")
    assert [depths(index, worker, names)[0] for worker in "abd"] == [4, 0, 8]
    index.add_worker("e")
    assert depths(index, "e", names) == (0, 0), "whoever gets a place that was left starts with nothing"


def test_removing_what_was_never_stored_is_counted() -> None:
    """The number of unknown blocks is returned, on tiers that do not exist as well."""
    index, names = index_with("a"), chain(1)
    assert index.remove("a", 0, names) == 8
    assert index.remove("a", 3, names) == 8
    index.store("a", 0, 0, names[:3])
    assert index.remove("a", 0, names) == 5


def test_the_path_leads_from_the_prompts_start_to_a_block() -> None:
    """Parents are walked back, whichever way the blocks came in."""
    index, names = index_with("a", "b"), chain(1)
    index.store("b", 1, int(names[3]), names[4:])
    index.store("a", 0, 0, names[:4])
    for depth in range(1, 9):
        found = index.path(int(names[depth - 1]), 8)
        assert found is not None
        assert found.tolist() == names[:depth].tolist()


def test_a_path_may_start_at_a_seeded_root() -> None:
    """Prompts with a salt or an adapter have a root that is no block; their path ends there."""
    index, names = index_with("a"), chain(1, root=seed("adapter", "salt"))
    index.store("a", 0, seed("adapter", "salt"), names)
    found = index.path(int(names[-1]), 8)
    assert found is not None
    assert found.tolist() == names.tolist()


def test_there_is_no_path_to_an_unknown_block_or_beyond_a_length() -> None:
    """None stands for both, and for a path of no blocks."""
    index, names = index_with("a"), chain(1)
    index.store("a", 0, 0, names)
    assert index.path(12345, 8) is None
    assert index.path(int(names[-1]), 7) is None
    assert index.path(0, 8) is None


def test_growing_loses_nothing() -> None:
    """Far beyond its first capacity, and over more workers than one word has bits, all is still found."""
    index = index_with(*(f"w{number}" for number in range(200)))
    prompts = {f"w{number}": chain(number, 100) for number in range(200)}
    for number, (worker, names) in enumerate(prompts.items()):
        index.store(worker, number % 4, 0, names)
    assert index.rows == 20_000
    assert index.rows <= FILL_MAX * len(index.table)
    assert index.rows <= index.capacity
    for number, (worker, names) in enumerate(prompts.items()):
        assert depths(index, worker, names) == (100 if number % 4 == 0 else 0, 100)
    for worker in prompts:
        index.clear(worker)
    assert index.rows == 0
    assert not index.table.any(), "nothing is left behind in the table"
    assert not index.slab[0, : index.capacity].any()
    assert not index.slab[2:].any()
    assert not index.pages.any()


@settings(deadline=None, max_examples=60)
@given(st.randoms(use_true_random=False), st.integers(0, 40), st.booleans())
def test_equal_content_has_an_equal_digest(draw: random.Random, detours: int, wide: bool) -> None:
    """Order, detours and a table that grew on the way do not show; content does."""
    facts = [
        (worker, tier, number, depth)
        for worker in "abc"
        for tier in (0, 1)
        for number in range(4)
        for depth in range(8)
        if draw.random() < 0.5
    ]

    def build(order: list[tuple[str, int, int, int]]) -> PrefixIndex:
        index = index_with("a", "b", "c")
        for worker, tier, number, depth in order:
            names = chain(number)
            parent = int(names[depth - 1]) if depth else 0
            index.store(worker, tier, parent, names[depth : depth + 1])
        return index

    one, other = build(facts), build(draw.sample(facts, len(facts)))
    if wide:
        for number in range(70):
            other.add_worker(f"more{number}")
        other.store("more0", 3, 0, chain(99, ROWS_MIN))
    for number in range(detours):
        other.store("b", 0, 0, chain(100 + number))
        other.remove("b", 0, chain(100 + number))
    for number in range(70 if wide else 0):
        other.drop_worker(f"more{number}")
    assert one.digest() == other.digest()
    assert one.rows == other.rows
    one.store("c", 1, 0, keys(77))
    assert one.digest() != other.digest()


@pytest.mark.parametrize(
    ("worker", "tier", "parent"), [("b", 0, 0), ("a", 1, 0), ("a", 0, 5)], ids=["worker", "tier", "parent"]
)
def test_the_digest_sees_who_holds_a_block_where_and_behind_what(worker: str, tier: int, parent: int) -> None:
    """Each fact about one block shows in the number."""
    one, other = index_with("a", "b"), index_with("a", "b")
    one.store("a", 0, 0, keys(9))
    other.store(worker, tier, parent, keys(9))
    assert one.digest() != other.digest()
