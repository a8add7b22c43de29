"""The table without its empty rows: every row comes back where it was."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.router import packing
from headwater.router.packing import Packed, pack, prepare, unpack
from headwater.schemas.hashing import U64


def table(capacity: int, width: int, share: float, number: int) -> U64:
    """Random rows, about this share of them occupied."""
    draw = np.random.default_rng(number)
    made = draw.integers(1, 2**63, (capacity, width), dtype=np.uint64)
    made[draw.random(capacity) >= share] = 0
    return made


@settings(deadline=None, max_examples=100)
@given(st.sampled_from([64, 128, 4096]), st.integers(3, 9), st.floats(0, 1), st.integers(0, 99))
def test_a_table_comes_back_as_it_was(capacity: int, width: int, share: float, number: int) -> None:
    """Empty, full and anything between."""
    made = table(capacity, width, share, number)
    packed = pack(made, int(np.count_nonzero(made[:, 0])))
    assert packed.rows.shape == (np.count_nonzero(made[:, 0]), width)
    assert np.array_equal(unpack(packed), made)


@settings(deadline=None, max_examples=100)
@given(st.sampled_from([64, 128, 4096]), st.integers(3, 9), st.floats(0, 1), st.integers(0, 99))
def test_rows_move_forward_within_their_table(capacity: int, width: int, share: float, number: int) -> None:
    """Read into prepared room, no row is lost on the way, and no second table is made."""
    made = table(capacity, width, share, number)
    packed = pack(made, int(np.count_nonzero(made[:, 0])))
    arrays: dict[str, Any] = {"rows": np.empty_like(packed.rows), "taken": packed.taken}
    prepare(arrays)
    assert arrays["rows"].shape == packed.rows.shape
    arrays["rows"][:] = packed.rows
    unpacked = unpack(Packed(**arrays))
    assert np.array_equal(unpacked, made)
    assert unpacked is arrays["rows"].base or not len(packed.rows)


@pytest.mark.parametrize("first", [0, 40])
def test_full_rows_at_either_end_move_right(first: int) -> None:
    """All rows first (the longest way), or all last (no way at all)."""
    made = table(64, 4, 0, 1)
    made[first : first + 24] = np.arange(1, 25, dtype=np.uint64)[:, None]
    packed = pack(made, 24)
    arrays: dict[str, Any] = packed._asdict()
    prepare(arrays)
    arrays["rows"][:] = packed.rows
    assert np.array_equal(unpack(Packed(**arrays)), made)


def test_rows_of_another_array_are_not_moved_within_it() -> None:
    """A view of something else, even of a table's size, is left as it is."""
    made = table(64, 4, 0.5, 1)
    count = int(np.count_nonzero(made[:, 0]))
    packed = pack(made, count)
    other = np.zeros((64, 4), np.uint64)
    other[:count] = packed.rows
    before = other.copy()
    assert np.array_equal(unpack(Packed(other[:count], packed.taken)), made)
    assert np.array_equal(other, before)


def test_nothing_is_prepared_for_what_is_no_table() -> None:
    """Other names, types and forms are read as they are described."""
    rows, taken = np.ones((3, 4), np.uint64), np.ones(1, np.uint64)
    for arrays in (
        {"table": rows},
        {"rows": rows},
        {"rows": rows.astype(np.int64), "taken": taken},
        {"rows": rows[0], "taken": taken},
        {"rows": np.ones((65, 4), np.uint64), "taken": taken},
    ):
        same: dict[str, Any] = dict(arrays)
        prepare(same)
        assert all(same[name] is array for name, array in arrays.items())


def test_parts_unpacked_by_several_threads_fit_together() -> None:
    """Each part finds its first row by the bits before it."""
    made = table(4 * packing.PART_WORDS * packing.WORD_BITS, 4, 0.5, 1)
    made[: packing.PART_WORDS * packing.WORD_BITS] = 0
    assert np.array_equal(unpack(pack(made, int(np.count_nonzero(made[:, 0])))), made)


@pytest.mark.parametrize("count", [0, 5, 7, 64])
def test_a_table_with_another_number_of_rows_is_refused(count: int) -> None:
    """It was changed meanwhile, or its count is wrong; nothing is written beyond the room there is."""
    made = table(64, 4, 0, 1)
    made[3:9] = 7
    with pytest.raises(ValueError, match=f"6 rows, {count} were expected"):
        pack(made, count)
