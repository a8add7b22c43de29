"""Images for requests, made from a seed."""

import base64
import io
from typing import Any

import numpy as np
from PIL import Image

WIDTH, HEIGHT = 224, 196
"""Multiples of 28 pixels: the tiny vision model has 8 x 7 tokens for one."""


def picture_file(
    seed: int, form: str = "PNG", size: tuple[int, int] = (WIDTH, HEIGHT), **options: Any
) -> bytes:
    """A file with noise, of a width and height. `options` are those of Pillow's writer."""
    width, height = size
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, form, **options)
    return buffer.getvalue()


def picture_url(seed: int, form: str = "PNG", **options: Any) -> str:
    """The file as a data URL."""
    data = base64.b64encode(picture_file(seed, form, **options)).decode()
    return f"data:image/{form.lower()};base64,{data}"
