"""Our sampling parameters as TensorRT-LLM's, and its log probabilities as ours."""

import importlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from headwater.engines.engine import RequestRejected
from headwater.engines.tensorrt_llm.config.recorded import accepted
from headwater.schemas.messages.inference import Guide, Sampling, TokenLogprob


def sampling_params(
    api: Any, sampling: Sampling, eos: Sequence[int], processors: Mapping[str, str], *, prefill: bool = False
) -> Any:
    """A `SamplingParams`. Raises `RequestRejected` for a processor that is not known.

    Without a tokenizer TensorRT-LLM needs `end_id`; further end tokens are stop tokens, which it would cut off. Of a
    prefill leg only one token is generated.
    """
    stops = [*sampling.stop_token_ids]
    if not sampling.ignore_eos:
        stops += [token for token in eos[1:] if token not in stops]
    wanted: dict[str, Any] = {
        "max_tokens": 1 if prefill else sampling.max_tokens,
        "end_id": eos[0] if eos else -1,
        "pad_id": eos[0] if eos else -1,
        "ignore_eos": sampling.ignore_eos,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "detokenize": False,
        "include_stop_str_in_output": True,
    }
    optional = {
        "min_tokens": sampling.min_tokens,
        "top_k": max(sampling.top_k, 0),
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "stop_token_ids": stops,
    }
    wanted |= {
        name: value for name, value in optional.items() if value and not (prefill and name == "min_tokens")
    }
    if sampling.repetition_penalty != 1.0:
        wanted["repetition_penalty"] = sampling.repetition_penalty
    if sampling.seed is not None:
        # A 64-bit seed would overflow its signed field.
        wanted["seed"] = sampling.seed & (2**63 - 1)
    if sampling.logprobs is not None:
        wanted["logprobs"] = sampling.logprobs
    if sampling.guide is not None:
        wanted["guided_decoding"] = api.GuidedDecodingParams(**_guided(sampling.guide))
    if sampling.processors:
        wanted["logits_processor"] = [
            _processor(name, arguments, processors) for name, arguments in sampling.processors.items()
        ]
    return api.SamplingParams(**accepted(api.SamplingParams, wanted))


def _processor(name: str, arguments: dict[str, Any], known: Mapping[str, str]) -> Any:
    if name not in known:
        names = ", ".join(sorted(known)) or "none"
        raise RequestRejected(
            f"no logits processor {name!r} here; known are: {names}", param="logits_processors"
        )
    module, _, attribute = known[name].partition(":")
    made = getattr(importlib.import_module(module), attribute)
    try:
        return made(**arguments)
    except TypeError as error:
        raise RequestRejected(f"logits processor {name!r}: {error}", param="logits_processors") from error


def _guided(guide: Guide) -> dict[str, Any]:
    match guide.kind:
        case "json_object":
            return {"json_object": True}
        case "json_schema":
            return {"json": _decoded(guide, dict[str, Any])}
        case "choice":
            choices: list[str] = _decoded(guide, list[str])
            if not choices:
                raise RequestRejected("guide choice: give one or more texts to choose from")
            return {"regex": "|".join(f"({re.escape(one)})" for one in choices)}
        case "regex" | "grammar":
            if not guide.value:
                raise RequestRejected(f"guide {guide.kind}: it is empty")
            return {guide.kind: guide.value}


def _decoded(guide: Guide, kind: Any) -> Any:
    try:
        return msgspec.json.decode(guide.value.encode(), type=kind)
    except msgspec.DecodeError as error:
        raise RequestRejected(f"guide {guide.kind}: {error}") from error


def token_logprobs(tokens: Sequence[int], entries: Sequence[Any], count: int) -> tuple[TokenLogprob, ...]:
    """Log probabilities of these tokens, each with the `count` likeliest; TensorRT-LLM adds the chosen one to those."""
    found = []
    for token, by_id in zip(tokens, entries, strict=False):
        ranked = sorted(by_id.items(), key=lambda item: (-item[1].logprob, item[0]))
        top = tuple((number, entry.logprob) for number, entry in ranked)
        if len(top) > count:
            top = tuple(pair for pair in top if pair[0] != token or pair in top[:count])[:count]
        found.append(TokenLogprob(by_id[token].logprob, top))
    return tuple(found)
