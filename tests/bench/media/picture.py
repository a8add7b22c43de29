"""An image of 20 MB: a PNG that does not compress."""

import io
from typing import Final

import numpy as np

from headwater.ops.config.setting import ConfigError

SIDE: Final = 2_600
"""Pixels; without compression three bytes each make a PNG of 20 MB."""


def large_png(seed: int) -> bytes:
    """The file. Raises `ConfigError` without the extra `media`."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ConfigError("bench media needs pip install 'headwater[media]'") from error
    pixels = np.random.default_rng(seed).integers(0, 256, (SIDE, SIDE, 3), np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG", compress_level=0)
    return out.getvalue()
