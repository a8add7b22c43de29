"""The model of step times: what it learns, from what, and what it says before."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.engines.sim import StepTime
from headwater.router.estimates import CLASSES_MIN, SAMPLES_MIN, StepModel, learn_pace

TRUE = StepTime()


def seconds(tokens: int) -> float:
    """Milliseconds of the simulator's step, chunks of 8,192 tokens one after the other."""
    chunks, rest = divmod(tokens, 8_192)
    return 1000 * (chunks * TRUE.seconds(8_192, 0.0, False) + TRUE.seconds(rest, 0.0, False))


def taught(count: int, noise: float = 0.0, seed: int = 1) -> StepModel:
    """A model after so many samples; every fifth one is `noise` times too long."""
    draw = random.Random(seed)
    model = StepModel()
    for number in range(count):
        tokens = round(2 ** draw.uniform(3, 16.5))
        model.observe(tokens, seconds(tokens) * (1 + noise * (number % 5 == 0)))
    return model


@pytest.mark.parametrize("tokens", [20, 100, 1_000, 4_000, 8_000, 30_000, 80_000])
@pytest.mark.parametrize("noise", [0.0, 8.0])
def test_it_finds_the_simulators_times(tokens: int, noise: float) -> None:
    """Within a tenth; samples of prompts that shared their steps pull it up by no more than a quarter."""
    ratio = taught(600, noise).predict(tokens) / seconds(tokens)
    assert 0.9 < ratio < (1.1 if not noise else 1.25)


def test_it_says_when_it_knows_too_little() -> None:
    """Many samples of one length tell nothing of other lengths; nor do few of many."""
    model = StepModel()
    for _ in range(5 * SAMPLES_MIN):
        model.observe(1_000, 30.0)
    assert not model.learned
    model.observe(4_000, 80.0)
    assert model.learned == (CLASSES_MIN == 2)
    assert not taught(SAMPLES_MIN - 1).learned


def test_it_follows_an_engine_that_becomes_slower() -> None:
    """Twice as slow from now on (another model on the same GPU, say): learned within some hundred samples."""
    model = taught(600)
    draw = random.Random(3)
    for _ in range(1_500):
        tokens = round(2 ** draw.uniform(3, 16.5))
        model.observe(tokens, 2 * seconds(tokens))
    assert 1.8 < model.predict(4_000) / seconds(4_000) < 2.2


@pytest.mark.parametrize("factor", [0.25, 4.0])
def test_a_wrong_first_sample_is_unlearned(factor: float) -> None:
    """Four times too fast or too slow, before 40 good ones of the class; a single outlier among good ones moves it by no more than 3 %."""
    model = StepModel()
    for _ in range(5):
        model.observe(10_000, factor * seconds(10_000))
    for number in range(40):
        model.observe(10_000 + number, seconds(10_000 + number))
        model.observe(1_000, seconds(1_000))
    assert model.predict(10_000) / seconds(10_000) == pytest.approx(1.0, rel=0.12)
    before = model.predict(10_000)
    model.observe(10_000, 50 * before)
    assert model.predict(10_000) / before == pytest.approx(1.0, rel=0.03)


@pytest.mark.parametrize("factor", [0.25, 4.0])
def test_a_worker_that_changes_its_speed_is_known_by_ten_samples(factor: float) -> None:
    """And one that pauses twice now and then keeps its pace: two outliers in a row move it by little."""
    pace, outliers = 1.0, 0
    for number in range(100):
        pace, outliers = learn_pace(pace, 30.0 if number % 10 < 2 else 1.0, outliers)
    assert pace == pytest.approx(1.0, abs=0.05)
    for _ in range(10):
        pace, outliers = learn_pace(pace, factor, outliers)
    assert pace == pytest.approx(factor, rel=0.5)
    for _ in range(10):
        pace, outliers = learn_pace(pace, factor, outliers)
    assert pace == pytest.approx(factor, rel=0.21)


@given(
    st.lists(st.tuples(st.integers(-5, 200_000), st.floats(-5, 1e6)), max_size=200), st.integers(0, 300_000)
)
def test_any_samples_give_times_that_grow_with_the_prompt(
    samples: list[tuple[int, float]], tokens: int
) -> None:
    """No sample, however odd, makes a negative time."""
    model = StepModel()
    for length, ms in samples:
        model.observe(length, ms)
    assert model.tokens == sorted(model.tokens)
    if model.learned:
        assert model.predict(0) == 0.0
        assert model.predict(max(1, tokens)) > 0.0
