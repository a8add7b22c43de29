"""Images in KV events that have numbers made from an image's hash in the place of its tokens, as SGLang's do.

A number is of 62 bits and says nothing of the image's id, so the images of the engine's own requests are remembered by theirs.
An image's numbers repeat over its tokens: a block that begins within an image shows which one, but not how far in.
That is known from the block before it.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headwater.schemas import hashing

TOKEN_MAX: Final = (1 << 32) - 1
"""Numbers above stand for a part of an image; that one is not is as likely as 1 to 2^30."""

REMEMBERED: Final = 32_768
"""Bound on remembered images."""


class Within(NamedTuple):
    """A place within an image: after `before` of its tokens."""

    id: str
    before: int


class _Image(NamedTuple):
    id: str
    tokens: int
    numbers: NDArray[np.int64]


class Resolved(NamedTuple):
    """The tokens of an event up to the first that stands for an unknown image, with those of images replaced by the placeholder.

    `images` are (id, first token, tokens) as `hashing.media_digests` takes them; one that began before has a negative first token.
    """

    tokens: hashing.U32
    images: list[tuple[str, int, int]]

    def within(self, position: int) -> Within | None:
        """The place within an image before the token at `position`, None between images."""
        for id_, start, tokens in self.images:
            if start < position < start + tokens:
                return Within(id_, position - start)
        return None


class ImageSentinels:
    """The images of an engine's requests by the numbers that its events have for them."""

    def __init__(self, placeholder: int = 0) -> None:
        """`placeholder` is the token id that prompts have for images."""
        self._placeholder = placeholder
        self._by_number: OrderedDict[int, _Image] = OrderedDict()
        self._by_id: dict[str, _Image] = {}

    def learn(self, id_: str, tokens: int, numbers: Sequence[int]) -> None:
        """A request has this image: its events will have `numbers`, over and over, in the place of its `tokens` tokens."""
        known = self._by_id.get(id_)
        if known is not None and known.tokens == tokens:
            self._by_number.move_to_end(int(known.numbers[0]))
            return
        image = _Image(id_, tokens, np.array(numbers, np.int64))
        self._by_id[id_] = image
        self._by_number[int(image.numbers[0])] = image
        if len(self._by_number) > REMEMBERED:
            _, forgotten = self._by_number.popitem(last=False)
            self._by_id.pop(forgotten.id, None)

    def resolve(self, given: Sequence[int], within: Within | None) -> Resolved:
        """The tokens of an event whose first one follows the place `within` an image, if that is not None."""
        numbers = np.array(given, np.int64)
        tokens = numbers.astype(np.uint32)
        special = np.flatnonzero(numbers > TOKEN_MAX)
        images: list[tuple[str, int, int]] = []
        at = 0
        if within is not None:
            image = self._by_id.get(within.id)
            if image is None or not self._take(image, -within.before, numbers, tokens, images):
                return Resolved(tokens[:0], [])
            at = image.tokens - within.before
        while (number := int(np.searchsorted(special, at))) < len(special):
            at = int(special[number])
            image = self._by_number.get(int(numbers[at]))
            if image is None or not self._take(image, at, numbers, tokens, images):
                return Resolved(tokens[:at], images)
            at += image.tokens
        return Resolved(tokens, images)

    def _take(
        self,
        image: _Image,
        start: int,
        numbers: NDArray[np.int64],
        tokens: hashing.U32,
        images: list[tuple[str, int, int]],
    ) -> bool:
        """Replace the image that begins at `start`, unless its numbers are others."""
        first, end = max(start, 0), min(start + image.tokens, len(numbers))
        expected = image.numbers[np.arange(first - start, end - start) % len(image.numbers)]
        if not np.array_equal(numbers[first:end], expected):
            return False
        tokens[first:end] = self._placeholder
        images.append((image.id, start, image.tokens))
        return True
