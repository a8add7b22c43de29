"""Our sampling parameters as TensorRT-LLM's, and its log probabilities as ours."""

import importlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from headwater.engines.engine import EngineError, RequestRejected
from headwater.engines.requests.guides import decode_guide, guide_choices, guide_text
from headwater.engines.tensorrt_llm.config.recorded import accepted
from headwater.engines.tensorrt_llm.config.settings import TensorRtSettings
from headwater.engines.tensorrt_llm.logits import BannedSequences, banned_sequences, bias_of
from headwater.schemas.messages.inference import Guide, Sampling, TokenLogprob

PROMPT_ROWS: Final = 64
"""Positions of a prompt whose logits are in memory as float32 at a time: 32 MB with a vocabulary of 128k tokens."""


def sampling_params(
    api: Any,
    sampling: Sampling,
    settings: TensorRtSettings,
    *,
    prompt: int = 1,
    prefill: bool = False,
    tokenizer: Any = None,
) -> Any:
    """A `SamplingParams`. Raises `RequestRejected` for a processor that is not known.

    Without a tokenizer TensorRT-LLM needs `end_id`; further end tokens are stop tokens, which it would cut off. Of a
    prefill leg only one token is generated. `prompt` is the prompt's length, `tokenizer` the model's, for bad words.
    """
    eos = settings.eos_token_ids
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
    if sampling.prompt_logprobs is not None and sampling.prompt_logprobs >= 0:
        # Its own `prompt_logprobs` may lack the token that is in the prompt.
        wanted["return_context_logits"] = True
    bias = bias_of(sampling, settings.vocabulary)
    if bias is not None:
        wanted["embedding_bias"] = api.from_numpy(bias)
    applied = [_processor(name, given, settings.processors) for name, given in sampling.processors.items()]
    if sampling.bad_words:
        applied.append(BannedSequences(banned_sequences(sampling.bad_words, tokenizer), prompt))
    if applied:
        wanted["logits_processor"] = applied
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
            return {"json": decode_guide(guide, dict[str, Any])}
        case "choice":
            choices = guide_choices(guide)
            return {"regex": "|".join(f"({re.escape(one)})" for one in choices)}
        case "regex" | "grammar":
            return {guide.kind: guide_text(guide)}


def prompt_logprobs(tokens: Sequence[int], logits: Any, count: int) -> tuple[TokenLogprob | None, ...]:
    """Log probabilities of a prompt's tokens from its logits (a tensor of positions × vocabulary), None for the first.

    Row n predicts token n + 1. Takes milliseconds per row: not for an event loop. Raises `EngineError` for too few rows.
    """
    if len(logits.shape) == 3:
        logits = logits[0]
    rows = len(tokens) - 1
    if logits.shape[0] < rows:
        raise EngineError(
            f"TensorRT-LLM returned the logits of {logits.shape[0]} of {len(tokens)} prompt tokens"
        )
    found: list[TokenLogprob | None] = [None]
    for at in range(0, rows, PROMPT_ROWS):
        part = logits[at : min(at + PROMPT_ROWS, rows)].float().cpu().numpy()
        shifted = part - part.max(axis=-1, keepdims=True)
        scores = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
        likeliest = np.argsort(-scores, axis=-1, kind="stable")[:, :count]
        for row, (values, top) in enumerate(zip(scores, likeliest, strict=True)):
            chosen = float(values[tokens[at + row + 1]])
            found.append(TokenLogprob(chosen, tuple((int(one), float(values[one])) for one in top)))
    return tuple(found)


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
