"""How long answers are expected to be: from answers with limits of the same size, else from all, else from the limit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.router.fold.output_length import MEMORY, UNKNOWN_TOKENS, OutputLengths


def test_until_there_is_an_answer_the_limit_is_expected() -> None:
    """Unless it is so large that hardly any answer reaches it."""
    nothing = OutputLengths()
    assert [nothing.expect(limit) for limit in (0, 1, 40, 100_000)] == [0, 1, 40, UNKNOWN_TOKENS]


def test_answers_use_a_share_of_their_limit() -> None:
    """Limits below the next power of two form a class; a class without answers takes the mean of all, up to the limit."""
    lengths = OutputLengths()
    for _ in range(10):
        lengths.observe(100, 100)
        lengths.observe(8_000, 400)
    assert [lengths.expect(limit) for limit in (64, 100, 127)] == [64, 100, 127]
    assert lengths.expect(4_800) == 240
    assert lengths.expect(2_000) == 250
    assert lengths.expect(30) == 30
    # Nothing generates more than its limit: one that says so counts for its limit.
    counted = OutputLengths()
    counted.observe(10, 9_000)
    assert counted.expect(2_000) == 10


def test_it_follows_other_answers() -> None:
    """A few times `MEMORY` later, only the new ones count."""
    lengths = OutputLengths()
    for _ in range(500):
        lengths.observe(1_000, 1_000)
    for _ in range(5 * MEMORY):
        lengths.observe(1_000, 200)
    assert lengths.expect(1_000) == pytest.approx(200, rel=0.05)


@given(st.lists(st.tuples(st.integers(-1, 1 << 70), st.integers(-1, 1 << 70))), st.integers(1, 1 << 70))
def test_the_limit_bounds_it(answers: list[tuple[int, int]], limit: int) -> None:
    """Whatever workers report."""
    lengths = OutputLengths()
    for answer in answers:
        lengths.observe(*answer)
    assert 1 <= lengths.expect(limit) <= limit
