"""The table without its empty rows: every row comes back where it was."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.router import packing
from headwater.router.packing import pack, unpack
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
