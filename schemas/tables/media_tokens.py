"""How many placeholder tokens an item of media has in a prompt, from its shape."""

import math
from typing import Final

from headwater.schemas.media_kind import SEVERAL, PromptMediaKind
from headwater.schemas.tables.card import AudioSupport, ImageSupport, MediaSupport, VideoSupport

RATIO_MAX: Final = 200
"""Of an image's longer side to its shorter one: models that resize refuse narrower ones."""


def count_media_tokens(support: MediaSupport, kind: PromptMediaKind, shape: tuple[int, ...]) -> int:
    """Tokens of one item with a shape as in `PromptMedia`. Raises ValueError, with a message for people, if the model does not take it."""
    if kind == "image" and support.images is not None:
        return count_image_tokens(support.images, *shape[:2])
    if kind == "video" and support.videos is not None:
        return count_video_tokens(support.videos, *shape[:3])
    if kind == "audio" and support.audio is not None:
        return count_audio_tokens(support.audio, shape[0])
    raise ValueError(f"the model takes no {SEVERAL[kind]}")


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


def count_video_tokens(support: VideoSupport, frames: int, height: int, width: int) -> int:
    """Tokens of one video: those of an image for each group of frames. Raises ValueError as `count_image_tokens` does, and for too many frames."""
    if frames > support.frames:
        raise ValueError(f"a video of {frames} frames is too long: at most {support.frames} are possible")
    return -(-frames // support.group) * count_image_tokens(support.frame, height, width)


def count_audio_tokens(support: AudioSupport, samples: int) -> int:
    """Tokens of one recording. Raises ValueError, with a message for people, for one that is too short or too long."""
    if samples > support.samples_max:
        raise ValueError(
            f"an audio clip of {samples / support.rate_hz:.3g} s is too long: at most {support.samples_max / support.rate_hz:g} s are possible"
        )
    tokens = (samples + support.offset) // support.stride
    if tokens < 1:
        shortest = (support.stride - support.offset) / support.rate_hz
        raise ValueError(
            f"an audio clip of {samples / support.rate_hz:.3g} s is too short: at least {shortest:.3g} s are necessary"
        )
    return tokens
