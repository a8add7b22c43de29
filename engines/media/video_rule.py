"""The rule by which a model's video tokens are counted, found by comparing it with what an engine's own processor makes of some videos."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwater.engines.media.image_rule import fitting_rule
from headwater.schemas.tables.card import VideoSupport
from headwater.schemas.tables.media_tokens import count_video_tokens

VideoSize = tuple[int, int, int]
"""Frames, height, width."""


def probes(frames: int) -> tuple[VideoSize, ...]:
    """The videos whose tokens are counted at the start, of up to `frames` frames."""
    sizes = ((1, 64, 64), (2, 64, 64), (3, 120, 500), (frames, 900, 333))
    return tuple([size for size in sizes if size[0] <= frames])


def black_video(size: VideoSize) -> NDArray[np.uint8]:
    """A black video, as engines take it."""
    return np.zeros((*size, 3), np.uint8)


def frames_have_times(config: Any) -> bool:
    """Do the positions of a video's tokens depend on the times of its frames, as in Qwen2.5-VL? Then its grid is not enough for a reader of its embedding.

    `config` is that of Hugging Face.
    """
    vision = getattr(config, "vision_config", None)
    return getattr(vision, "tokens_per_second", None) is not None


def fitting_video_rule(
    config: Any,
    video_processor: Any,
    *,
    placeholder: int,
    limit: int,
    frames: int,
    found: Mapping[VideoSize, int],
) -> VideoSupport | None:
    """The rule that gives exactly what was found, None without one.

    `found` has the tokens of a video by its size, -1 if there are other tokens than placeholders. `config` and `video_processor` are those
    of Hugging Face; `limit` is how many videos a prompt may have, `frames` how many frames one is sampled to.
    """
    for group in {1, int(getattr(video_processor, "temporal_patch_size", 1) or 1)}:
        groups = {size: -(-size[0] // group) for size in found}
        if any(tokens < 0 or tokens % groups[size] for size, tokens in found.items()):
            continue
        frame = fitting_rule(
            config,
            video_processor,
            placeholder=placeholder,
            limit=limit,
            found={size[1:]: tokens // groups[size] for size, tokens in found.items()},
        )
        if frame is None:
            continue
        rule = VideoSupport(frame=frame, per_prompt=limit, frames=frames, group=group)
        if all(count_video_tokens(rule, *size) == tokens for size, tokens in found.items()):
            return rule
    return None
