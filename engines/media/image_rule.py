"""The rule by which a model's image tokens are counted, found by comparing it with what an engine's own processor makes of some images."""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from headwater.schemas.tables.card import ImageSupport
from headwater.schemas.tables.media_tokens import count_image_tokens

PROBES: Final = ((64, 64), (120, 500), (900, 333), (2_000, 1_500))
"""Heights and widths of the images whose tokens are counted at the start."""


def placeholder_of(config: Any, kind: str = "image") -> int | None:
    """The token id that stands for an item of this kind, in a model's configuration."""
    for name in (f"{kind}_token_id", f"{kind}_token_index"):
        token = getattr(config, name, None)
        if token is not None:
            return int(token)
    return None


def black_image(height: int, width: int) -> Any:
    """A black image, as engines take it."""
    from PIL import Image

    return Image.fromarray(np.zeros((height, width, 3), np.uint8))


def fitting_rule(
    config: Any, image_processor: Any, *, placeholder: int, limit: int, found: Mapping[tuple[int, int], int]
) -> ImageSupport | None:
    """The rule that gives exactly what was found, None without one.

    `found` has the tokens of an image by its height and width, -1 if there are other tokens than placeholders. `config` and
    `image_processor` are those of Hugging Face, `limit` is how many images a prompt may have.
    """
    if -1 in found.values():
        return None
    rules = [ImageSupport(placeholder=placeholder, per_prompt=limit, tokens=next(iter(found.values())))]
    vision = getattr(config, "vision_config", None)
    patch, merge = getattr(vision, "patch_size", 0), getattr(vision, "spatial_merge_size", 0)
    size = getattr(image_processor, "size", None)
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
