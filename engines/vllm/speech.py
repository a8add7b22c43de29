"""Speech for vLLM: how a Whisper model transcribes, from its own configuration, and a recording as vLLM wants it."""

from typing import Any, Final

import numpy as np
import structlog

from headwater.engines.engine import RequestRejected
from headwater.schemas.messages.inference import GenerateRequest
from headwater.schemas.tables.card import SpeechSupport

ENGLISH_VOCABULARY: Final = 51_864
"""Tokens of the models that know English only; the others have a token more, and more languages."""

TIMESTAMP_S: Final = 0.02

_log = structlog.get_logger("headwater.vllm")


def speech_support(config: Any) -> SpeechSupport | None:
    """How the model transcribes. None for a model that does not, and for one that is no Whisper: prompts differ by architecture.

    `config` is vLLM's `VllmConfig`.
    """
    model = config.model_config
    if model.hf_config.model_type != "whisper":
        if getattr(model, "is_encoder_decoder", False):
            _log.warning("speech_not_served", model=model.model, reason="its architecture is not Whisper's")
        return None
    from vllm.tokenizers import cached_tokenizer_from_config
    from vllm.transformers_utils.processor import cached_processor_from_config

    features = cached_processor_from_config(model).feature_extractor
    ids = cached_tokenizer_from_config(model).get_vocab()
    no_timestamps = ids["<|notimestamps|>"]
    start, translate = ids["<|startoftranscript|>"], ids["<|translate|>"]
    names = {number: name for name, number in ids.items()}
    # The tokens between are those of languages.
    languages = {
        names[number].strip("<|>"): number for number in range(start + 1, translate) if number in names
    }
    return SpeechSupport(
        window_s=float(features.chunk_length),
        rate_hz=int(features.sampling_rate),
        start=start,
        previous=ids["<|startofprev|>"],
        no_timestamps=no_timestamps,
        first_timestamp=no_timestamps + 1,
        timestamp_s=TIMESTAMP_S,
        prompt_max=int(model.max_model_len) // 2 - 1,
        languages=languages if int(model.hf_config.vocab_size) > ENGLISH_VOCABULARY else {},
        transcribe=ids["<|transcribe|>"],
        translate=translate,
    )


def speech_prompt(tokens: list[int], request: GenerateRequest, support: SpeechSupport) -> dict[str, Any]:
    """A recording for the encoder, and tokens with which the decoder begins. Raises `RequestRejected` unless there is one recording."""
    if len(request.media) != 1:
        raise RequestRejected(f"{len(request.media)} recordings to transcribe: one at a time", param="file")
    (item,) = request.media
    if len(item.data) != item.size or not item.size:
        raise RequestRejected(f"a recording of {item.size} bytes came with {len(item.data)}", param="file")
    if item.shape[0] > support.window_s * support.rate_hz:
        raise RequestRejected(f"the recording is longer than {support.window_s:g} s", param="file")
    samples = np.frombuffer(item.data, np.float32)
    return {
        "encoder_prompt": {
            "prompt": "",
            "multi_modal_data": {"audio": [(samples, support.rate_hz)]},
            "multi_modal_uuids": {"audio": [item.id]},
        },
        "decoder_prompt": {"prompt_token_ids": tokens},
    }
