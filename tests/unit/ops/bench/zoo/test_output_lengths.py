"""The measurement of expected output tokens: each answer is learned later, and what is expected never looks ahead."""

import pytest

from headwater.ops.bench.zoo.output_lengths import LAG, LIMIT, AnswerSample, main, measure, traffic
from headwater.router.fold.output_length import UNKNOWN_TOKENS


def test_nothing_is_known_of_the_first_answers() -> None:
    """Not before the first of them is learned."""
    found = measure([[AnswerSample(number, 100, 1_000) for number in range(LAG)]])
    assert (found.by_limit, found.by_tenant) == (1_000 - UNKNOWN_TOKENS, 1_000 - UNKNOWN_TOKENS)
    assert (found.constant, found.within_p90) == (0, 0)


def test_tenants_and_prompts_that_differ_are_found() -> None:
    """Half of the requests have short prompts and half of their tenants long answers: both halve the error."""
    stream = [
        AnswerSample(number, 100 if number % 4 < 2 else 5_000, 100 + 400 * (number % 4), f"t{number % 2}")
        for number in range(4_000)
    ]
    found = measure([stream, stream])
    assert found.requests == 8_000
    assert found.mean == 700
    assert found.by_limit == pytest.approx(400, rel=0.1)
    assert found.by_prompt == pytest.approx(200, rel=0.1)
    assert found.by_tenant < 150


def test_the_mix_has_tenants_of_several_classes() -> None:
    """By arrival, equal for equal seeds; without tenants it is the same traffic."""
    found = traffic("mixed", 500, 3)
    assert found == traffic("mixed", 500, 3) == sorted(found)
    assert len({one.tenant for one in found}) == 20
    assert [one.tokens for one in traffic("mixed, without tenants", 500, 3)] == [one.tokens for one in found]
    assert max(one.tokens for one in found) <= LIMIT


def test_the_command_prints_every_class(capsys: pytest.CaptureFixture[str]) -> None:
    """Over all seeds."""
    main(["--seeds", "1,2", "--requests", "60"])
    text = capsys.readouterr().out
    assert text.startswith("seeds 1,2")
    assert "conversation trace" in text
    assert "two_speeds" in text
