"""The model of decode steps: what it learns, from what, and what it says of loads that it has not seen."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.router.estimates import (
    DECODE_FLOOR,
    DECODE_OUTLIER,
    MEMORY_TOKENS,
    DecodeModel,
    predict_step_ms,
)


def true_ms(requests: float, blocks: float) -> float:
    """Of an engine whose steps take longer with more requests and with more blocks."""
    return 6.0 + 0.8 * requests + 0.004 * blocks


def taught(count: int = 300, factor: float = 1.0, model: DecodeModel | None = None) -> DecodeModel:
    """After so many samples of any load."""
    draw = random.Random(1)
    model = model or DecodeModel()
    for _ in range(count):
        requests, blocks = draw.randrange(1, 32), draw.randrange(4_000)
        model.observe(factor * true_ms(requests, blocks), requests, blocks, draw.randrange(1, 200))
    return model


@pytest.mark.parametrize(("requests", "blocks"), [(1, 0), (1, 4_000), (32, 0), (32, 4_000), (16, 2_000)])
def test_it_finds_what_requests_and_blocks_add(requests: int, blocks: int) -> None:
    """Each by itself, within a few percent."""
    assert predict_step_ms(taught().line, requests, blocks) == pytest.approx(
        true_ms(requests, blocks), rel=0.04
    )


def test_a_sample_counts_by_its_tokens() -> None:
    """A report that follows a prompt is short, and most of its one gap is that prompt: it says little of a step."""
    model = DecodeModel()
    for _ in range(50):
        model.observe(10.0, 4, 100, 99)
        model.observe(30.0, 4, 100, 1)
    assert predict_step_ms(model.line, 4, 100) == pytest.approx(10.2, rel=0.005)


def test_a_load_that_never_varied_says_nothing_of_another() -> None:
    """The mean, whatever is asked; nothing at all before the first sample."""
    model = DecodeModel()
    assert predict_step_ms(model.line, 8, 900) == 0.0
    model.observe(9.0, 4, 500, 0)
    model.observe(0.0, 4, 500, 10)
    assert predict_step_ms(model.line, 8, 900) == 0.0
    for _ in range(20):
        model.observe(9.0, 4, 500, 50)
    assert predict_step_ms(model.line, 1, 0) == predict_step_ms(model.line, 64, 5_000) == pytest.approx(9.0)


def test_a_load_that_hardly_varied_says_little_of_another() -> None:
    """Far less than a line through points so close to each other would say."""
    model = DecodeModel()
    for number in range(100):
        model.observe(10.0 + number % 2 / 10, 100.0 + number % 2, 0, 20)
    # The line has 0.1 ms per request: 20 ms.
    assert predict_step_ms(model.line, 200, 0) == pytest.approx(10.05, abs=0.5)


def test_no_load_is_predicted_to_be_many_times_faster_than_what_was_seen() -> None:
    """A line through long steps may fall below zero for a load that was never seen."""
    model = DecodeModel()
    for number in range(100):
        model.observe(100.0 + 10 * (number % 11), 20 + number % 11, 0, 20)
    assert predict_step_ms(model.line, 1, 0) == pytest.approx(DECODE_FLOOR * 150, rel=0.01)


def test_load_never_makes_steps_faster() -> None:
    """Samples that say so (of an engine that warms up, say) are taken for the mean of what they are."""
    model = DecodeModel()
    for number in range(100):
        model.observe(30.0 - number / 5, 1 + number % 8, 10.0 * number, 20)
    low, high = predict_step_ms(model.line, 1, 0), predict_step_ms(model.line, 64, 2_000)
    assert low <= high
    assert DECODE_FLOOR * model.ms <= low


def test_it_follows_a_worker_that_becomes_slower_and_forgets_a_pause() -> None:
    """Twice as slow within a few memories; one gap of ten seconds counts as a few long steps."""
    model = taught()
    taught(300, 2.0, model)
    assert predict_step_ms(model.line, 16, 2_000) == pytest.approx(2 * true_ms(16, 2_000), rel=0.1)
    before = model.ms
    model.observe(10_000.0, 16, 2_000, 200)
    assert model.ms <= before * (1 + 200 / MEMORY_TOKENS * DECODE_OUTLIER)


@given(
    st.lists(
        st.tuples(st.floats(0, 1e6), st.integers(1, 10_000), st.integers(0, 1 << 40), st.integers(0, 1 << 40))
    ),
    st.integers(1, 1 << 20),
    st.integers(0, 1 << 40),
)
def test_no_sample_makes_it_negative_or_undefined(
    samples: list[tuple[float, int, int, int]], requests: int, blocks: int
) -> None:
    """Whatever workers report."""
    model = DecodeModel()
    for ms, running, used, tokens in samples:
        model.observe(ms, running, used, tokens)
    assert 0.0 <= predict_step_ms(model.line, requests, blocks) < float("inf")
