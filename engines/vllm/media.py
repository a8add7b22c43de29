"""Images, videos and audio for vLLM: how a model takes them, learned from vLLM's own processor, and the form of a request's media.

vLLM itself expands one placeholder token per item. Headwater's prompts have the expanded ones, since their number is part of
the prompt's block hashes; so each run is collapsed again.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

import structlog

from headwater.engines.embeddings import TOKEN_COUNT
from headwater.engines.media import (
    PROBES,
    WHISPER,
    black_image,
    black_video,
    check_media,
    check_recording,
    collapse_placeholders,
    fitting_rule,
    fitting_video_rule,
    image_of,
    learn_audio_rule,
    learned,
    placeholder_of,
    probes,
    samples_of,
    values_of,
    whisper_support,
)
from headwater.schemas.inference import GenerateRequest
from headwater.schemas.media import SAMPLED_FRAMES, PromptMedia, PromptMediaKind
from headwater.schemas.tables import AudioSupport, ImageSupport, MediaSupport, SpeechSupport, VideoSupport


def item_prompt(item: PromptMedia, support: MediaSupport, name: str) -> dict[str, Any]:
    """VLLM is to know the item by `name`. Raises `RequestRejected` if its data is not all there."""
    return {
        "prompt_token_ids": [support.placeholders[item.kind]],
        "multi_modal_data": {item.kind: [item_value(item, support)]},
        "multi_modal_uuids": {item.kind: [name]},
    }


def item_value(item: PromptMedia, support: MediaSupport) -> Any:
    """An item as vLLM takes it: an image of Pillow, an array of frames, or samples with their rate."""
    if item.kind == "image":
        return image_of(item)
    if item.kind == "audio" and support.audio is not None:
        return values_of(item), support.audio.rate_hz
    return values_of(item)


# Images, videos and audio in prompts.

Learn = Callable[[Any, Any, int, int], Any]
"""The rule of a kind, None if none fits: of vLLM's model configuration, its processor, the placeholder's id, and the limit per prompt."""

_log = structlog.get_logger("headwater.vllm")


def media_support(config: Any) -> MediaSupport:
    """Return how the model takes media. Kinds are left out that it does not take, or whose prompts cannot be predicted exactly: requests with them
    are rejected, as a wrong count of tokens would name wrong blocks.

    `config` is vLLM's `VllmConfig`.
    """
    model = config.model_config
    # What an encoder of its own reads is not part of a prompt: such a model transcribes.
    if not model.is_multimodal_model or getattr(model, "is_encoder_decoder", False):
        return MediaSupport()
    from vllm.multimodal import MULTIMODAL_REGISTRY

    processor = MULTIMODAL_REGISTRY.create_processor(model)

    def rule(kind: PromptMediaKind, learn: Learn) -> Any:
        limit = int(processor.info.allowed_mm_limits.get(kind, 0))
        placeholder = placeholder_of(model.hf_config, kind)
        if not limit or placeholder is None:
            return None
        return learned(kind, model.model, lambda: learn(model, processor, placeholder, limit))

    return MediaSupport(rule("image", _image_rule), rule("video", _video_rule), rule("audio", _audio_rule))


def media_settings(config: Any) -> str:
    """The `--mm-processor-kwargs` of vLLM as JSON, "" without."""
    processor_kwargs = getattr(config.model_config.multimodal_config, "mm_processor_kwargs", None) or {}
    without_device = {name: value for name, value in processor_kwargs.items() if name != "device"}
    return json.dumps(without_device, sort_keys=True, default=str) if without_device else ""


def media_tokens_max(engine: Any, support: MediaSupport) -> dict[PromptMediaKind, int]:
    """The most tokens of one item, by kind: those that vLLM's encoder cache has room for. It rejects others.

    `engine` is an `AsyncLLM`.
    """
    room = int(getattr(getattr(engine, "input_processor", None), "mm_encoder_cache_size", 0))
    return dict.fromkeys(support.placeholders, room) if room else {}


def _image_rule(model: Any, processor: Any, placeholder: int, limit: int) -> ImageSupport | None:
    token_counts = {size: _expanded(processor, placeholder, "image", black_image(*size)) for size in PROBES}
    image_processor = processor.info.get_image_processor()
    return fitting_rule(
        model.hf_config, image_processor, placeholder=placeholder, limit=limit, found=token_counts
    )


def _video_rule(model: Any, processor: Any, placeholder: int, limit: int) -> VideoSupport | None:
    io_kwargs = getattr(model.multimodal_config, "media_io_kwargs", None) or {}
    frames = int(io_kwargs.get("video", {}).get("num_frames", SAMPLED_FRAMES))
    # Without a number vLLM would take all frames of a video.
    frames = frames if frames > 0 else SAMPLED_FRAMES
    return fitting_video_rule(
        model.hf_config,
        processor.info.get_hf_processor().video_processor,
        placeholder=placeholder,
        limit=limit,
        frames=frames,
        found={
            size: _expanded(processor, placeholder, "video", black_video(size)) for size in probes(frames)
        },
    )


def _audio_rule(model: Any, processor: Any, placeholder: int, limit: int) -> AudioSupport | None:
    features = processor.info.get_feature_extractor()
    return learn_audio_rule(
        features,
        lambda silence: _expanded(processor, placeholder, "audio", (silence, int(features.sampling_rate))),
        placeholder=placeholder,
        limit=limit,
    )


def _expanded(processor: Any, placeholder: int, kind: PromptMediaKind, item: Any) -> int:
    """Return how many placeholder tokens vLLM makes of one for an item; -1 if it makes others too."""
    from vllm.multimodal.processing import ProcessorInputs, TimingContext

    inputs = ProcessorInputs([placeholder], processor.info.parse_mm_data({kind: [item]}))
    tokens = processor.apply(inputs, TimingContext(enabled=False))["prompt_token_ids"]
    return len(tokens) if set(tokens) == {placeholder} else -1


def media_prompt(
    tokens: list[int],
    media: Sequence[PromptMedia],
    support: MediaSupport,
    fields: Sequence[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """A prompt as vLLM takes it: one placeholder token per item, the items and their ids.

    With `fields`, one for each item, these take the place of the items: vLLM has their embeddings.

    Raises `RequestRejected` for placeholder tokens without an item: models end on them.
    """
    check_media(tokens, media, support)
    prompt: dict[str, Any] = {"prompt_token_ids": collapse_placeholders(tokens, media)}
    if not media:
        return prompt
    kinds = {item.kind: [entry for entry in media if entry.kind == item.kind] for item in media}
    if fields:
        pairs = list(zip(media, fields, strict=True))
        prompt["multi_modal_data"] = {
            kind: _stacked([item_fields for item, item_fields in pairs if item.kind == kind])
            for kind in kinds
        }
    else:
        prompt["multi_modal_data"] = {
            kind: [item_value(entry, support) for entry in items] for kind, items in kinds.items()
        }
    prompt["multi_modal_uuids"] = {kind: [entry.id for entry in items] for kind, items in kinds.items()}
    return prompt


def _stacked(fields: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The fields of several items of a kind as vLLM takes them: each as one tensor with a row, or a number of tokens, per item."""
    import torch

    return {
        name: torch.tensor(
            [item_fields[name][0] if name == TOKEN_COUNT else item_fields[name] for item_fields in fields]
        )
        for name in fields[0]
    }


# Speech: whether a model transcribes, and a recording as vLLM wants it.


def speech_support(config: Any) -> SpeechSupport | None:
    """Return how the model transcribes. None for a model that does not, and for one that is no Whisper: prompts differ by architecture.

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
