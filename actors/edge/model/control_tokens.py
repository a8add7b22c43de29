"""Finds spellings of a vocabulary's control tokens in text: by a regular expression, in long texts by compiled code.

A regular expression takes up to 130 ms for a megabyte of HTML and holds the interpreter's lock, so every stream would
wait. The kernel takes about a millisecond, without the lock.
"""

import re
from collections.abc import Iterable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from headwater.schemas.hashing import U8
from headwater.schemas.jit import kernel

I64 = NDArray[np.int64]

MARK = "\U0010fffd"
"""A private-use character with which `headwater.actors.edge.model.chat_template` marks control tokens."""

SHORT_CHARACTERS: Final = 4_096
"""Texts up to this size are searched by the regular expression, in less than a millisecond."""


class ControlTokens:
    """The spellings of control tokens, and `MARK`. At each place the longest one counts."""

    def __init__(self, spellings: Iterable[str]) -> None:
        found = [*sorted(set(spellings) - {""}, key=len, reverse=True), MARK]
        self._pattern = re.compile("(" + "|".join(map(re.escape, found)) + ")")
        encoded = [spelling.encode() for spelling in found]
        self._bytes = np.frombuffer(b"".join(encoded), np.uint8)
        self._ends = np.cumsum([len(one) for one in encoded], dtype=np.int64)
        self._begins_with = np.zeros(1 << 16, np.uint8)
        for one in encoded:
            seconds = one[1:2] or bytes(range(256))
            self._begins_with[[one[0] << 8 | second for second in seconds]] = 1

    def split(self, text: str, most: int) -> list[str]:
        """Text and spellings in turns: a text first and last. At most about `most` spellings are found."""
        if len(text) <= SHORT_CHARACTERS:
            return self._pattern.split(text)
        data = text.encode("utf-8", "surrogatepass")
        found = np.empty((most, 2), np.int64)
        count = find_spellings(
            np.frombuffer(data, np.uint8), self._bytes, self._ends, self._begins_with, found
        )
        if not count:
            return [text]
        pieces: list[str] = []
        done = 0
        for begin, end in found[:count].tolist():
            pieces += [data[done:begin].decode("utf-8", "surrogatepass"), data[begin:end].decode()]
            done = end
        return [*pieces, data[done:].decode("utf-8", "surrogatepass")]


@kernel
def find_spellings(data: U8, spellings: U8, ends: I64, begins_with: U8, found: I64) -> int:
    """Write begin and end of each spelling to `found`, until that is full; returns their number.

    `spellings` are the bytes of all, longest first, with their `ends`. `begins_with`, of shape (65536,), says which two
    bytes begin one.
    """
    count = at = 0
    size = len(data)
    while at < size and count < len(found):
        second = data[at + 1] if at + 1 < size else 0
        length = 0
        if begins_with[data[at] * 256 + second]:
            first = 0
            for last in ends:
                wanted = last - first
                if wanted <= size - at:
                    same = 0
                    while same < wanted and data[at + same] == spellings[first + same]:
                        same += 1
                    if same == wanted:
                        length = wanted
                        break
                first = last
        if length:
            found[count, 0] = at
            found[count, 1] = at + length
            count += 1
            at += length
        else:
            at += 1
    return count
