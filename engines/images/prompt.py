"""Checks of prompts with images, and their pixels as engines take them."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from headwater.engines.engine import RequestRejected
from headwater.schemas.image_tokens import count_image_tokens
from headwater.schemas.messages.media import PromptMedia
from headwater.schemas.tables.card import ImageSupport


def check_images(tokens: Sequence[int], media: Sequence[PromptMedia], support: ImageSupport) -> None:
    """Raises `RequestRejected` unless the prompt's placeholder tokens are those of its images, as many as the model makes of each.

    Engines end on a placeholder without an image, and blocks with other tokens than an engine's would have wrong names.
    """
    at = 0
    for item in media:
        end = item.start + item.tokens
        if item.start < at or list(tokens[item.start : end]) != [support.placeholder] * item.tokens:
            raise RequestRejected(
                f"tokens {item.start} to {end} of the prompt are no image's", param="messages"
            )
        at = end
        if item.tokens != _count(support, item):
            raise RequestRejected(
                f"an image of {item.shape[1]} x {item.shape[0]} pixels came with {item.tokens} tokens; this engine makes "
                f"{_count(support, item)} of it",
                param="messages",
            )
    if len(media) > support.per_prompt:
        raise RequestRejected(
            f"{len(media)} images; at most {support.per_prompt} are possible", param="messages"
        )
    if list(tokens).count(support.placeholder) != sum(item.tokens for item in media):
        raise RequestRejected(
            f"the prompt has the token {support.placeholder}, which stands for an image, without an image"
        )


def collapse_placeholders(tokens: list[int], media: Sequence[PromptMedia], placeholder: int) -> list[int]:
    """A prompt with one placeholder token for each image, for engines that repeat it themselves."""
    collapsed: list[int] = []
    at = 0
    for item in media:
        collapsed += [*tokens[at : item.start], placeholder]
        at = item.start + item.tokens
    return [*collapsed, *tokens[at:]]


def _count(support: ImageSupport, item: PromptMedia) -> int:
    height, width = item.shape[:2]
    try:
        return count_image_tokens(support, height, width)
    except ValueError as error:
        raise RequestRejected(str(error), param="messages") from error


def image_of(item: PromptMedia) -> Any:
    """The image as an object of Pillow. Raises `RequestRejected` if its data is not all there."""
    from PIL import Image

    check_pixels(item)
    return Image.fromarray(np.frombuffer(item.data, np.uint8).reshape(item.shape))


def check_pixels(item: PromptMedia) -> None:
    """Raises `RequestRejected` if an image's data is not all there."""
    if len(item.data) != item.size:
        raise RequestRejected(f"an image of {item.size} bytes came with {len(item.data)}", param="messages")
