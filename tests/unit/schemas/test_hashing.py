"""Sequence hashes: what equal and unequal hashes stand for, and that both implementations agree."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.schemas.hashing import (
    ROOT,
    chain_plain,
    pack_hashes,
    pack_tokens,
    seed,
    sequence_hashes,
    unpack_hashes,
    unpack_tokens,
)
from tests.support.data.examples import U64_MAX, texts

tokens_lists = st.lists(st.integers(0, 2**32 - 1), max_size=200)
sizes = st.integers(1, 40)
parents = st.integers(0, U64_MAX)
digests = st.integers(0, U64_MAX)


def hashed(tokens: list[int], size: int, parent: int = ROOT) -> list[int]:
    return [int(one) for one in sequence_hashes(np.array(tokens, np.uint32), size, parent=parent)]


@given(tokens_lists, sizes, parents, st.dictionaries(st.integers(0, 20), digests, max_size=4))
def test_the_compiled_hash_equals_the_plain_one(
    tokens: list[int], size: int, parent: int, items: dict[int, int]
) -> None:
    """For any tokens, block size, parent and multimodal items, both give the same numbers."""
    extra = [items.get(block, 0) for block in range(len(tokens) // size)] if items else []
    ours = sequence_hashes(np.array(tokens, np.uint32), size, parent=parent, multimodal=list(items.items()))
    assert ours.dtype == np.uint64
    assert ours.tolist() == chain_plain(tokens, size, parent, extra)


@given(tokens_lists, sizes, parents, st.integers(0, 20))
def test_hashing_in_two_parts_equals_hashing_the_whole(
    tokens: list[int], size: int, parent: int, blocks: int
) -> None:
    """The hash of the block before is all that the next one needs of the past."""
    whole = hashed(tokens, size, parent)
    blocks = min(blocks, len(whole))
    first = hashed(tokens[: blocks * size], size, parent)
    rest = hashed(tokens[blocks * size :], size, first[-1] if first else parent)
    assert first + rest == whole


@given(tokens_lists, sizes, st.data())
def test_a_changed_token_renames_its_block_and_all_after_it(
    tokens: list[int], size: int, data: st.DataObject
) -> None:
    """Equal hash means equal prefix: blocks before the change keep their names, no other does."""
    before = hashed(tokens, size)
    if not before:
        return
    at = data.draw(st.integers(0, len(before) * size - 1))
    changed = [*tokens]
    changed[at] ^= 1 << data.draw(st.integers(0, 31))
    after = hashed(changed, size)
    assert after[: at // size] == before[: at // size]
    assert not set(after[at // size :]) & set(before)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=120), sizes)
def test_no_block_is_named_like_the_root_or_like_another(tokens: list[int], size: int) -> None:
    """Hashes of one chain are distinct and never 0, however monotonous the tokens are."""
    chain = hashed(tokens, size)
    assert ROOT not in chain
    assert len(set(chain)) == len(chain)


def test_a_partial_block_has_no_name() -> None:
    """Only full blocks are hashed; a longer prompt names its earlier blocks the same."""
    assert hashed([1, 2, 3], 4) == []
    assert hashed([1, 2, 3, 4, 5], 4) == hashed([1, 2, 3, 4], 4)
    assert hashed([], 1) == []


def test_adapters_and_salts_never_share_a_block() -> None:
    """The chain's root differs by LoRA name and by salt, and cannot be moved from one to the other."""
    roots = [
        seed(),
        seed("a"),
        seed("", "a"),
        seed("a", "a"),
        seed("ab"),
        seed("a", "b"),
        seed("", "ab"),
        seed("b", "a"),
    ]
    assert roots[0] == ROOT
    assert len(set(roots)) == len(roots)


@given(texts, texts, texts, texts)
def test_only_equal_pairs_have_equal_roots(lora: str, salt: str, lora2: str, salt2: str) -> None:
    """No text in one field can imitate another pair."""
    assert (seed(lora, salt) == seed(lora2, salt2)) == ((lora, salt) == (lora2, salt2))
    assert 0 <= seed(lora, salt) <= U64_MAX


def test_a_multimodal_item_renames_the_block_it_overlaps_and_those_after_it() -> None:
    """The same placeholder tokens with another image are another prefix from there on."""
    tokens = np.arange(12, dtype=np.uint32)
    plain, cat, dog = (
        sequence_hashes(tokens, 4, multimodal=items).tolist() for items in ([], [(1, 111)], [(1, 222)])
    )
    assert plain[0] == cat[0] == dog[0]
    assert len({plain[1], cat[1], dog[1], plain[2], cat[2], dog[2]}) == 6
    beyond = sequence_hashes(tokens, 4, multimodal=[(3, 111)]).tolist()
    assert beyond == plain, "an item behind the last full block names nothing"


def test_items_that_overlap_one_block_count_in_either_order() -> None:
    """Whoever lists the items first gets the same name; the order of listing is no content."""
    tokens = np.arange(4, dtype=np.uint32)
    one = sequence_hashes(tokens, 4, multimodal=[(0, 5), (0, U64_MAX)])
    assert one.tolist() == sequence_hashes(tokens, 4, multimodal=[(0, U64_MAX), (0, 5)]).tolist()
    assert one.tolist() != sequence_hashes(tokens, 4, multimodal=[(0, 5)]).tolist()


def test_the_same_item_twice_in_a_block_is_not_no_item() -> None:
    """Two copies of one image must not cancel out: that prompt is not the prompt without images."""
    tokens = np.arange(4, dtype=np.uint32)
    names = [
        sequence_hashes(tokens, 4, multimodal=items).tolist()
        for items in ([], [(0, 5)], [(0, 5), (0, 5)], [(0, 6), (0, 6)])
    ]
    assert len({tuple(name) for name in names}) == 4


def test_senseless_arguments_are_refused() -> None:
    """A block size below one and a block before the prompt raise ValueError that says so."""
    tokens = np.arange(4, dtype=np.uint32)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        sequence_hashes(tokens, 0)
    with pytest.raises(ValueError, match="must not be negative"):
        sequence_hashes(tokens, 2, multimodal=[(-1, 5)])


@given(tokens_lists, st.lists(digests, max_size=50))
def test_packing_gives_back_what_was_packed(tokens: list[int], names: list[int]) -> None:
    """Little-endian on every machine, and read without a copy."""
    assert unpack_tokens(pack_tokens(tokens)).tolist() == tokens
    assert unpack_hashes(pack_hashes(np.array(names, np.uint64))).tolist() == names
    assert pack_tokens([1]) == b"\x01\x00\x00\x00"
    assert pack_hashes(np.array([2], np.uint64)) == b"\x02" + bytes(7)


def test_torn_bytes_are_refused() -> None:
    """A length that is no whole number of items raises ValueError."""
    for unpack in (unpack_tokens, unpack_hashes):
        with pytest.raises(ValueError, match="multiple"):
            unpack(b"\x01\x02\x03\x04\x05\x06\x07\x08\x09")
