"""How many placeholder tokens an image has in a prompt, from its size in pixels."""

import math
from typing import Final

from headwater.schemas.tables.card import ImageSupport

RATIO_MAX: Final = 200
"""Of an image's longer side to its shorter one: models that resize refuse narrower ones."""


def count_image_tokens(support: ImageSupport, height: int, width: int) -> int:
    """Tokens of one image. Raises ValueError, with a message for people, if the model does not take its shape.

    Models with a fixed count ignore the size. The others (Qwen2-VL and its successors) round both sides to multiples of `side`, keeping the
    area between `pixels_min` and `pixels_max`, and have one token per square. The rounding is Hugging Face's `smart_resize`.
    """
    if support.tokens:
        return support.tokens
    side = support.side
    if max(height, width) > RATIO_MAX * min(height, width):
        raise ValueError(
            f"an image of {width} x {height} pixels is too narrow: the ratio of its sides is at most {RATIO_MAX}"
        )
    # Python rounds halves to even, as the original does.
    rows, columns = round(height / side) * side, round(width / side) * side
    if rows * columns > support.pixels_max:
        shrink = math.sqrt(height * width / support.pixels_max)
        rows = max(side, math.floor(height / shrink / side) * side)
        columns = max(side, math.floor(width / shrink / side) * side)
    elif rows * columns < support.pixels_min:
        grow = math.sqrt(support.pixels_min / (height * width))
        rows = math.ceil(height * grow / side) * side
        columns = math.ceil(width * grow / side) * side
    return rows // side * (columns // side)
