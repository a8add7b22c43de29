"""The prefix index: paths, parked blocks, tiers, growth, and digests that depend on content alone."""

import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.router.index.hash_table import FILL_MAX
from headwater.router.index.prefix_index import ROWS_MIN, PrefixIndex
from headwater.router.index.update import TOP
from headwater.schemas.hashing import U64, chain_plain, seed
from tests.support.data.examples import keys
from tests.support.data.index_model import scatter


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


@given(st.randoms(use_true_random=False), st.sampled_from([1, 5, 70, 130]), st.booleans(), st.booleans())
def test_long_prompts_with_holes_anywhere(
    draw: random.Random, workers: int, in_order: bool, scattered: bool
) -> None:
    """Hundreds of blocks, stored in pieces that do or do not lie in order; each worker ends where it lost a block."""
    index = index_with(*(f"w{number}" for number in range(workers)))
    names = chain(1, 300)
    length = draw.choice((1, 31, 32, 33, 64, 65, 127, 200, 300))
    names = names[:length]
    tellers = draw.sample(sorted(index.slots), min(4, workers))
    held: dict[str, list[set[int]]] = {worker: [set(), set()] for worker in tellers}
    for worker in tellers:
        cuts = sorted({0, length, *(draw.randrange(length + 1) for _ in range(draw.choice((0, 3, 20))))})
        pieces = list(pairwise(cuts))
        if not in_order:
            draw.shuffle(pieces)
        for first, last in pieces:
            tier = draw.choice((0, 0, 0, 3))
            index.store(worker, tier, int(names[first - 1]) if first else 0, names[first:last])
            held[worker][tier > 0] |= set(range(first, last))
        for at in draw.sample(range(length), draw.choice((0, 0, 1, min(length, 3)))):
            tier = 0 if at in held[worker][0] else 3
            assert index.remove(worker, tier, names[at : at + 1]) == 0
            held[worker][tier > 0].discard(at)
    if scattered:
        scatter(index, length)
    asked = np.concatenate([names, chain(2, draw.choice((0, 1, 40)))])
    for worker in index.slots:
        on_gpu, below = held.get(worker, [set(), set()])
        wanted = (
            next(at for at in range(length + 1) if at not in on_gpu),
            next(at for at in range(length + 1) if at not in on_gpu | below),
        )
        assert depths(index, worker, asked) == wanted
    assert index.find(asked)[0] == max(depths(index, worker, asked)[1] for worker in tellers)


def test_rows_that_were_freed_are_taken_in_order_again() -> None:
    """Whichever end of a chain went first, the next chain lies in neighbouring rows, and no memory is added."""
    for order in (slice(None), slice(None, None, -1)):
        index = index_with("a")
        for number in range(4):
            index.store("a", 0, 0, chain(number, 64))
        for number in (1, 2):
            assert index.remove("a", 0, chain(number, 64)[order]) == 0
        for number in (5, 6):
            index.store("a", 0, 0, chain(number, 64))
            rows = [
                index.slab[0, : index.capacity].tolist().index(name) for name in chain(number, 64).tolist()
            ]
            assert rows == list(range(rows[0], rows[0] + 64))
        assert (index.rows, index.scratch[TOP]) == (256, 256)


def test_a_block_decoded_later_lies_behind_the_one_before_it() -> None:
    """Single blocks are told as they are decoded: each takes the row behind its parent where that is free."""
    index = index_with("a")
    index.store("a", 0, 0, chain(1, 64))
    index.remove("a", 0, chain(1, 64)[32:])
    for depth in range(32, 64):
        index.store("a", 0, int(chain(1, 64)[depth - 1]), chain(1, 64)[depth : depth + 1])
    assert index.slab[0, :64].tolist() == chain(1, 64).tolist()


def test_blocks_beyond_the_bound_are_refused_and_counted() -> None:
    """A new block is not noted, a known one is; room that comes back is given again; a hole is no hit."""
    index = PrefixIndex(10)
    for worker in "ab":
        index.add_worker(worker)
    index.store("a", 0, 0, chain(1, 8))
    index.store("b", 0, 0, chain(2, 8))
    assert (index.rows, index.refused, index.blocks) == (10, 6, {"a": 8, "b": 2})
    assert depths(index, "b", chain(2, 8)) == (2, 2)
    index.store("b", 0, 0, chain(1, 8))
    assert (index.refused, depths(index, "b", chain(1, 8))) == (6, (8, 8))
    assert index.remove("b", 0, chain(2, 8)) == 6
    index.store("b", 0, int(chain(2, 8)[1]), chain(2, 8)[2:4])
    assert (index.rows, index.refused, depths(index, "b", chain(2, 8))) == (10, 6, (0, 0))
    with pytest.raises(ValueError, match="max_blocks is 0"):
        PrefixIndex(0)


def test_a_worker_is_removed_without_a_look_at_the_others_pages() -> None:
    """Only pages where it is counted are looked at: a bit of it elsewhere would stay."""
    index = index_with("a", "b")
    index.store("a", 0, 0, chain(1, 100))
    index.store("b", 0, 0, chain(2, 10_000))
    index.store("a", 2, int(chain(2, 10_000)[-2]), chain(2, 10_000)[-1:])
    assert sorted(np.flatnonzero(index.pages[index.slots["a"]]).tolist()) == [0, 19]
    index.clear("a")
    assert not index.pages[index.slots["a"]].any()
    assert (index.rows, index.blocks) == (10_000, {"a": 0, "b": 10_000})
    assert depths(index, "b", chain(2, 10_000)) == (10_000, 10_000)


def test_thousands_of_workers_have_places_and_those_of_the_gone_are_given_again() -> None:
    """The lowest free one first."""
    index = index_with(*(f"w{number}" for number in range(2_100)))
    for number in (0, 63, 64, 1_000, 2_099):
        index.store(f"w{number}", number % 4, 0, chain(3, 40))
    for number in (0, 63, 64, 1_000, 2_099):
        assert depths(index, f"w{number}", chain(3, 40)) == (40 if number % 4 == 0 else 0, 40)
    for number in (64, 1_000, 5):
        index.drop_worker(f"w{number}")
    for name, slot in (("x", 5), ("y", 64), ("z", 1_000), ("more", 2_100)):
        index.add_worker(name)
        assert index.slots[name] == slot
        assert depths(index, name, chain(3, 40)) == (0, 0)


@pytest.mark.parametrize("tier", [0, 1])
def test_each_hole_of_a_long_prompt_is_seen(tier: int) -> None:
    """Wherever one of two workers lost a block, it ends there and the other does not."""
    index, names = index_with("a", "b"), chain(1, 140)
    for worker in "ab":
        index.store(worker, tier, 0, names)
    for at in range(140):
        index.remove("b", tier, names[at : at + 1])
        assert (depths(index, "a", names)[1], depths(index, "b", names)[1]) == (140, at)
        index.store("b", tier, 0, names[at : at + 1])
