"""Translation of sampling parameters, log probabilities and images to and from TensorRT-LLM's.

Bias and allowed tokens are one tensor, `embedding_bias`, which TensorRT-LLM adds to the logits. A word of several tokens
needs a logits processor: its last token is forbidden only after the others.

A prompt of token ids with images (`multi_modal_data`) is expanded by the model's input processor, which repeats the placeholder's place
with a token id of its own. Our prompts are expanded already, since the number of tokens is part of their block hashes: each run is
collapsed again. In KV events an image's tokens are the processor's, and `mm_keys` name the images that a block overlaps:

    {"type": "mm_key", "hash": the id given as `multi_modal_uuids`, "start_offset": tokens of the image before the block}
"""

import importlib
import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from headwater.engines.engine import (
    EngineError,
    RequestRejected,
    decode_guide,
    guide_choices,
    guide_text,
)
from headwater.engines.media import (
    PROBES,
    black_image,
    check_media,
    collapse_placeholders,
    fitting_rule,
    image_of,
    learned,
    log_not_served,
    placeholder_of,
)
from headwater.engines.tensorrt_llm.config import INPUT_PROCESSOR, TensorRtSettings, accepted
from headwater.schemas.inference import Guide, Sampling, TokenLogprob
from headwater.schemas.media import PromptMedia
from headwater.schemas.tables import ImageSupport, MediaSupport

FORBIDDEN: Final = -1e9
"""Far below any logit; minus infinity would make 0 x infinity of a softmax over nothing."""


def bias_of(sampling: Sampling, vocabulary: int) -> np.ndarray | None:
    """One value per token of the vocabulary, None if the request has no use for it. Raises `RequestRejected`."""
    if not sampling.logit_bias and not sampling.allowed_token_ids:
        return None
    named = [*sampling.logit_bias, *sampling.allowed_token_ids]
    wrong = [token for token in named if not 0 <= token < vocabulary]
    if wrong:
        param = "logit_bias" if wrong[0] in sampling.logit_bias else "allowed_token_ids"
        raise RequestRejected(
            f"token {wrong[0]} is not in the vocabulary of {vocabulary} tokens", param=param
        )
    bias = np.zeros(vocabulary, np.float32)
    if sampling.allowed_token_ids:
        bias.fill(FORBIDDEN)
        bias[list(sampling.allowed_token_ids)] = 0.0
    for token, value in sampling.logit_bias.items():
        bias[token] += value
    return bias


class BannedSequences:
    """A logits processor that forbids the last token of each sequence after the tokens before it.

    Called by TensorRT-LLM, in its process: it must not raise, and changes the logits where they are.
    """

    def __init__(self, sequences: Sequence[Sequence[int]], prompt: int) -> None:
        self._sequences = [tuple(sequence) for sequence in sequences if sequence]
        self._prompt = prompt
        """Length of the prompt: a word may begin in it no more than it may end there."""

    def __call__(
        self,
        req_id: int,
        logits: Any,
        token_ids: list[list[int]],
        stream_ptr: int | None,
        client_id: int | None,
    ) -> None:
        """Change the logits of one step: shape (1, beams, vocabulary). See `LogitsProcessor` of TensorRT-LLM."""
        for beam, tokens in enumerate(token_ids):
            answer = tuple(tokens[self._prompt :])
            for sequence in self._sequences:
                before = sequence[:-1]
                if not before or answer[-len(before) :] == before:
                    logits[:, beam, sequence[-1]] = FORBIDDEN


def banned_sequences(words: Sequence[str], tokenizer: Any) -> list[list[int]]:
    """The tokens of each word, at the beginning of a text and inside of one. `tokenizer` is of `tokenizers`."""
    sequences: list[list[int]] = []
    for word in words:
        for text in (word, f" {word.lstrip()}"):
            tokens = tokenizer.encode(text, add_special_tokens=False).ids
            if tokens and tokens not in sequences:
                sequences.append(tokens)
    return sequences


