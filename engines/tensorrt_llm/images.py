"""Images for TensorRT-LLM: how a model takes them, and requests' images in prompts and in KV events.

A prompt of token ids with images (`multi_modal_data`) is expanded by the model's input processor, which repeats the placeholder's place
with a token id of its own. Our prompts are expanded already, since the number of tokens is part of their block hashes: each run is
collapsed again. In KV events an image's tokens are the processor's, and `mm_keys` name the images that a block overlaps:

    {"type": "mm_key", "hash": the id given as `multi_modal_uuids`, "start_offset": tokens of the image before the block}
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import structlog

from headwater.engines.media.image_rule import PROBES, black_image, fitting_rule, placeholder_of
from headwater.engines.media.prompt import check_media, collapse_placeholders, image_of
from headwater.engines.tensorrt_llm.config.recorded import INPUT_PROCESSOR
from headwater.schemas.messages.media import PromptMedia
from headwater.schemas.tables.card import ImageSupport, MediaSupport

IMAGES_MAX: Final = 16
"""Of a prompt: TensorRT-LLM states no limit."""

REMEMBERED: Final = 32_768
"""Bound on the images whose number of tokens is remembered, for events that name them."""

_log = structlog.get_logger("headwater.tensorrt_llm")


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
        found = list(tokens)
        images: list[tuple[str, int, int]] = []
        at = 0
        for key in keys:
            count = self._tokens.get(str(key["hash"]))
            if count is None:
                return None
            start = -int(key["start_offset"])
            if not start:
                # It begins in this block, where the first token that stands for an image and is no earlier one's is.
                start = next((n for n in range(at, len(found)) if found[n] == self._feature), -1)
                if start < 0:
                    return None
            end = min(start + count, len(found))
            found[max(start, 0) : end] = [self.support.placeholder] * (end - max(start, 0))
            images.append((str(key["hash"]), start, count))
            at = end
        return BlockImages(found, images)


def image_handling(llm: Any) -> TensorRtImages | None:
    """How the model of an `LLM` takes images. None for a model without, for one whose prompts cannot be predicted exactly, and for a
    release that expands no prompts of token ids: their requests with images are rejected.
    """
    processor = getattr(llm, "input_processor", None)
    config = getattr(processor, "config", None)
    placeholder = placeholder_of(config)
    if placeholder is None:
        return None
    missing = [name for name in INPUT_PROCESSOR if not hasattr(processor, name)]
    if missing:
        _log.warning("media_not_served", kind="image", reason=f"its input processor has no {missing[0]}")
        return None
    try:
        found = {
            size: int(processor.get_num_tokens_per_image(image=black_image(*size)))  # type: ignore[union-attr]
            for size in PROBES
        }
        tokens = next(iter(found.values()))
        expanded = processor.expand_prompt_token_ids_for_mm([placeholder], [tokens])  # type: ignore[union-attr]
        # Newer releases return what else they made of it as well.
        expanded = expanded[0] if isinstance(expanded, tuple) else expanded
        inner = getattr(processor.processor, "image_processor", None)  # type: ignore[union-attr]
        support = fitting_rule(config, inner, placeholder=placeholder, limit=IMAGES_MAX, found=found)
    except Exception as error:  # other models' processors fail in any way: such a model serves text
        _log.warning("media_not_served", kind="image", reason=f"{type(error).__name__}: {error}")
        return None
    if support is None or len(expanded) != tokens or len(set(expanded)) != 1:
        _log.warning("media_not_served", kind="image", reason="its image tokens follow no known rule")
        return None
    return TensorRtImages(support, int(expanded[0]))
