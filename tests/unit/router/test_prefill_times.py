"""What a worker has computed of its queue since a load report that is late."""

from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.router.cost import Computed, estimate_computed

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
