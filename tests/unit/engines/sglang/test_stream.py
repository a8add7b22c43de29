"""SGLang's chunks as steps, and its reasons for an end."""

from http import HTTPStatus
from typing import Any

import pytest

from headwater.engines.engine import Step
from headwater.engines.sglang.sampling import TEXT_MAX, Stream, finish_of
from headwater.schemas.inference import GenerateRequest, Leg, Sampling, TokenLogprob


def stream(steps: list[Step], leg: Leg = "", **sampling: Any) -> Stream:
    """A stream into `steps`."""
    request = GenerateRequest("r", "e", 1, b"", Sampling(**{"max_tokens": 9, **sampling}), leg=leg)
    return Stream(request, "0" * 32, steps.append)


def chunk(*tokens: int, reason: dict[str, Any] | None = None, **meta: Any) -> dict[str, Any]:
    """One chunk as SGLang streams it."""
    return {"output_ids": list(tokens), "meta_info": {"finish_reason": reason, "cached_tokens": 32, **meta}}


def test_tokens_come_once_and_the_end_is_the_last() -> None:
    """What was cached is in the first step only; nothing follows the end."""
    steps: list[Step] = []
    made = stream(steps)
    made.take(chunk(1, 2))
    made.take(chunk(3))
    made.take(chunk(4, reason={"type": "length", "length": 4}))
    made.take(chunk(5))
    assert [(step.tokens, step.finish, step.cached_tokens) for step in steps] == [
        ((1, 2), "", 32),
        ((3,), "", -1),
        ((4,), "length", -1),
    ]
    assert made.ended


def test_a_stop_token_ends_an_answer_that_ignores_its_end() -> None:
    """SGLang ignores both together. The log probabilities end with it."""
    steps: list[Step] = []
    made = stream(steps, ignore_eos=True, stop_token_ids=(7,), logprobs=0)
    scores = [(-1.0, 6, None), (-2.0, 7, None), (-3.0, 8, None)]
    made.take(chunk(6, 7, 8, output_token_logprobs=scores))
    [step] = steps
    assert (step.tokens, step.finish) == ((6, 7), "stop")
    assert step.logprobs == (TokenLogprob(-1.0, ()), TokenLogprob(-2.0, ()))
    free: list[Step] = []
    stream(free, stop_token_ids=(7,)).take(chunk(6, 7, 8))
    assert free == [Step((6, 7, 8), "", 32)]


@pytest.mark.parametrize(
    ("reason", "wanted"),
    [
        (None, ("", "")),
        ({"type": "stop", "matched": 2}, ("stop", "")),
        ({"type": "length", "length": 3}, ("length", "")),
        ({"type": "abort", "message": "Aborted"}, ("abort", "")),
        ({"type": "abort", "message": "bad", "status_code": HTTPStatus.BAD_REQUEST}, ("rejected", "bad")),
        ({"type": "abort", "message": "full", "status_code": 503}, ("error", "full")),
        ({"type": "abort", "message": "x" * 2_000, "status_code": 500}, ("error", "x" * TEXT_MAX)),
        ({"type": "matched_tokens"}, ("error", "matched_tokens")),
    ],
)
def test_the_status_of_an_abort_says_what_it_was(reason: Any, wanted: tuple[str, str]) -> None:
    """The request's fault, the engine's, or asked for."""
    assert finish_of(reason) == wanted


def test_tokens_of_an_aborted_answer_are_dropped() -> None:
    """It repeats its last one; one that was rejected has one that means nothing."""
    for status, finish in ((None, "abort"), (400, "rejected"), (500, "error")):
        steps: list[Step] = []
        stream(steps).take(chunk(9, reason={"type": "abort", "message": "m", "status_code": status}))
        assert [(step.tokens, step.finish) for step in steps] == [((), finish)]


def test_prompt_scores_come_once_and_a_prefill_has_no_tokens() -> None:
    """SGLang repeats them with each chunk."""
    steps: list[Step] = []
    made = stream(steps, leg="prefill", prompt_logprobs=1, logprobs=1)
    given: dict[str, Any] = {
        "input_token_logprobs": [(None, 1, None), (-1.0, 2, None)],
        "input_top_logprobs": [None, [(-0.5, 3, None)]],
        "output_token_logprobs": [(-1.0, 5, None)],
        "output_top_logprobs": [[(-1.0, 5, None)]],
    }
    made.take(chunk(5, **given))
    made.take(chunk(6, reason={"type": "stop"}, **given))
    assert [step.prompt_logprobs for step in steps] == [(None, TokenLogprob(-1.0, ((3, -0.5),))), ()]
    assert [(step.tokens, step.logprobs) for step in steps] == [((), ())] * 2
