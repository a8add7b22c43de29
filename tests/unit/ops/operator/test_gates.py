"""Gates: what they say of two sides, with how much confidence, and which ones cannot be written."""

import random
from collections import deque

import pytest

from headwater.ops.config.setting import ConfigError
from headwater.ops.operator.rollout_gates import (
    DEFAULT_GATES,
    Answers,
    Outcome,
    Side,
    judge,
    parse_gates,
    quantile_low,
    summary,
    wilson_low,
)


def side(attempts: int = 0, failures: int = 0, ttft: float = 0.0, itl: float = 0.0, seed: int = 1) -> Side:
    """A side with so many attempts, whose times spread by a fifth around these."""
    draw = random.Random(seed)

    def times(mean: float) -> deque[float]:
        return deque(draw.uniform(0.8, 1.2) * mean for _ in range(attempts if mean else 0))

    return Side(attempts, failures, times(ttft), times(itl), "r1: the engine is dead")


@pytest.mark.parametrize(
    ("new", "old", "outcome", "text"),
    [
        (side(100, 0), side(1_000, 3), "passes", "0 of 100 attempts failed against 3 of 1000 attempts"),
        (side(3, 3), side(20, 0), "fails", "3 of 3 attempts failed against 0 of 20 attempts"),
        (side(100, 1), side(1_000, 0), "passes", "1 of 100"),
        (side(100, 9), side(1_000, 0), "fails", "The last one: r1: the engine is dead"),
        (side(100, 9), side(1_000, 90), "passes", "9 of 100"),
        (side(49, 0), side(1_000, 0), "open", "too few to judge by: new side 49 of 50 requests"),
        (side(), side(), "open", "new side 0 of 50 requests, old side 0 of 50 requests"),
        (side(100, 0), side(), "open", "old side 0 of 50 requests"),
    ],
)
def test_errors(new: Side, old: Side, outcome: Outcome, text: str) -> None:
    """A point more than the old side, with confidence; nothing is passed on too few requests."""
    [found] = judge([("errors", 1.0)], new, old, 50)
    assert (found.gate, found.outcome) == ("errors", outcome)
    assert text in found.text


@pytest.mark.parametrize(
    ("new", "old", "outcome"),
    [
        (side(200, ttft=100), side(200, ttft=100, seed=2), "passes"),
        (side(200, ttft=140), side(200, ttft=100, seed=2), "passes"),
        (side(200, ttft=200), side(200, ttft=100, seed=2), "fails"),
        (side(10, ttft=300), side(200, ttft=100, seed=2), "fails"),
        (side(20, ttft=100), side(200, ttft=100, seed=2), "open"),
        (side(200, ttft=200), side(3, ttft=100, seed=2), "open"),
        (side(200), side(200, ttft=100), "open"),
    ],
)
def test_times(new: Side, old: Side, outcome: Outcome) -> None:
    """Half as much again as the old side's percentile, with confidence."""
    [found] = judge([("ttft_p90", 1.5)], new, old, 50)
    assert found.outcome == outcome, found.text


def test_times_between_tokens_are_of_their_own() -> None:
    """A slow decoder fails its gate and not that of the first token; both are in the reason."""
    verdicts = judge(DEFAULT_GATES, side(100, ttft=50, itl=90), side(100, ttft=50, itl=20, seed=2), 50)
    assert [(one.gate, one.outcome) for one in verdicts] == [
        ("errors", "passes"),
        ("ttft_p90", "passes"),
        ("itl_p90", "fails"),
    ]
    assert summary(verdicts, "fails").startswith("itl_p90: ")


@pytest.mark.parametrize(
    ("answers", "outcome"),
    [
        (None, "open"),
        (Answers(0, 0, "line 1: status 503"), "open"),
        (Answers(10, 9), "passes"),
        (Answers(10, 8, "line 3 differs first"), "fails"),
    ],
)
def test_answers(answers: Answers | None, outcome: Outcome) -> None:
    """The share of equal ones."""
    [found] = judge([("answers", 0.9)], side(), side(), 50, answers)
    assert found.outcome == outcome
    if answers is not None and answers.differs:
        assert answers.differs in found.text


def test_a_gate_of_a_later_release_is_not_passed() -> None:
    """Its name is in the log: what it asks for cannot be seen here."""
    [found] = judge([("tokens_per_joule", 2.0)], side(500), side(500), 1)
    assert found.outcome == "open"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("erors=1", "there is no gate 'erors'; gates are: errors, ttft_p1 to ttft_p99"),
        ("ttft_p100=1", "there is no gate 'ttft_p100'"),
        ("ttft=1", "there is no gate 'ttft'"),
        ("errors", "write errors=LIMIT, with a limit from 0 to 100"),
        ("errors=many", "write errors=LIMIT"),
        ("errors=nan", "write errors=LIMIT"),
        ("answers=2", "write answers=LIMIT, with a limit from 0 to 1"),
    ],
)
def test_gates_that_cannot_be_written(text: str, reason: str) -> None:
    """Each error names the gate, and what can be written."""
    with pytest.raises(ConfigError, match="--gate") as error:
        parse_gates([text])
    assert reason in str(error.value)
    with pytest.raises(ConfigError, match="has two limits"):
        parse_gates(["errors=1", "errors=2"])
    assert parse_gates(["ttft_p99=2", "errors=0.5"]) == (("ttft_p99", 2.0), ("errors", 0.5))
    assert parse_gates([]) == DEFAULT_GATES


def test_intervals_hold_as_often_as_they_say() -> None:
    """In at most 5 % of samples the lower end is above the truth (with four standard deviations of the count)."""
    draw, above_rate, above_quantile, rounds = random.Random(5), 0, 0, 2_000
    for _ in range(rounds):
        failures = sum(draw.random() < 0.2 for _ in range(60))
        above_rate += wilson_low(failures, 60) > 0.2
        values = [draw.random() for _ in range(60)]
        low = quantile_low(values, 0.9)
        above_quantile += low is not None and low > 0.9
    most = 0.05 * rounds + 4 * (0.05 * 0.95 * rounds) ** 0.5
    # Wilson's interval is approximate: it may miss a little more often.
    assert above_rate < 1.3 * most
    assert above_quantile < most
    assert above_quantile > 0
