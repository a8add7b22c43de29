"""Media in KV events that have numbers made from an item's hash in the place of its tokens, as SGLang's do.

A number is of 62 bits and says nothing of the item's id, so the items of the engine's own requests are remembered by theirs.
An item's numbers repeat over its tokens: a block that begins within an item shows which one, but not how far in.
That is known from the block before it.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headwater.schemas import hashing

TOKEN_MAX: Final = (1 << 32) - 1
"""Numbers above stand for a part of an item; that one is not is as likely as 1 to 2^30."""

REMEMBERED: Final = 32_768
"""Bound on remembered items."""


class Within(NamedTuple):
    """A place within an item: after `before` of its tokens."""

    id: str
    before: int


class _Item(NamedTuple):
    id: str
    tokens: int
    numbers: NDArray[np.int64]
    placeholder: int


class Resolved(NamedTuple):
    """The tokens of an event up to the first that stands for an unknown item, with those of items replaced by their placeholders.

    `media` are (id, first token, tokens) as `hashing.media_digests` takes them; one that began before has a negative first token.
    """

    tokens: hashing.U32
    media: list[tuple[str, int, int]]

    def within(self, position: int) -> Within | None:
        """The place within an item before the token at `position`, None between items."""
        for id_, start, tokens in self.media:
            if start < position < start + tokens:
                return Within(id_, position - start)
        return None


class MediaSentinels:
    """The media of an engine's requests by the numbers that its events have for them."""

    def __init__(self) -> None:
        self._by_number: OrderedDict[int, _Item] = OrderedDict()
        self._by_id: dict[str, _Item] = {}

    def learn(self, id_: str, tokens: int, numbers: Sequence[int], placeholder: int) -> None:
        """A request has this item: its events will have `numbers`, over and over, in the place of its `tokens` tokens, each a `placeholder`."""
        known = self._by_id.get(id_)
        if known is not None and known.tokens == tokens:
            self._by_number.move_to_end(int(known.numbers[0]))
            return
        item = _Item(id_, tokens, np.array(numbers, np.int64), placeholder)
        self._by_id[id_] = item
        self._by_number[int(item.numbers[0])] = item
        if len(self._by_number) > REMEMBERED:
            _, forgotten = self._by_number.popitem(last=False)
            self._by_id.pop(forgotten.id, None)

    def resolve(self, given: Sequence[int], within: Within | None) -> Resolved:
        """The tokens of an event whose first one follows the place `within` an item, if that is not None."""
        numbers = np.array(given, np.int64)
        tokens = numbers.astype(np.uint32)
        special = np.flatnonzero(numbers > TOKEN_MAX)
        media: list[tuple[str, int, int]] = []
        at = 0
        if within is not None:
            item = self._by_id.get(within.id)
            if item is None or not self._take(item, -within.before, numbers, tokens, media):
                return Resolved(tokens[:0], [])
            at = item.tokens - within.before
        while (number := int(np.searchsorted(special, at))) < len(special):
            at = int(special[number])
            item = self._by_number.get(int(numbers[at]))
            if item is None or not self._take(item, at, numbers, tokens, media):
                return Resolved(tokens[:at], media)
            at += item.tokens
        return Resolved(tokens, media)

    def _take(
        self,
        item: _Item,
        start: int,
        numbers: NDArray[np.int64],
        tokens: hashing.U32,
        media: list[tuple[str, int, int]],
    ) -> bool:
        """Replace the item that begins at `start`, unless its numbers are others."""
        first, end = max(start, 0), min(start + item.tokens, len(numbers))
        expected = item.numbers[np.arange(first - start, end - start) % len(item.numbers)]
        if not np.array_equal(numbers[first:end], expected):
            return False
        tokens[first:end] = item.placeholder
        media.append((item.id, start, item.tokens))
        return True