# Sampling parameters, and log probabilities.

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
    """A `SamplingParams`, with processors that are known. Raises `RequestRejected` for what they cannot be made with.

    Without a tokenizer TensorRT-LLM needs `end_id`; further end tokens are stop tokens, which it would cut off. Of a
    prefill leg only one token is generated. `prompt` is the prompt's length, `tokenizer` the model's, for bad words.
    """
    eos, processors = settings.files.eos_token_ids, settings.options.logits_processors
    stops = [*sampling.stop_token_ids]
    if not sampling.ignore_eos:
        stops += [token for token in eos[1:] if token not in stops]
    arguments: dict[str, Any] = {
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
    arguments |= {
        name: value for name, value in optional.items() if value and not (prefill and name == "min_tokens")
    }
    if sampling.repetition_penalty != 1.0:
        arguments["repetition_penalty"] = sampling.repetition_penalty
    if sampling.seed is not None:
        # A 64-bit seed would overflow its signed field.
        arguments["seed"] = sampling.seed & (2**63 - 1)
    if sampling.logprobs is not None:
        arguments["logprobs"] = sampling.logprobs
    if sampling.guide is not None:
        arguments["guided_decoding"] = api.GuidedDecodingParams(**_guided(sampling.guide))
    if sampling.prompt_logprobs is not None and sampling.prompt_logprobs >= 0:
        # Its own `prompt_logprobs` may lack the token that is in the prompt.
        arguments["return_context_logits"] = True
    bias = bias_of(sampling, settings.files.vocabulary)
    if bias is not None:
        arguments["embedding_bias"] = api.from_numpy(bias)
    applied = [_processor(name, options, processors) for name, options in sampling.processors.items()]
    if sampling.bad_words:
        applied.append(BannedSequences(banned_sequences(sampling.bad_words, tokenizer), prompt))
    if applied:
        arguments["logits_processor"] = applied
    return api.SamplingParams(**accepted(api.SamplingParams, arguments))


def _processor(name: str, arguments: dict[str, Any], available: Mapping[str, str]) -> Any:
    module, _, attribute = available[name].partition(":")
    processor_class = getattr(importlib.import_module(module), attribute)
    try:
        return processor_class(**arguments)
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
            return {"regex": "|".join(f"({re.escape(choice)})" for choice in choices)}
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
    logprobs: list[TokenLogprob | None] = [None]
    for at in range(0, rows, PROMPT_ROWS):
        part = logits[at : min(at + PROMPT_ROWS, rows)].float().cpu().numpy()
        shifted = part - part.max(axis=-1, keepdims=True)
        scores = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
        likeliest = np.argsort(-scores, axis=-1, kind="stable")[:, :count]
        for row, (values, top) in enumerate(zip(scores, likeliest, strict=True)):
            chosen = float(values[tokens[at + row + 1]])
            logprobs.append(TokenLogprob(chosen, tuple((int(token), float(values[token])) for token in top)))
    return tuple(logprobs)


def token_logprobs(tokens: Sequence[int], entries: Sequence[Any], count: int) -> tuple[TokenLogprob, ...]:
    """Log probabilities of these tokens, each with the `count` likeliest; TensorRT-LLM adds the chosen one to those."""
    logprobs = []
    for token, by_id in zip(tokens, entries, strict=False):
        ranked = sorted(by_id.items(), key=lambda item: (-item[1].logprob, item[0]))
        top = tuple((number, entry.logprob) for number, entry in ranked)
        if len(top) > count:
            top = tuple(pair for pair in top if pair[0] != token or pair in top[:count])[:count]
        logprobs.append(TokenLogprob(by_id[token].logprob, top))
    return tuple(logprobs)


# Images: how a model takes them, and requests' images in prompts and in KV events.

IMAGES_MAX: Final = 16
"""The most images of a prompt: TensorRT-LLM states no limit."""

REMEMBERED: Final = 32_768
"""Bound on the images whose number of tokens is remembered, for events that name them."""


class BlockImages(NamedTuple):
    """A block's tokens as the edge has them, and its images as (id, first token, tokens); negative: it began before."""

    tokens: list[int]
    images: list[tuple[str, int, int]]


class TensorRtImages:
    """The images of one engine. `feature` is the token id that TensorRT-LLM repeats for an image."""

    def __init__(self, support: ImageSupport, feature: int) -> None:
        self.support = support
        self._feature = feature
        self._tokens: OrderedDict[str, int] = OrderedDict()

    def inputs(self, tokens: list[int], media: Sequence[PromptMedia]) -> Any:
        """A prompt as TensorRT-LLM takes it. Raises `RequestRejected` where images and placeholders do not match."""
        check_media(tokens, media, MediaSupport(images=self.support))
        if not media:
            return tokens
        for item in media:
            self._tokens[item.id] = item.tokens
            self._tokens.move_to_end(item.id)
        while len(self._tokens) > REMEMBERED:
            self._tokens.popitem(last=False)
        return {
            "prompt_token_ids": collapse_placeholders(tokens, media),
            "multi_modal_data": {"image": [image_of(item) for item in media]},
            "multi_modal_uuids": {"image": [item.id for item in media]},
        }

    def resolve(self, tokens: Sequence[int], keys: Iterable[dict[str, Any]]) -> BlockImages | None:
        """A block of an event. None if one of its images is of no request of this engine: then its tokens are unknown."""
        block_tokens = list(tokens)
        images: list[tuple[str, int, int]] = []
        at = 0
        for key in keys:
            count = self._tokens.get(str(key["hash"]))
            if count is None:
                return None
            start = -int(key["start_offset"])
            if not start:
                # It begins in this block, where the first token that stands for an image and is no earlier one's is.
                start = next(
                    (n for n in range(at, len(block_tokens)) if block_tokens[n] == self._feature), -1
                )
                if start < 0:
                    return None
            end = min(start + count, len(block_tokens))
            block_tokens[max(start, 0) : end] = [self.support.placeholder] * (end - max(start, 0))
            images.append((str(key["hash"]), start, count))
            at = end
        return BlockImages(block_tokens, images)


def image_handling(llm: Any, model: str) -> TensorRtImages | None:
    """Return how the `model` of an `LLM` takes images. None for a model without, for one whose prompts cannot be predicted exactly, and for a
    release that expands no prompts of token ids: their requests with images are rejected.
    """
    processor = getattr(llm, "input_processor", None)
    config = getattr(processor, "config", None)
    placeholder = placeholder_of(config)
    if placeholder is None:
        return None
    missing = [name for name in INPUT_PROCESSOR if not hasattr(processor, name)]
    if missing:
        log_not_served("image", model, f"its input processor has no {missing[0]}")
        return None

    def learn() -> TensorRtImages | None:
        token_counts = {
            size: int(processor.get_num_tokens_per_image(image=black_image(*size)))  # type: ignore[union-attr]
            for size in PROBES
        }
        tokens = next(iter(token_counts.values()))
        expanded = processor.expand_prompt_token_ids_for_mm([placeholder], [tokens])  # type: ignore[union-attr]
        # Newer releases return what else they made of it as well.
        expanded = expanded[0] if isinstance(expanded, tuple) else expanded
        inner = getattr(processor.processor, "image_processor", None)  # type: ignore[union-attr]
        support = fitting_rule(config, inner, placeholder=placeholder, limit=IMAGES_MAX, found=token_counts)
        if support is None or len(expanded) != tokens or len(set(expanded)) != 1:
            return None
        return TensorRtImages(support, int(expanded[0]))

    return learned("image", model, learn)
