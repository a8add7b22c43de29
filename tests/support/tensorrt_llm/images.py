"""The double's images: an input processor with the recorded methods, expanded prompts, and the keys of blocks in events."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from headwater.engines.tensorrt_llm import config
from headwater.schemas.inference import GenerateRequest
from headwater.schemas.media import PromptMedia
from headwater.schemas.tables import ImageSupport, count_image_tokens
from tests.support.tensorrt_llm.signatures import check_arguments

PLACEHOLDER, FEATURE = 250, 50_001
"""The token id of an image in prompts, and what TensorRT-LLM repeats in its place: an id above its vocabulary."""

SIDE = 28
SUPPORT = ImageSupport(
    placeholder=PLACEHOLDER, per_prompt=16, side=SIDE, pixels_min=4 * SIDE**2, pixels_max=100 * SIDE**2
)


class InputProcessor:
    """As `BaseMultimodalInputProcessor` of a model of Qwen2-VL's kind."""

    def __init__(self) -> None:
        self.config = SimpleNamespace(
            image_token_id=PLACEHOLDER, vision_config=SimpleNamespace(patch_size=14, spatial_merge_size=2)
        )
        size = {"shortest_edge": SUPPORT.pixels_min, "longest_edge": SUPPORT.pixels_max}
        self.processor = SimpleNamespace(image_processor=SimpleNamespace(size=size))

    def get_num_tokens_per_image(self, *, image: Any) -> int:
        """Of an image of Pillow."""
        return count_image_tokens(SUPPORT, image.height, image.width)

    def get_text_with_mm_placeholders(self, mm_counts: dict[str, int]) -> str:
        """For its own processor."""
        return "<image>" * mm_counts["image"]

    def expand_prompt_token_ids_for_mm(
        self, prompt_token_ids: list[int], num_mm_tokens: list[int], hf_processor_mm_kwargs: Any = None
    ) -> list[int]:
        """One placeholder per image becomes as many tokens as it has."""
        counts = iter(num_mm_tokens)
        found: list[int] = []
        for token in prompt_token_ids:
            found += [FEATURE] * next(counts) if token == PLACEHOLDER else [token]
        if next(counts, None) is not None:
            raise ValueError("Expected fewer image placeholders")
        return found


def expanded(inputs: Any, processor: Any) -> tuple[list[int], tuple[PromptMedia, ...]]:
    """A prompt with the tokens that ours have, and its images. Placeholders without an image end a real engine."""
    if not isinstance(inputs, dict):
        assert processor is None or PLACEHOLDER not in inputs, (
            "an image token without an image ends the engine"
        )
        return inputs, ()
    check_arguments(config.PROMPT_INPUTS, inputs, "TokensPrompt")
    images = inputs["multi_modal_data"]["image"]
    ids = inputs["multi_modal_uuids"]["image"]
    if len(ids) != len(images):
        raise ValueError("UUID list length doesn't match data items length")
    counts = [processor.get_num_tokens_per_image(image=image) for image in images]
    tokens = processor.expand_prompt_token_ids_for_mm(inputs["prompt_token_ids"], counts)
    media, at = [], 0
    for image, id_, count in zip(images, ids, counts):
        start = tokens.index(FEATURE, at)
        at = start + count
        pixels = np.asarray(image)
        media.append(PromptMedia("image", id_, start, count, pixels.shape, pixels.tobytes()))
    return [PLACEHOLDER if token == FEATURE else token for token in tokens], tuple(media)


def with_keys(request: GenerateRequest, at: int, tokens: list[int]) -> tuple[list[int], list[dict[str, Any]]]:
    """A block's tokens and `mm_keys` in an event; it begins `at` tokens after the prompt's start."""
    found, keys = list(tokens), []
    for item in request.media:
        first, end = item.start - at, item.start + item.tokens - at
        if first < len(tokens) and end > 0:
            found[max(first, 0) : end] = [FEATURE] * (min(end, len(tokens)) - max(first, 0))
            keys.append({"type": "mm_key", "hash": item.id, "start_offset": max(0, -first)})
    return found, keys
