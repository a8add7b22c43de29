"""The model of step times: what it learns, from what, and what it says before."""

import random
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.engines.sim import StepTime
from headwater.router.cost import Computed, estimate_computed
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


# What a worker has computed of its queue since a load report that is late.


MS: Final = 1_000_000
NOW_NS: Final = 1_000_000 * MS
LENGTHS, TIMES = (100.0, 1_000.0), (20.0, 110.0)
"""A step takes 10 ms, and 0.1 ms for each token."""

Queue = list[tuple[float, int]]
"""When each prompt was routed, in milliseconds before now, and its tokens."""


def computed(queue: Queue, *, since_ms: float, age_ms: float, pace: float = 1.0) -> Computed:
    """Of a worker that began the first prompt `since_ms` ago."""
    listed = [(NOW_NS - round(ago_ms * MS), tokens) for ago_ms, tokens in queue]
    began_ns = NOW_NS - round(since_ms * MS)
    return estimate_computed(LENGTHS, TIMES, 2, pace, listed, len(queue), began_ns, age_ms, NOW_NS)


def replayed(queue: Queue, since_ms: float) -> tuple[int, float]:
    """(prompts computed by now, milliseconds spent on the next one), step by step, for prompts that are computed one at a time."""
    free_ms = -since_ms
    for done, (ago_ms, tokens) in enumerate(queue):
        began_ms = max(free_ms, -ago_ms)
        if began_ms + 10 + 0.1 * tokens >= 0:
            return done, max(0.0, -began_ms)
        free_ms = began_ms + 10 + 0.1 * tokens
    return len(queue), 0.0


def test_nothing_is_computed_if_its_report_would_be_here() -> None:
    """Reports without delay: a prompt that should be done is late, however long it took."""
    assert computed([(500, 900), (400, 900)], since_ms=500, age_ms=0.0) == (0, 0, 100.0)


def test_what_fits_into_the_age_of_the_report_is_computed() -> None:
    """Three prompts of 50 ms that were routed together, begun 120 ms ago; steps are shared, so two take 90 ms, and three 130 ms."""
    queue = [(200.0, 400), (200.0, 400), (200.0, 400)]
    assert computed(queue, since_ms=120, age_ms=500) == pytest.approx((2, 800, 30.0))
    assert computed(queue, since_ms=140, age_ms=500) == (3, 1_200, 0.0)
    assert computed(queue, since_ms=120, age_ms=500, pace=2.0) == pytest.approx((1, 400, 20.0))


def test_a_prompt_that_took_longer_than_predicted_was_not_done_when_the_report_left() -> None:
    """Half of the 60 ms since then are assumed to have been used: of the next one 30 ms are spent."""
    assert computed([(900, 400), (800, 400)], since_ms=900, age_ms=60) == pytest.approx((1, 400, 30.0))


def test_the_worker_is_idle_until_the_next_prompt_comes() -> None:
    """A prompt routed 10 ms ago cannot have been computed for longer, though the worker was free."""
    assert computed([(200, 400), (10, 400)], since_ms=200, age_ms=500) == pytest.approx((1, 400, 10.0))


@given(st.lists(st.tuples(st.integers(1, 400), st.integers(1, 900)), min_size=1, max_size=8))
def test_prompts_that_come_when_the_worker_is_idle_are_computed_one_after_the_other(gaps: Queue) -> None:
    """The same as step by step."""
    ago_ms, queue = 0.0, []
    for gap_ms, tokens in gaps:
        ago_ms += gap_ms + 10 + 0.1 * tokens
        queue.append((ago_ms, tokens))
    queue.reverse()
    done, spent_ms = replayed(queue, queue[0][0])
    found = computed(queue, since_ms=queue[0][0], age_ms=1e9)
    assert found == pytest.approx((done, sum(tokens for _, tokens in queue[:done]), spent_ms), abs=1e-4)
