"""The index's arrays in a snapshot: everything comes back, of any release, and what does not fit is refused."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.router.index import pack
from headwater.router.index.prefix_index import PrefixIndex
from headwater.router.index.update import TOP
from tests.support.data.index_model import CHAINS, IndexModel


def filled(number: int, workers: int, *, emptied: bool = False) -> IndexModel:
    """An index with a life behind it; `emptied`: most of what it once held is gone."""
    draw, model = np.random.default_rng(number), IndexModel()
    model.join(workers)
    names = list(model.held)
    for _ in range(30):
        chain = CHAINS[draw.integers(len(CHAINS))]
        start = int(draw.integers(len(chain)))
        model.store(names[draw.integers(len(names))], int(draw.integers(4)), chain[start:])
        worker = names[draw.integers(len(names))]
        held = [block for tier, block in model.held[worker] if tier == 0]
        model.remove(worker, 0, held[: len(held) // 2])
    if emptied:
        for worker in names[1:]:
            model.clear(worker)
    return model


def adopted(index: PrefixIndex, arrays: pack.Arrays, **changed: int) -> PrefixIndex:
    """Another index with these arrays and this one's facts."""
    again = PrefixIndex()
    again.slots, again.blocks = dict(index.slots), dict(index.blocks)
    again.copies = {key: dict(copies) for key, copies in index.copies.items()}
    facts = {"rows": index.rows, "words": index.words, "tiers": index.tiers, **changed}
    again.adopt(arrays, **facts)
    return again


def as_read(arrays: pack.Arrays) -> pack.Arrays:
    """The same, each read from a store into the room that was prepared for it."""
    read: dict[str, Any] = {name: np.empty_like(array) for name, array in arrays.items()}
    pack.prepare(read)
    for name, array in arrays.items():
        assert read[name].flags.c_contiguous
        read[name][:] = array
    return read


@settings(max_examples=40)
@given(st.integers(0, 99), st.sampled_from([1, 5, 70, 130]), st.booleans(), st.booleans())
def test_an_index_comes_back_and_goes_on(number: int, workers: int, emptied: bool, prepared: bool) -> None:
    """With free rows or without them, and every part fits the others afterwards."""
    model = filled(number, workers, emptied=emptied)
    before = model.index.digest()
    arrays = model.index.packed()
    read = as_read(arrays) if prepared else arrays
    model.index = adopted(model.index, read)
    assert model.index.digest() == before
    model.check_layout()
    model.check_counts()
    names = list(model.held)
    model.store(names[0], 3, CHAINS[0])
    model.fill(names[-1])
    model.clear(names[-1])
    model.join(62)
    model.check_depths()
    model.check_layout()
    model.check_digest()


def test_columns_are_read_into_the_slab_itself() -> None:
    """No second slab is made for them where all columns are there."""
    index = PrefixIndex()
    index.add_worker("a")
    index.store("a", 0, 0, np.arange(1, 3000, dtype=np.uint64))
    read = as_read(index.packed())
    base = read["keys"].base
    again = adopted(index, read)
    assert again.slab is base
    index.store("a", 2, 0, np.arange(1, 3, dtype=np.uint64))
    read = as_read(index.packed())
    again = adopted(index, read)
    assert again.slab is not read["keys"].base, "nobody was ever on tier 1: it is not in the snapshot"
    assert again.digest() == index.digest()


def test_many_free_rows_are_left_out() -> None:
    """An index that was much larger once makes no large snapshots for ever."""
    index = PrefixIndex()
    for name in "ab":
        index.add_worker(name)
    index.store("a", 0, 0, np.arange(1, 1001, dtype=np.uint64))
    index.store("b", 0, 0, np.arange(2000, 2100, dtype=np.uint64))
    index.clear("a")
    arrays = index.packed()
    assert len(arrays["keys"]) == 100
    again = adopted(index, arrays)
    assert (again.scratch[TOP], again.digest()) == (100, index.digest())


def test_chains_take_little_more_than_their_names() -> None:
    """Parents and owners of neighbours are told once."""
    index = PrefixIndex()
    for name in "ab":
        index.add_worker(name)
    for at in range(1, 1001, 50):
        index.store("ab"[at % 2], 0, 0, np.arange(at, at + 50, dtype=np.uint64))
    arrays = index.packed()
    assert (len(arrays["parents"]), len(arrays["held-0-0"])) == (20, 1)
    assert adopted(index, arrays).digest() == index.digest()


def test_what_has_no_order_is_kept_as_it_is() -> None:
    """Single blocks with parents of their own: a whole column is shorter than its parts and their places."""
    index = PrefixIndex()
    index.add_worker("a")
    for number in range(1, 50):
        index.store("a", 0, number << 20, np.array([number], np.uint64))
    arrays = index.packed()
    assert "parents-at" not in arrays
    assert adopted(index, arrays).digest() == index.digest()


@pytest.mark.parametrize("change", [{"tiers": 3}, {"words": 1}, {"rows": 5}, {"rows": 10**6}])
def test_other_facts_are_refused(change: dict[str, int]) -> None:
    """Tiers, words and counts of another index."""
    index = filled(3, 70).index
    adopted(index, index.packed())
    with pytest.raises((ValueError, LookupError)):
        adopted(index, index.packed(), **change)


def test_other_arrays_are_refused() -> None:
    """Arrays that are missing, too short, of another type or of another index."""
    index, other = filled(3, 70).index, filled(4, 70).index
    sound = index.packed()
    for change in (
        {"keys": sound["keys"][1:]},
        {"keys": sound["keys"].astype("f8")},
        {"parents": sound["parents"].reshape(1, -1)},
        {"parents": sound["parents"][1:]},
        {"parents-at": np.zeros_like(sound["parents-at"])},
        {"parents-at": sound["parents-at"] + np.uint32(1)},
        {"parents-at": sound["parents-at"] * np.uint32(1000)},
        {"parents-at": sound["parents-at"].astype(np.int64)},
        {"pages": sound["pages"][:, 1:]},
        {"pages": sound["pages"].astype(np.int64)},
        {"pages": other.packed()["pages"]},
        {"more": sound["keys"]},
        other.packed(),
    ):
        with pytest.raises((ValueError, LookupError)):
            adopted(index, {**sound, **change})
    for name in ("keys", "parents"):
        with pytest.raises((ValueError, LookupError)):
            adopted(index, {key: array for key, array in sound.items() if key != name})


@pytest.mark.parametrize("more", [-1, 1, 500])
def test_an_index_with_another_number_of_rows_is_refused(more: int) -> None:
    """It was changed meanwhile, or its count is wrong; nothing is written beyond the room there is."""
    index = filled(3, 5).index
    rows = index.rows
    index.rows += more
    with pytest.raises(ValueError, match=f"{rows} rows, {rows + more} expected"):
        index.packed()


def test_nothing_is_prepared_for_what_is_no_slab() -> None:
    """Other names, types and forms are read as they are described."""
    one = np.ones(3, np.uint64)
    for arrays in (
        {"table": one},
        {"rows": one, "taken": one},
        {"keys": one},
        {"keys": one.astype(np.int64), "parents": one},
        {"keys": one.reshape(3, 1), "parents": one},
    ):
        same: dict[str, Any] = dict(arrays)
        pack.prepare(same)
        assert all(same[name] is array for name, array in arrays.items())
