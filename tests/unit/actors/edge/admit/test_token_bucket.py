"""The token bucket: what it admits in any window, waits that are exact, debt, and its headers."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.actors.edge.admit.account import TokenBucket
from headwater.actors.edge.admit.limiter import duration

MINUTE_S = 60.0

per_minutes = st.integers(1, 100_000)
pauses = st.floats(0, 200, allow_nan=False)
steps = st.lists(st.tuples(pauses, st.integers(1, 5_000)), max_size=60)


def taken(bucket: TokenBucket, amount: float, now_s: float) -> bool:
    """Admit the amount if it fits now."""
    if bucket.wait_s(amount, now_s) > 0:
        return False
    bucket.charge(amount, now_s)
    return True


@given(per_minutes, steps)
def test_no_window_admits_more_than_a_burst_and_its_share_of_the_rate(
    per_minute: int, steps: list[tuple[float, int]]
) -> None:
    """Over every window: at most the capacity, and the rate times the window."""
    bucket, now_s = TokenBucket(per_minute, 0.0), 0.0
    admitted: list[tuple[float, int]] = []
    for pause_s, amount in steps:
        now_s += pause_s
        if taken(bucket, amount, now_s):
            admitted.append((now_s, amount))
    for first in range(len(admitted)):
        total = 0
        for at_s, amount in admitted[first:]:
            total += amount
            assert total <= per_minute + (at_s - admitted[first][0]) * per_minute / MINUTE_S + 1e-3


@given(per_minutes, st.lists(st.integers(1, 5_000), max_size=20), st.integers(1, 5_000))
def test_the_wait_is_exact(per_minute: int, charged: list[int], amount: int) -> None:
    """After it the amount fits; a moment earlier it does not; what is larger than the bucket never fits."""
    bucket = TokenBucket(per_minute, 5.0)
    for one in charged:
        bucket.charge(one, 5.0)
    wait_s = bucket.wait_s(amount, 5.0)
    if amount > per_minute:
        assert math.isinf(wait_s)
        return
    assert bucket.wait_s(amount, 5.0 + wait_s) == 0.0
    if wait_s > 0.01:
        fresh = TokenBucket(per_minute, 5.0)
        fresh.charge(sum(charged), 5.0)
        assert fresh.wait_s(amount, 5.0 + wait_s - 0.005) > 0


@given(per_minutes, st.integers(0, 100_000), st.integers(0, 100_000))
def test_what_is_given_back_is_there_again_and_no_more(per_minute: int, reserved: int, used: int) -> None:
    """A correction leaves exactly what was used; giving back more than that leaves an untouched bucket."""
    bucket = TokenBucket(per_minute, 0.0)
    bucket.charge(reserved, 0.0)
    bucket.charge(used - reserved, 0.0)
    assert bucket.used(0.0) == used
    bucket.charge(-2 * used, 0.0)
    assert bucket.used(0.0) == 0
    assert bucket.left(0.0) == per_minute


def test_a_debt_drains_before_anything_is_admitted() -> None:
    """Thrice the capacity: nothing for two minutes, then the rate."""
    bucket = TokenBucket(60, 0.0)
    bucket.charge(180, 0.0)
    assert bucket.left(0.0) == 0
    assert bucket.wait_s(1, 0.0) == pytest.approx(121.0)
    assert not taken(bucket, 1, 120.0)
    assert taken(bucket, 1, 121.0)
    assert not taken(bucket, 1, 121.5)


def test_a_clock_that_goes_back_gives_nothing() -> None:
    """An older time counts as the newest one."""
    bucket = TokenBucket(60, 100.0)
    bucket.charge(60, 100.0)
    assert bucket.used(50.0) == 60
    assert bucket.used(110.0) == pytest.approx(50)
    assert bucket.used(100.0) == pytest.approx(50)


def test_another_rate_keeps_what_is_used() -> None:
    """A limit that is raised or lowered while it is in use."""
    bucket = TokenBucket(60, 0.0)
    bucket.charge(60, 0.0)
    bucket.resize(120, 30.0)
    assert bucket.used(30.0) == pytest.approx(30)
    assert bucket.left(30.0) == 90
    bucket.resize(10, 30.0)
    assert bucket.left(30.0) == 0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0ms"),
        (0.0201, "21ms"),
        (0.9999, "1s"),
        (1.5, "1.5s"),
        (12, "12s"),
        (59.9999, "1m0s"),
        (60, "1m0s"),
        (360, "6m0s"),
        (90.25, "1m30.25s"),
        (7200, "120m0s"),
    ],
)
def test_durations_are_written_as_openai_does(seconds: float, text: str) -> None:
    """Rounded up, so that a client that waits as told is admitted."""
    assert duration(seconds) == text
