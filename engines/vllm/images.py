"""Images for vLLM: how a model takes them, learned by letting vLLM's own processor expand some, and a request's images as it wants them.

vLLM expands one placeholder token per image by itself. The requests of this project have the expanded ones, since their number is part of
the prompt's block hashes; so each run is collapsed again.
"""

from collections.abc import Sequence
from typing import Any

import structlog

from headwater.engines.images.prompt import check_images, collapse_placeholders, image_of
from headwater.engines.images.rule import PROBES, black_image, fitting_rule, placeholder_of
from headwater.schemas.messages.media import PromptMedia
from headwater.schemas.tables.card import ImageSupport

_log = structlog.get_logger("headwater.vllm")


def image_support(config: Any) -> ImageSupport | None:
    """How the model takes images. None for a model without, and for one whose prompts cannot be predicted exactly: its requests
    with images are rejected, as a wrong count of tokens would name wrong blocks.

    `config` is vLLM's `VllmConfig`.
    """
    model = config.model_config
    if not model.is_multimodal_model:
        return None
    from vllm.multimodal import MULTIMODAL_REGISTRY

    processor = MULTIMODAL_REGISTRY.create_processor(model)
    limit = processor.info.allowed_mm_limits.get("image", 0)
    placeholder = placeholder_of(model.hf_config)
    if not limit or placeholder is None:
        return None
    try:
        found = {size: _expanded(processor, placeholder, *size) for size in PROBES}
        image_processor = processor.info.get_image_processor()
        support = fitting_rule(
            model.hf_config, image_processor, placeholder=placeholder, limit=int(limit), found=found
        )
    except Exception as error:  # other models' processors fail in any way: such a model serves text
        _log.warning("images_not_served", model=model.model, reason=f"{type(error).__name__}: {error}")
        return None
    if support is None:
        _log.warning("images_not_served", model=model.model, reason="its image tokens follow no known rule")
    return support


def _expanded(processor: Any, placeholder: int, height: int, width: int) -> int:
    """How many placeholder tokens vLLM makes of one for an image of this size; -1 if it makes others too."""
    from vllm.multimodal.processing import ProcessorInputs, TimingContext

    image = black_image(height, width)
    inputs = ProcessorInputs([placeholder], processor.info.parse_mm_data({"image": [image]}))
    tokens = processor.apply(inputs, TimingContext(enabled=False))["prompt_token_ids"]
    return len(tokens) if set(tokens) == {placeholder} else -1


def image_prompt(
    tokens: list[int],
    media: Sequence[PromptMedia],
    support: ImageSupport | None,
    fields: Sequence[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """A prompt as vLLM takes it: one placeholder token per image, the images and their ids.

    With `fields`, one for each image, these take the place of the images: vLLM has their embeddings.

    Raises `RequestRejected` for placeholder tokens without an image: models end on them.
    """
    if support is None:
        return {"prompt_token_ids": tokens}
    check_images(tokens, media, support)
    prompt: dict[str, Any] = {"prompt_token_ids": collapse_placeholders(tokens, media, support.placeholder)}
    if media:
        prompt["multi_modal_data"] = {
            "image": _stacked(fields) if fields else [image_of(item) for item in media]
        }
        prompt["multi_modal_uuids"] = {"image": [item.id for item in media]}
    return prompt


def _stacked(fields: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The fields of several images as vLLM takes them: each as one tensor with a row per image."""
    import torch

    return {name: torch.tensor([one[name] for one in fields]) for name in fields[0]}
