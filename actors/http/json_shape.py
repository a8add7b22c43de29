"""The shape of a JSON text, measured before it is decoded: a decoder holds the GIL for as long as it runs.

One pass of compiled code without the interpreter's lock, about a nanosecond a byte. What is inside strings is text and
costs a decoder nothing but copying.
"""

import asyncio
from typing import Final, NamedTuple

import numpy as np

from headwater.actors.http.errors import ApiError, bad_request
from headwater.schemas.hashing import U8
from headwater.schemas.jit import kernel

SMALL_BYTES: Final = 64 * 1024
"""A body up to this size is decoded in well under a millisecond, whatever its shape."""

INLINE_BYTES: Final = 1024 * 1024
"""A larger body is measured in a thread."""


class ShapeLimits(NamedTuple):
    """Limits of a body: objects and arrays, members of objects, values of arrays, levels, digits of a number, escapes, strings.

    A string costs a decoder several times what a number does; lists of numbers are prompts.
    """

    containers: int = 65_536
    members: int = 131_072
    values: int = 2_097_152
    depth: int = 128
    digits: int = 512
    escapes: int = 2_097_152
    strings: int = 524_288


LIMITS: Final = ShapeLimits()


@kernel
def count(data: U8) -> tuple[int, int, int, int, int, int, int]:
    """Objects and arrays, members, commas, deepest level, longest run of characters outside strings, escapes, strings."""
    escapes = strings = 0
    containers = members = values = depth = deepest = digits = longest = 0
    text = False
    at, size = 0, len(data)
    while at < size:
        byte = data[at]
        if text:
            if byte == 92:  # backslash
                escapes += 1
                at += 1
            elif byte == 34:
                text = False
        elif byte == 34:  # quote
            text = True
            strings += 1
            digits = 0
        elif byte == 123 or byte == 91:  # { [
            containers += 1
            depth += 1
            deepest = max(deepest, depth)
            digits = 0
        elif byte == 125 or byte == 93:  # } ]
            depth -= 1
            digits = 0
        elif byte == 58:  # :
            members += 1
            digits = 0
        elif byte == 44:  # ,
            values += 1
            digits = 0
        elif byte > 32:
            digits += 1
            longest = max(longest, digits)
        at += 1
    return containers, members, values, deepest, longest, escapes, strings


async def check_shape(body: bytes, limits: ShapeLimits = LIMITS) -> None:
    """Raises `ApiError` 400 if a body exceeds a limit."""
    if len(body) <= SMALL_BYTES:
        return
    data = np.frombuffer(body, np.uint8)
    if len(body) <= INLINE_BYTES:
        found = count(data)
    else:
        found = await asyncio.to_thread(count, data)
    containers, members, values, depth, digits, escapes, strings = found
    for number, most, what in (
        (containers, limits.containers, "objects and arrays"),
        (members, limits.members, "members of objects"),
        (values, limits.values, "values"),
        (depth, limits.depth, "levels"),
        (digits, limits.digits, "characters in a number"),
        (escapes, limits.escapes, "escaped characters"),
        (strings, limits.strings, "strings"),
    ):
        if number > most:
            raise _too_much(most, what)


def _too_much(most: int, what: str) -> ApiError:
    return bad_request(f"The body has more than {most} {what}.", code="body_too_complex")
