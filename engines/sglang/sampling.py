"""Conversion of sampling settings to SGLang's, and of SGLang's log probabilities.

SGLang's `custom_logit_processor` is a pickled class. It is built only here, from a class that the operator has named: no
request contains one. `custom_params` are the arguments of that class, likewise built only here.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from headwater.engines.requests.guides import decode_guide, guide_choices, guide_text
from headwater.schemas.messages.inference import Guide, Sampling, TokenLogprob

ARGUMENTS: Final = "headwater"
"""Key of `custom_params` with the arguments of the request's logits processor."""

ALLOWED_BIAS: Final = 100.0
"""As in the API, by which 100 selects a token exclusively; more would cost float32 the differences of logits."""


def answer(sampling: Sampling, *, random_seed: Callable[[], int] | None = None) -> dict[str, Any]:
    """Sampling parameters for an answer.

    `random_seed` is given where SGLang samples by seeds: it then uses one and the same for all requests without one.
    Raises `RequestRejected` for an invalid guide.
    """
    made: dict[str, Any] = {
        "max_new_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        # Here 0 means all.
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "min_new_tokens": sampling.min_tokens,
        "ignore_eos": sampling.ignore_eos,
    }
    if sampling.stop_token_ids:
        made["stop_token_ids"] = list(sampling.stop_token_ids)
    bias = dict(sampling.logit_bias)
    for token in sampling.allowed_token_ids or ():
        # SGLang has no allowed tokens. Their order among themselves stays.
        bias[token] = bias.get(token, 0.0) + ALLOWED_BIAS
    if bias:
        made["logit_bias"] = {str(token): value for token, value in bias.items()}
    if random_seed is not None:
        made["sampling_seed"] = random_seed() if sampling.seed is None else sampling.seed
    if sampling.guide is not None:
        made |= _guided(sampling.guide)
    for given in sampling.processors.values():
        made["custom_params"] = {ARGUMENTS: json.dumps(given)}
    return made


def scores(sampling: Sampling) -> dict[str, Any]:
    """The parts of a request that ask for log probabilities: one count of alternatives for prompt and answer."""
    if sampling.logprobs is None and sampling.prompt_logprobs is None:
        return {}
    return {
        "return_logprob": True,
        "top_logprobs_num": max(sampling.logprobs or 0, sampling.prompt_logprobs or 0),
        "logprob_start_len": -1 if sampling.prompt_logprobs is None else 0,
    }


def _guided(guide: Guide) -> dict[str, Any]:
    match guide.kind:
        case "json_object":
            return {"json_schema": '{"type": "object"}'}
        case "json_schema":
            decode_guide(guide, dict[str, Any])
            return {"json_schema": guide.value}
        case "choice":
            choices = guide_choices(guide)
            either = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
            return {"ebnf": f"root ::= {either}"}
        case "regex":
            return {"regex": guide_text(guide)}
        case "grammar":
            return {"ebnf": guide_text(guide)}


def unknown_processor(wanted: Iterable[str], known: Mapping[str, str]) -> str:
    """Why these logits processors are not available, or empty."""
    names = list(wanted)
    for name in names:
        if name not in known:
            there = ", ".join(sorted(known)) or "none"
            return f"no logits processor {name!r} here; known are: {there}"
    return "SGLang applies one logits processor to a request, not several" if len(names) > 1 else ""


def pickled(place: str) -> str:
    """SGLang's form of the logits processor "module:Class". Raises `ImportError` and `AttributeError`."""
    from importlib import import_module

    module, _, name = place.partition(":")
    text: str = getattr(import_module(module), name).to_str()
    return text


def arguments(params: Mapping[str, Any] | None) -> dict[str, Any]:
    """For authors of logits processors: the request's arguments in one entry of `custom_param_list`."""
    text = (params or {}).get(ARGUMENTS)
    found: dict[str, Any] = json.loads(text) if text else {}
    return found


Pair = Sequence[Any]
"""SGLang's (log probability, token id, text)."""


def logprobs(
    chosen: Sequence[Pair], top: Sequence[Sequence[Pair] | None], count: int
) -> tuple[TokenLogprob, ...]:
    """Log probability of each chosen token and of the `count` likeliest ones."""
    return tuple(
        TokenLogprob(float(pair[0]), _likeliest(top[number] if number < len(top) else None, count))
        for number, pair in enumerate(chosen)
    )


def prompt_logprobs(
    chosen: Sequence[Pair], top: Sequence[Sequence[Pair] | None], count: int
) -> tuple[TokenLogprob | None, ...]:
    """The same of a prompt's tokens; the first has none."""
    return tuple(
        None
        if pair[0] is None
        else TokenLogprob(float(pair[0]), _likeliest(top[number] if number < len(top) else None, count))
        for number, pair in enumerate(chosen)
    )


def _likeliest(given: Sequence[Pair] | None, count: int) -> tuple[tuple[int, float], ...]:
    return tuple((int(pair[1]), float(pair[0])) for pair in (given or ())[:count])
