"""A request in SGLang's terms, and its answer: sampling, streams, transcriptions and pooling.

SGLang's `custom_logit_processor` is a pickled class. It is built only here, from a class that the operator has named: no
request contains one. `custom_params` are the arguments of that class, likewise built only here.

SGLang's own processor makes the prompt of Whisper's decoder from a language and a kind of timestamps, and has no earlier text, no
translation and no model for English only. So the prompt is the request's, as everywhere, and only the sound is processed, by the
model's feature extractor.
"""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headwater.engines.engine import (
    AnswerStream,
    Emit,
    EngineUnavailable,
    Finish,
    RequestRejected,
    Step,
    decode_guide,
    guide_choices,
    guide_text,
)
from headwater.engines.media import WHISPER, check_recording, samples_of, whisper_support
from headwater.engines.sglang.config import SglangSettings
from headwater.engines.sglang.process import ID_DIGITS
from headwater.schemas.inference import GenerateRequest, Guide, Sampling, TokenLogprob
from headwater.schemas.media import PromptMedia
from headwater.schemas.tables import Capability

ARGUMENTS: Final = "headwater"
"""Key of `custom_params` with the arguments of the request's logits processor."""

ALLOWED_BIAS: Final = 100.0
"""The bias of the API, in which 100 selects a token exclusively; more would cost float32 the differences of logits."""


