"""Prompts of synthetic traffic: sequences of text segments, cut into the blocks of a trace.

Two prompts share a block if their text is equal up to its end, as in an engine's prefix cache.
"""

from collections.abc import Iterable
from typing import NamedTuple

from headwater.ops.bench.trace import TRACE_BLOCK


class TextSegment(NamedTuple):
    """`tokens` of text that `key` identifies: equal keys and lengths are equal text."""

    key: int
    tokens: int


class BlockIds:
    """The ids of prompts' blocks, numbered by first appearance as in Mooncake's traces."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[object, ...], int] = {}
        self._keys = 0

    def new_segment(self, tokens: int) -> TextSegment:
        """Text that no earlier segment has. At least one token."""
        self._keys += 1
        return TextSegment(self._keys, max(1, tokens))

    def ids_of(self, prompt: Iterable[TextSegment]) -> tuple[int, ...]:
        """One id for each block of the prompt, the last of which may be partial."""
        ids: list[int] = []
        parts: list[tuple[int, int, int]] = []
        room, before = TRACE_BLOCK, -1
        for key, tokens in prompt:
            start = 0
            while start < tokens:
                taken = min(room, tokens - start)
                parts.append((key, start, taken))
                start, room = start + taken, room - taken
                if not room:
                    before = self._number(before, parts)
                    ids.append(before)
                    parts, room = [], TRACE_BLOCK
        if parts:
            ids.append(self._number(before, parts))
        return tuple(ids)

    def _number(self, before: int, parts: list[tuple[int, int, int]]) -> int:
        return self._numbers.setdefault((before, *parts), len(self._numbers))


def length_of(prompt: Iterable[TextSegment]) -> int:
    """Tokens of a prompt."""
    return sum(tokens for _, tokens in prompt)
