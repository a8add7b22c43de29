"""Sampling settings as SGLang's, its log probabilities as ours. What SGLang makes of them: the contract suite."""

import json
from typing import Any

import pytest

from headwater.engines.engine import RequestRejected, check_processors
from headwater.engines.sglang import sampling
from headwater.schemas.inference import Guide, GuideKind, Sampling, TokenLogprob


def test_every_setting_has_its_name() -> None:
    """Those that SGLang calls otherwise, and 0 for all tokens."""
    made = sampling.answer(
        Sampling(
            max_tokens=7,
            temperature=0.5,
            top_p=0.9,
            top_k=0,
            min_p=0.1,
            presence_penalty=0.2,
            frequency_penalty=0.3,
            repetition_penalty=1.1,
            seed=5,
            min_tokens=2,
            ignore_eos=True,
            stop_token_ids=(3, 4),
            logit_bias={8: -1.5},
        )
    )
    assert made == {
        "max_new_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": -1,
        "min_p": 0.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.1,
        "min_new_tokens": 2,
        "ignore_eos": True,
        "stop_token_ids": [3, 4],
        "logit_bias": {"8": -1.5},
    }
    assert sampling.answer(Sampling(1, top_k=40))["top_k"] == 40


def test_seeds_are_given_where_sglang_samples_by_them() -> None:
    """A request without one gets one of its own: SGLang has one and the same for all."""
    assert "sampling_seed" not in sampling.answer(Sampling(1, seed=5))
    assert sampling.answer(Sampling(1, seed=5), random_seed=lambda: 9)["sampling_seed"] == 5
    assert sampling.answer(Sampling(1, seed=0), random_seed=lambda: 9)["sampling_seed"] == 0
    assert sampling.answer(Sampling(1), random_seed=lambda: 9)["sampling_seed"] == 9


@pytest.mark.parametrize(
    ("kind", "value", "wanted"),
    [
        ("json_object", "", {"json_schema": '{"type": "object"}'}),
        ("json_schema", '{"type": "string"}', {"json_schema": '{"type": "string"}'}),
        ("regex", "a+", {"regex": "a+"}),
        ("grammar", 'root ::= "a"', {"ebnf": 'root ::= "a"'}),
        ("choice", '["a\\"b", "\u00fc\\n"]', {"ebnf": 'root ::= "a\\"b" | "\u00fc\\n"'}),
    ],
)
def test_guides(kind: GuideKind, value: str, wanted: dict[str, Any]) -> None:
    """Choices are a grammar of texts."""
    made = sampling.answer(Sampling(1, guide=Guide(kind, value)))
    assert {name: made[name] for name in ("json_schema", "regex", "ebnf") if name in made} == wanted


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("json_schema", "{"),
        ("json_schema", "[]"),
        ("choice", "[]"),
        ("choice", "[1]"),
        ("regex", ""),
        ("grammar", ""),
    ],
)
def test_a_guide_that_is_none_is_rejected(kind: GuideKind, value: str) -> None:
    """By its kind."""
    with pytest.raises(RequestRejected, match=f"guide {kind}"):
        sampling.answer(Sampling(1, guide=Guide(kind, value)))


def test_arguments_of_a_processor_come_back() -> None:
    """Whatever they are: SGLang passes only flat values."""
    given = {"token": 5, "deep": [{"a": None}]}
    made = sampling.answer(Sampling(1, processors={"only": given}))
    assert all(isinstance(value, str) for value in made["custom_params"].values())
    assert sampling.arguments({**made["custom_params"], "__req__": object()}) == given
    assert sampling.arguments(None) == {}


def test_processors_are_known_by_name_only() -> None:
    """A pickled one is none of the names, as is a place that nobody has named; SGLang applies one of them."""
    known = {"only": "m:A", "other": "m:B"}
    check_processors([], known)
    check_processors(["only"], known)
    for wrong in ("m:A", json.dumps({"callable": "8004"})):
        with pytest.raises(RequestRejected, match=r"known are: only, other$"):
            check_processors([wrong], known)
    with pytest.raises(RequestRejected, match="not several"):
        sampling.answer(Sampling(1, processors={"only": {}, "other": {}}))


@pytest.mark.parametrize(
    ("answer", "prompt", "wanted"),
    [
        (None, None, {}),
        (0, None, {"return_logprob": True, "top_logprobs_num": 0, "logprob_start_len": -1}),
        (2, None, {"return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": -1}),
        (None, 3, {"return_logprob": True, "top_logprobs_num": 3, "logprob_start_len": 0}),
        (5, 0, {"return_logprob": True, "top_logprobs_num": 5, "logprob_start_len": 0}),
    ],
)
def test_scores_of_answer_and_prompt(answer: int | None, prompt: int | None, wanted: dict[str, Any]) -> None:
    """One count for both, the larger one; the prompt's only where they are asked for."""
    assert sampling.scores(Sampling(1, logprobs=answer, prompt_logprobs=prompt)) == wanted


def test_log_probabilities() -> None:
    """Of each its own count of likeliest ones."""
    chosen = [(-1.0, 5, None), (-2.0, 6, None)]
    top = [[(-0.5, 9, None), (-1.0, 5, None), (-3.0, 4, None)], [(-2.0, 6, None)]]
    assert sampling.logprobs(chosen, top, 2) == (
        TokenLogprob(-1.0, ((9, -0.5), (5, -1.0))),
        TokenLogprob(-2.0, ((6, -2.0),)),
    )
    assert sampling.logprobs(chosen, (), 0) == (TokenLogprob(-1.0, ()), TokenLogprob(-2.0, ()))
    first = [(None, 4, None), *chosen]
    assert sampling.prompt_logprobs(first, [None, *top], 1) == (
        None,
        TokenLogprob(-1.0, ((9, -0.5),)),
        TokenLogprob(-2.0, ((6, -2.0),)),
    )
