"""Images for vLLM: how a model takes them, learned by letting vLLM's own processor expand some, and a request's images as it wants them.

vLLM expands one placeholder token per image by itself. The requests of this project have the expanded ones, since their number is part of
the prompt's block hashes; so each run is collapsed again.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import structlog

from headwater.engines.engine import RequestRejected
from headwater.engines.vllm.embeddings.files import PROBE_ID
from headwater.schemas.image_tokens import count_image_tokens
from headwater.schemas.messages.media import PromptMedia
from headwater.schemas.tables.card import ImageSupport

PROBES: Final = ((64, 64), (120, 500), (900, 333), (2_000, 1_500))
"""Heights and widths of the images whose tokens are counted at the start."""

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
    placeholder = _placeholder(model.hf_config)
    if not limit or placeholder is None:
        return None
    try:
        found = {size: _expanded(processor, placeholder, *size) for size in PROBES}
        support = _fitting(processor, model.hf_config, placeholder, int(limit), found)
    except Exception as error:  # other models' processors fail in any way: such a model serves text
        _log.warning("images_not_served", model=model.model, reason=f"{type(error).__name__}: {error}")
        return None
    if support is None:
        _log.warning("images_not_served", model=model.model, reason="its image tokens follow no known rule")
    return support


def _placeholder(config: Any) -> int | None:
    for name in ("image_token_id", "image_token_index"):
        token = getattr(config, name, None)
        if token is not None:
            return int(token)
    return None


def _expanded(processor: Any, placeholder: int, height: int, width: int) -> int:
    """How many placeholder tokens vLLM makes of one for an image of this size; -1 if it makes others too."""
    from PIL import Image
    from vllm.multimodal.processing import ProcessorInputs, TimingContext

    image = Image.fromarray(np.zeros((height, width, 3), np.uint8))
    inputs = ProcessorInputs([placeholder], processor.info.parse_mm_data({"image": [image]}))
    tokens = processor.apply(inputs, TimingContext(enabled=False))["prompt_token_ids"]
    return len(tokens) if set(tokens) == {placeholder} else -1


def _fitting(
    processor: Any, config: Any, placeholder: int, limit: int, found: dict[tuple[int, int], int]
) -> ImageSupport | None:
    """The rule that gives exactly what was found."""
    if -1 in found.values():
        return None
    rules = [ImageSupport(placeholder=placeholder, per_prompt=limit, tokens=next(iter(found.values())))]
    vision = getattr(config, "vision_config", None)
    patch, merge = getattr(vision, "patch_size", 0), getattr(vision, "spatial_merge_size", 0)
    size = getattr(processor.info.get_image_processor(), "size", None)
    if patch and merge and size and "shortest_edge" in size:
        rules.append(
            ImageSupport(
                placeholder=placeholder,
                per_prompt=limit,
                side=patch * merge,
                pixels_min=int(size["shortest_edge"]),
                pixels_max=int(size["longest_edge"]),
            )
        )
    for rule in rules:
        if all(count_image_tokens(rule, *pixels) == tokens for pixels, tokens in found.items()):
            return rule
    return None


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
    collapsed: list[int] = []
    at = 0
    for item in media:
        collapsed += [*tokens[at : item.start], support.placeholder]
        at = item.start + item.tokens
        if tokens[item.start : at] != [support.placeholder] * item.tokens:
            raise RequestRejected(
                f"tokens {item.start} to {at} of the prompt are no image's", param="messages"
            )
    collapsed += tokens[at:]
    if collapsed.count(support.placeholder) != len(media):
        raise RequestRejected(
            f"the prompt has the token {support.placeholder}, which stands for an image, without an image"
        )
    prompt: dict[str, Any] = {"prompt_token_ids": collapsed}
    if media:
        prompt["multi_modal_data"] = {
            "image": _stacked(fields) if fields else [pixels(item) for item in media]
        }
        prompt["multi_modal_uuids"] = {"image": [item.id for item in media]}
    return prompt


def _stacked(fields: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The fields of several images as vLLM takes them: each as one tensor with a row per image."""
    import torch

    return {name: torch.tensor([one[name] for one in fields]) for name in fields[0]}


def probe_image(support: ImageSupport) -> PromptMedia:
    """A black image, to try an engine with."""
    height, width = PROBES[0]
    tokens = count_image_tokens(support, height, width)
    data = bytes(height * width * 3)
    return PromptMedia("image", PROBE_ID, 0, tokens, (height, width, 3), data)


def pixels(item: PromptMedia) -> Any:
    """An image as vLLM's processor takes it. Raises `RequestRejected`."""
    from PIL import Image

    if len(item.data) != item.size:
        raise RequestRejected(f"an image of {item.size} bytes came with {len(item.data)}", param="messages")
    return Image.fromarray(np.frombuffer(item.data, np.uint8).reshape(item.shape))
