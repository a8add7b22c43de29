"""JSON bodies with strings of megabytes, such as images in base64, decoded without a copy on the event loop.

A decoder holds the interpreter's lock while it scans and copies such a string: 8 to 25 ms for 27 MB. So a thread finds them first, makes
text of them without the lock, and puts a short mark in place of each. What is decoded has the marks, and then the texts in their places.
"""

import asyncio
import secrets
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from headwater.actors.http.unlocked import LARGE_BYTES, ascii_text
from headwater.schemas.hashing import U8
from headwater.schemas.jit import kernel

STRINGS_MAX: Final = 64
"""Of one body; more are decoded as other strings are."""

MARK_CHARACTERS: Final = 65_536
"""More than any field with a maximum length may have: a mark is too long wherever its text is."""

_NONCE: Final = secrets.token_hex(16)


class ShortenedBody(bytes):
    """A body with marks in place of its long strings. `whole` is what was sent, `texts` are the strings by their marks."""

    whole: bytes
    texts: dict[str, str]

    def decode_with(self, decoder: msgspec.json.Decoder[Any]) -> Any:
        """What the whole body decodes to. Raises as the decoder does."""
        found = decoder.decode(self)
        left = dict(self.texts)
        found = _with_texts(found, left)
        # A name, a value that is not decoded, or one of two members of the same name.
        return decoder.decode(self.whole) if left else found


def whole_body(body: bytes) -> bytes:
    """What was sent."""
    return body.whole if isinstance(body, ShortenedBody) else body


async def shorten(body: bytes) -> bytes:
    """The body, with marks in place of long strings if it has such."""
    if len(body) < LARGE_BYTES:
        return body
    return await asyncio.to_thread(_shorten, body)


def _shorten(body: bytes) -> bytes:
    begins, ends = np.zeros(STRINGS_MAX, np.int64), np.zeros(STRINGS_MAX, np.int64)
    count = find_long_strings(np.frombuffer(body, np.uint8), LARGE_BYTES, begins, ends)
    if not count:
        return body
    pieces: list[bytes] = []
    texts: dict[str, str] = {}
    last = 0
    for number, (begin, end) in enumerate(zip(begins[:count].tolist(), ends[:count].tolist(), strict=True)):
        mark = f"{_NONCE}{number:04}".ljust(MARK_CHARACTERS, "0")
        texts[mark] = ascii_text(body, begin, end)
        pieces += [body[last:begin], mark.encode()]
        last = end
    short = ShortenedBody(b"".join([*pieces, body[last:]]))
    short.whole, short.texts = body, texts
    return short


@kernel
def find_long_strings(data: U8, least: int, begins: NDArray[np.int64], ends: NDArray[np.int64]) -> int:
    """How many strings of at least `least` bytes there are, all of printable ASCII and without escapes, and where; those that there is room for."""
    found, begin, plain = 0, -1, True
    at, size = 0, len(data)
    while at < size:
        byte = data[at]
        if begin < 0:
            if byte == 34:  # quote
                begin, plain = at + 1, True
        elif byte == 92:  # backslash
            plain = False
            at += 1
        elif byte == 34:
            if plain and at - begin >= least and found < len(begins):
                begins[found], ends[found] = begin, at
                found += 1
            begin = -1
        elif byte < 32 or byte > 126:
            plain = False
        at += 1
    return found


def _with_texts(value: Any, left: dict[str, str]) -> Any:
    """A decoded value with texts in place of marks; what was found is removed from `left`."""
    if not left:
        return value
    if isinstance(value, str):
        return left.pop(value, value) if len(value) == MARK_CHARACTERS else value
    if isinstance(value, dict):
        for name, inner in value.items():
            value[name] = _with_texts(inner, left)
    elif isinstance(value, list):
        for place, inner in enumerate(value):
            value[place] = _with_texts(inner, left)
    elif isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            inner = getattr(value, name)
            if isinstance(inner, str | dict | list | msgspec.Struct):
                msgspec.structs.force_setattr(value, name, _with_texts(inner, left))
    return value