def answer(sampling: Sampling, *, random_seed: Callable[[], int] | None = None) -> dict[str, Any]:
    """Sampling parameters for an answer.

    `random_seed` is given where SGLang samples by seeds: it then uses one and the same for all requests without one.
    Raises `RequestRejected` for an invalid guide, and for more than one logits processor.
    """
    params: dict[str, Any] = {
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
        params["stop_token_ids"] = list(sampling.stop_token_ids)
    bias = dict(sampling.logit_bias)
    for token in sampling.allowed_token_ids or ():
        # SGLang has no allowed tokens. Their order among themselves stays.
        bias[token] = bias.get(token, 0.0) + ALLOWED_BIAS
    if bias:
        params["logit_bias"] = {str(token): value for token, value in bias.items()}
    if random_seed is not None:
        params["sampling_seed"] = random_seed() if sampling.seed is None else sampling.seed
    if sampling.guide is not None:
        params |= _guided(sampling.guide)
    if len(sampling.processors) > 1:
        raise RequestRejected("SGLang applies one logits processor to a request, not several")
    for processor_arguments in sampling.processors.values():
        params["custom_params"] = {ARGUMENTS: json.dumps(processor_arguments)}
    return params


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


def pickled(place: str) -> str:
    """SGLang's form of the logits processor "module:Class". Raises `ImportError` and `AttributeError`."""
    from importlib import import_module

    module, _, name = place.partition(":")
    text: str = getattr(import_module(module), name).to_str()
    return text


def arguments(params: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the request's arguments in one entry of `custom_param_list`; for authors of logits processors."""
    text = (params or {}).get(ARGUMENTS)
    decoded: dict[str, Any] = json.loads(text) if text else {}
    return decoded


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


def _likeliest(pairs: Sequence[Pair] | None, count: int) -> tuple[tuple[int, float], ...]:
    return tuple((int(pair[1]), float(pair[0])) for pair in (pairs or ())[:count])


# The chunks of one request, as SGLang streams them, as steps.

BAD_REQUEST: Final = 400
TEXT_MAX: Final = 1_000
"""Characters of an error that are passed on: some contain the whole value."""


class Stream(AnswerStream):
    """One request, which SGLang knows as `rid`."""

    def __init__(self, request: GenerateRequest, rid: str, emit: Emit) -> None:
        super().__init__(request, emit)
        self.request = request
        self.rid = rid
        self._reported_cached = False
        self._reported_prompt = False
        # With `ignore_eos` SGLang ignores these as well.
        self._stops = frozenset(request.sampling.stop_token_ids if request.sampling.ignore_eos else ())

    def take(self, chunk: dict[str, Any]) -> None:
        """Emit the step of one chunk. Its token ids are those since the last chunk."""
        meta = chunk["meta_info"]
        finish, detail = finish_of(meta.get("finish_reason"))
        if finish not in ("", "stop", "length"):
            # What is ended from outside repeats its last token, and what is rejected has a token that means nothing.
            self.send(Step((), finish, detail=detail))
            return
        tokens = tuple(chunk["output_ids"])
        if not tokens and not finish and self._reported_cached:
            # A diffusion model returns most of its steps empty, and whole blocks at once.
            return
        at = next((place for place, token in enumerate(tokens) if token in self._stops), None)
        if at is not None:
            tokens, finish = tokens[: at + 1], "stop"
        sampling = self.request.sampling
        cached = -1
        if not self._reported_cached and "cached_tokens" in meta:
            self._reported_cached, cached = True, int(meta["cached_tokens"])
        chosen: tuple[TokenLogprob, ...] = ()
        if sampling.logprobs is not None:
            chosen = logprobs(
                meta.get("output_token_logprobs") or (),
                meta.get("output_top_logprobs") or (),
                sampling.logprobs,
            )
        prompt: tuple[TokenLogprob | None, ...] = ()
        if (
            sampling.prompt_logprobs is not None
            and not self._reported_prompt
            and meta.get("input_token_logprobs")
        ):
            self._reported_prompt = True
            prompt = prompt_logprobs(
                meta["input_token_logprobs"], meta.get("input_top_logprobs") or (), sampling.prompt_logprobs
            )
        self.send(Step(tokens, finish, cached, chosen[: len(tokens)], detail, None, "", prompt))


def finish_of(reason: dict[str, Any] | None) -> tuple[Finish, str]:
    """Return how a request ended, "" if it did not, and why.

    SGLang ends a request with "abort" for several causes: its status shows whether the request was at fault.
    """
    if not reason:
        return "", ""
    kind = reason.get("type")
    if kind in ("stop", "length"):
        return kind, ""
    detail = str(reason.get("message") or kind)[:TEXT_MAX]
    status = reason.get("status_code")
    if kind != "abort":
        return "error", detail
    if status is None:
        return "abort", ""
    return ("rejected" if int(status) == BAD_REQUEST else "error"), detail


# Speech: a Whisper model's recordings.

PAGE_SIZE: Final = 1
"""SGLang 0.5.23 frees more of its cache than it took for a Whisper with larger pages, and then ends. Nothing of it is cached between requests."""

CHUNKS: Final = "chunked_prefill_size"
NO_CHUNKS: Final = -1
"""SGLang 0.5.23 ends where a batch is so full that only a part of a recording would fit into it."""

BATCH: Final = "max_prefill_tokens"
BATCH_TOKENS: Final = 8192
"""Five recordings in a batch. Without chunks SGLang reserves memory for as many tokens: 24 GiB for its own 16,384."""

KEPT: Final[frozenset[Capability]] = frozenset(
    {"logprobs", "logit_bias", "seed", "priority", "cache_salt", "pause", "profile"}
)
"""What a model that transcribes can do of what SGLang can."""


def is_whisper(folder: str) -> bool:
    """Return whether a model's folder is that of a Whisper."""
    return _json(Path(folder, "config.json")).get("model_type") == WHISPER


def speech_settings(
    settings: SglangSettings, native_options: Mapping[str, Any]
) -> tuple[SglangSettings, dict[str, Any]]:
    """The settings, and the native arguments, that SGLang needs for a Whisper. Raises `EngineUnavailable` for others that would end it.

    `native_options` are the parsed native arguments. SGLang's context has the recording's places, too: the prompt's bound is the model's own.
    """
    worker = settings.worker
    if worker.block_size not in (0, PAGE_SIZE):
        raise EngineUnavailable(
            f"--block-size {worker.block_size}: SGLang loses count of its memory with a Whisper model unless it is {PAGE_SIZE}"
        )
    if int(native_options.get(CHUNKS) or NO_CHUNKS) != NO_CHUNKS:
        raise EngineUnavailable(
            f"--chunked-prefill-size {native_options[CHUNKS]}: SGLang ends where it cuts a recording into chunks; leave it out"
        )
    worker = worker._replace(block_size=PAGE_SIZE, max_model_len=0)
    return settings._replace(worker=worker), {BATCH: BATCH_TOKENS, **native_options, CHUNKS: NO_CHUNKS}


class SglangSpeech:
    """Takes recordings to a started SGLang. `manager` is its tokenizer manager, `context_max` what the operator allows (0: the model's).

    Raises `EngineUnavailable` for a release without a processor for such a model.
    """

    def __init__(self, manager: Any, context_max: int = 0) -> None:
        if getattr(manager, "mm_processor", None) is None:
            raise EngineUnavailable("this release of SGLang does not transcribe: install 0.5.23 or newer")
        config = manager.model_config.hf_config
        self.context_length = min(int(config.max_target_positions), context_max or 1 << 30)
        self._processor = manager.mm_processor
        self.support = whisper_support(
            self._processor._processor.feature_extractor,
            self._processor._tokenizer.get_vocab(),
            size=int(config.vocab_size),
            context=self.context_length,
        )
        self._threads = ThreadPoolExecutor(1, "recordings")
        self._processor.process_mm_data_async = _keep_prompt

    def capabilities(self, supported: frozenset[Capability]) -> frozenset[Capability]:
        """Return what it can do, of what SGLang can. Languages are detected among allowed tokens."""
        return (supported & KEPT) | {"transcription", "allowed_tokens"}

    def check(self, media: Sequence[PromptMedia]) -> None:
        """See `check_recording`."""
        check_recording(media, self.support)

    async def prepare(self, media: Sequence[PromptMedia]) -> dict[str, Any]:
        """The fields of SGLang's GenerateReqInput for a recording."""
        (item,) = media
        features = await asyncio.get_running_loop().run_in_executor(
            self._threads, partial(self._features, item)
        )
        return {"audio_data": [{"format": "recording", "features": features, "id": item.id}]}

    def close(self) -> None:
        """End its thread."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _features(self, item: PromptMedia) -> Any:
        extractor = self._processor._processor.feature_extractor
        extracted = extractor(
            samples_of(item),
            sampling_rate=self.support.rate_hz,
            padding="max_length",
            return_tensors="pt",
        )
        return extracted["input_features"][0]


async def _keep_prompt(*_: Any, request_obj: Any, **__: Any) -> Any:
    """Return the request's own tokens and the features made of its recording. Replaces `process_mm_data_async` of SGLang's processor."""
    from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem, MultimodalProcessorOutput

    (recording,) = request_obj.audio_data
    item = MultimodalDataItem(feature=recording["features"], modality=Modality.AUDIO)
    item.set_hash(int(recording["id"][:ID_DIGITS], 16))
    return MultimodalProcessorOutput(input_ids=list(request_obj.input_ids), mm_items=[item])


# Pooling: a vector, the shares of classes, or a score.

EMBED: Final = "embed"
CLASSIFY: Final = "classify"
SCORE: Final = "score"

CLASSIFIERS: Final = "Classification"
"""Part of the names of architectures with a head for classes."""

FIRST_TOKEN: Final = frozenset({"BertModel", "Contriever", "XLMRobertaModel"})
"""Architectures for which SGLang returns the first token's state, whatever the model's files say."""

POOLING_FILE: Final = Path("1_Pooling", "config.json")
"""The file in which models of Sentence Transformers say how they pool: a flag for each mode, or in newer ones its name."""


class ModelPooling(NamedTuple):
    """The tasks of `Engine.embed` that a model supports. `form` is how its logits become shares.

    `segmented`: its tokens have types, which distinguish the texts of a pair.
    """

    tasks: tuple[str, ...] = (EMBED,)
    form: str = ""
    segmented: bool = False

    def check(self, task: str, segments: Sequence[int]) -> None:
        """Raises `RequestRejected` for what this model cannot compute."""
        if task not in self.tasks:
            raise RequestRejected(
                f"{task!r} is not supported by this model; supported: {', '.join(self.tasks)}"
            )
        if self.segmented and any(segments):
            raise RequestRejected(
                "SGLang accepts no token types with token ids, which this model needs for pairs of texts"
            )

    def finish(self, values: Sequence[float] | float) -> NDArray[np.float32]:
        """The answer for what SGLang returns, one-dimensional. Of classes it returns logits, and of one class a number."""
        outputs = np.asarray(values, np.float32).reshape(-1)
        if self.form == "softmax":
            powers = np.exp(outputs - outputs.max())
            return np.asarray(powers / powers.sum(), np.float32)
        if self.form == "sigmoid":
            return np.asarray(1 / (1 + np.exp(-outputs)), np.float32)
        return outputs


def check_mode(folder: Path) -> None:
    """Raises `EngineUnavailable` for a model whose vectors SGLang would compute differently from what it is made for."""
    config, pooling = _json(folder / "config.json"), _json(folder / POOLING_FILE)
    architectures = FIRST_TOKEN.intersection(config.get("architectures") or ())
    if not pooling or not architectures:
        return
    modes = [name for name, used in pooling.items() if name.startswith("pooling_mode_") and used is True]
    named = pooling.get("pooling_mode")
    if (named == "cls") if named else (modes == ["pooling_mode_cls_token"]):
        return
    raise EngineUnavailable(
        f"{folder.name} pools by {named or ' and '.join(modes)}, and SGLang takes the first token's state of {min(architectures)}, so "
        "its vectors would be wrong: serve the model with vLLM"
    )


def _json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError):
        # SGLang reports what is wrong with files that it needs.
        return {}
    return document if isinstance(document, dict) else {}


def pooling_of(config: Any) -> ModelPooling:
    """The tasks of the model with this configuration of Hugging Face.

    Its classes are computed as transformers and vLLM define them: `problem_type` says how, unless SGLang has applied the
    function that a model of Sentence Transformers names. One class is a score.
    """
    architectures = getattr(config, "architectures", None) or ()
    if not any(CLASSIFIERS in name for name in architectures):
        return ModelPooling()
    labels = int(getattr(config, "num_labels", 1))
    segmented = int(getattr(config, "type_vocab_size", 0) or 0) > 1
    tasks = (CLASSIFY, SCORE) if labels == 1 and not segmented else (CLASSIFY,)
    problem = getattr(config, "problem_type", None)
    if problem == "regression" or getattr(config, "sbert_ce_default_activation_function", None):
        return ModelPooling(tasks, "", segmented)
    several = problem == "single_label_classification" or (problem is None and labels > 1)
    return ModelPooling(tasks, "softmax" if several and labels > 1 else "sigmoid", segmented)
