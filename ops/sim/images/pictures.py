"""The pictures that simulated clients send, and what the simulated engine sees in them."""

import base64
from collections.abc import Sequence
from functools import cache
from typing import Final, NamedTuple

from headwater.engines.sim.embedding import content_of, embedding_of
from headwater.engines.sim.model import image_support
from headwater.engines.sim.sequence import image_offset
from headwater.schemas.messages.media import PromptMedia
from headwater.schemas.tables.media_tokens import count_image_tokens

SIDES: Final = (56, 84, 140)
"""Pixels: of 4, 9 and 25 tokens."""


class Picture(NamedTuple):
    """A square of one colour."""

    colour: int
    side: int


PICTURES: Final = tuple(Picture(40 * number, SIDES[number % len(SIDES)]) for number in range(1, 7))
"""Few, so that embeddings are found in caches."""


@cache
def data_url(picture: Picture) -> str:
    """A picture as clients send it: a portable pixmap, which needs no library."""
    file = b"P6 %d %d 255\n" % (picture.side, picture.side) + pixels_of(picture)
    return "data:image/x-portable-pixmap;base64," + base64.b64encode(file).decode()


def pixels_of(picture: Picture) -> bytes:
    """RGB."""
    return bytes([picture.colour]) * (picture.side * picture.side * 3)


@cache
def _content(picture: Picture) -> int:
    shape = (picture.side, picture.side, 3)
    tokens = count_image_tokens(image_support(), *shape[:2])
    return content_of(embedding_of(PromptMedia("image", "", 0, tokens, shape, pixels_of(picture))))


def answer_shift(pictures: Sequence[Picture]) -> int:
    """By how much these pictures, in this order, shift an answer."""
    return image_offset([_content(picture) for picture in pictures])
