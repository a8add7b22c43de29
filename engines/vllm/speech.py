"""Speech for vLLM: whether a model transcribes, and a recording as vLLM wants it."""

from typing import Any

import structlog

from headwater.engines.media.speech import WHISPER, check_recording, samples_of, whisper_support
from headwater.schemas.messages.inference import GenerateRequest
from headwater.schemas.tables.card import SpeechSupport

_log = structlog.get_logger("headwater.vllm")


def speech_support(config: Any) -> SpeechSupport | None:
    """How the model transcribes. None for a model that does not, and for one that is no Whisper: prompts differ by architecture.

    `config` is vLLM's `VllmConfig`.
    """
    model = config.model_config
    if model.hf_config.model_type != WHISPER:
        if getattr(model, "is_encoder_decoder", False):
            _log.warning("speech_not_served", model=model.model, reason="its architecture is not Whisper's")
        return None
    from vllm.tokenizers import cached_tokenizer_from_config
    from vllm.transformers_utils.processor import cached_processor_from_config

    return whisper_support(
        cached_processor_from_config(model).feature_extractor,
        cached_tokenizer_from_config(model).get_vocab(),
        size=int(model.hf_config.vocab_size),
        context=int(model.max_model_len),
    )


def speech_prompt(tokens: list[int], request: GenerateRequest, support: SpeechSupport) -> dict[str, Any]:
    """A recording for the encoder, and tokens with which the decoder begins. Raises `RequestRejected` unless there is one recording."""
    item = check_recording(request.media, support)
    return {
        "encoder_prompt": {
            "prompt": "",
            "multi_modal_data": {"audio": [(samples_of(item), support.rate_hz)]},
            "multi_modal_uuids": {"audio": [item.id]},
        },
        "decoder_prompt": {"prompt_token_ids": tokens},
    }
