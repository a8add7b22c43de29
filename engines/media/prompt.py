"""Checks of prompts with media, and their values as engines take them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwater.engines.engine import RequestRejected
from headwater.schemas.media_kind import ONE, SEVERAL
from headwater.schemas.messages.media import PromptMedia
from headwater.schemas.tables.card import MediaSupport
from headwater.schemas.tables.media_tokens import count_media_tokens


def check_media(tokens: Sequence[int], media: Sequence[PromptMedia], support: MediaSupport) -> None:
    """Raises `RequestRejected` unless the prompt's placeholder tokens are those of its media, as many as the model makes of each.

    Engines end on a placeholder without an item, and blocks with other tokens than an engine's would have wrong names.
    """
    placeholders = support.placeholders
    at = 0
    for item in media:
        if item.kind not in placeholders:
            raise RequestRejected(f"this engine takes no {SEVERAL[item.kind]}", param="messages")
        end = item.start + item.tokens
        if item.start < at or list(tokens[item.start : end]) != [placeholders[item.kind]] * item.tokens:
            raise RequestRejected(
                f"tokens {item.start} to {end} of the prompt are not those of {ONE[item.kind]}",
                param="messages",
            )
        at = end
        if item.tokens != _count(support, item):
            raise RequestRejected(
                f"{_described(item)} came with {item.tokens} tokens; this engine makes {_count(support, item)} of it",
                param="messages",
            )
    for kind, most in support.limits.items():
        count = sum(item.kind == kind for item in media)
        if count > most:
            raise RequestRejected(f"{count} {SEVERAL[kind]}; at most {most} are possible", param="messages")
    for token in {*placeholders.values()}:
        kinds = [kind for kind, stands in placeholders.items() if stands == token]
        if tokens.count(token) != sum(item.tokens for item in media if item.kind in kinds):
            what = " or ".join([ONE[kind] for kind in kinds])
            raise RequestRejected(
                f"the prompt has the token {token}, which stands for {what}, without {what}"
            )


def collapse_placeholders(tokens: list[int], media: Sequence[PromptMedia]) -> list[int]:
    """A prompt with one placeholder token for each item, for engines that repeat it themselves."""
    collapsed: list[int] = []
    at = 0
    for item in media:
        # The first of the item's own.
        collapsed += tokens[at : item.start + 1]
        at = item.start + item.tokens
    return [*collapsed, *tokens[at:]]


def _count(support: MediaSupport, item: PromptMedia) -> int:
    try:
        return count_media_tokens(support, item.kind, item.shape)
    except ValueError as error:
        raise RequestRejected(str(error), param="messages") from error


def _described(item: PromptMedia) -> str:
    if item.kind == "image":
        return f"an image of {item.shape[1]} x {item.shape[0]} pixels"
    if item.kind == "video":
        return f"a video of {item.shape[0]} frames of {item.shape[2]} x {item.shape[1]} pixels"
    return f"an audio clip of {item.shape[0]} samples"


def image_of(item: PromptMedia) -> Any:
    """The image as an object of Pillow. Raises `RequestRejected` if its data is not all there."""
    from PIL import Image

    return Image.fromarray(values_of(item))


def values_of(item: PromptMedia) -> NDArray[Any]:
    """The values of an item in its shape, without a copy. Raises `RequestRejected` if they are not all there."""
    check_data(item)
    kind = np.float32 if item.kind in ("audio", "recording") else np.uint8
    return np.frombuffer(item.data, kind).reshape(item.shape)


def check_data(item: PromptMedia) -> None:
    """Raises `RequestRejected` if an item's data is not all there."""
    if len(item.data) != item.size:
        raise RequestRejected(
            f"{ONE[item.kind]} of {item.size} bytes came with {len(item.data)}", param="messages"
        )
