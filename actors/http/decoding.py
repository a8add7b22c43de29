"""Decoding of JSON bodies into msgspec types: their shape is bounded, long strings are decoded apart, and errors name the field.

The values in an error that a field may have are found in the type, as msgspec's own errors have none.

Copies: Python copies with its lock held, and a copy of 27 MB takes 2 to 25 ms, most of it for pages that the system has yet to give. Here an
object is allocated first, which touches none of its pages, and filled by C's `memmove`, for which ctypes gives the lock up. Nothing
else has the object until it is whole.

Long strings: a decoder holds the interpreter's lock while it scans and copies one: 8 to 25 ms for 27 MB. So a thread finds them first, makes
text of them without the lock, and puts a short mark in place of each. The decoder sees the marks, and then the texts take their places.

Shape: compiled code measures it in one pass without the interpreter's lock, about a nanosecond a byte. What is inside strings is text and
costs a decoder nothing but copying.
"""

import asyncio
import ctypes
import re
import secrets
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from msgspec import inspect
from numpy.typing import NDArray

from headwater.actors.http.errors import ApiError, bad_request, method_not_allowed
from headwater.schemas.hashing import U8
from headwater.schemas.jit import kernel

LARGE_BYTES: Final = 1024 * 1024
"""Smaller copies take well under a millisecond."""

_new_bytes: Final[Any] = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_char_p, ctypes.c_ssize_t)(
    ("PyBytes_FromStringAndSize", ctypes.pythonapi)
)
_new_text: Final[Any] = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_ssize_t, ctypes.c_uint32)(
    ("PyUnicode_New", ctypes.pythonapi)
)
_characters_of: Final[Any] = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p)(
    ("PyUnicode_AsUTF8AndSize", ctypes.pythonapi)
)
"""The function that returns the address of an ASCII text's characters, without a copy."""


def joined(parts: list[bytes]) -> bytes:
    """One object of all parts, at least `LARGE_BYTES` together. Each is given up as it is copied: `parts` is empty afterwards."""
    size = sum(map(len, parts))
    assert size >= LARGE_BYTES, "small objects are shared by the interpreter"
    made: bytes = _new_bytes(None, size)
    to = _address(made)
    parts.reverse()
    while parts:
        part = parts.pop()
        ctypes.memmove(to, part, len(part))
        to += len(part)
    return made


def ascii_text(data: bytes, begin: int, end: int) -> str:
    """The text of `data[begin:end]`, at least `LARGE_BYTES`, all of which the caller knows to be ASCII."""
    size = end - begin
    assert begin >= 0
    assert end <= len(data)
    assert size >= LARGE_BYTES, "small objects are shared by the interpreter"
    made: str = _new_text(size, 127)
    ctypes.memmove(_characters_of(made, None), _address(data) + begin, size)
    return made


def _address(data: bytes) -> int:
    found = ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value
    assert found is not None
    return found


# Strings of megabytes, such as images in base64, decoded without a copy on the event loop.

STRINGS_MAX: Final = 64
"""The most strings of one body that are decoded apart; others are decoded as usual."""

MARK_CHARACTERS: Final = 65_536
"""More than any field with a maximum length may have: a mark is too long wherever its text is."""

_NONCE: Final = secrets.token_hex(16)


class ShortenedBody(bytes):
    """A body with marks in place of its long strings. `whole` is what was sent, `texts` are the strings by their marks."""

    whole: bytes
    texts: dict[str, str]

    def decode_with(self, decoder: msgspec.json.Decoder[Any]) -> Any:
        """Return what the whole body decodes to. Raises as the decoder does."""
        found = decoder.decode(self)
        left = dict(self.texts)
        found = _with_texts(found, left)
        # A name, a value that is not decoded, or one of two members of the same name.
        return decoder.decode(self.whole) if left else found


def whole_body(body: bytes) -> bytes:
    """Return what was sent."""
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
    """Write where strings of at least `least` bytes of printable ASCII without escapes are, as far as there is room; return their number."""
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


# The checks of endpoints: the method, and the body as a type.

_INVALID_VALUE: Final = re.compile(r"(Invalid (?:enum )?value) .*", re.DOTALL)
"""msgspec repeats a value that is none of those allowed; errors do not repeat what a client sent."""

_MISSING: Final = re.compile(r"Object missing required field `(\w+)`")

SHOWN_MAX: Final = 24
"""Longer lists of values are not shown."""

_STEP: Final = re.compile(r"\.(\w+)|\[[^\]]*\]")


def require_method(wanted: str, method: str) -> None:
    """Raises a 405 for another method than the wanted one."""
    if method != wanted:
        raise method_not_allowed(wanted)


def decode_body(decoder: msgspec.json.Decoder[Any], body: bytes) -> Any:
    """Read a body. Raises `ApiError` 400 naming the field."""
    try:
        return body.decode_with(decoder) if isinstance(body, ShortenedBody) else decoder.decode(body)
    except msgspec.ValidationError as error:
        raise invalid_field(error, decoder.type) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad_request(f"The body is not valid JSON: {error}") from error


def invalid_field(error: msgspec.ValidationError, annotation: Any) -> ApiError:
    """400 naming the field at fault, or the one that is missing, and the values that it may have, of a body of this type."""
    message, _, where = str(error).partition(" - at `$")
    message, repeated = _INVALID_VALUE.subn(r"\1", message)
    param = where.rstrip("`").lstrip(".") or None
    missing = _MISSING.fullmatch(message)
    if missing is not None:
        param = f"{param}.{missing[1]}" if param else missing[1]
    elif repeated and param:
        values = allowed_values(annotation, param)
        message += f": it must be {'one of ' if len(values) > 1 else ''}{', '.join(values)}" if values else ""
    return bad_request(f"{message}" + (f" (at {param})" if param else ""), param=param)


def allowed_values(annotation: Any, path: str) -> tuple[str, ...]:
    """The values of the field at `path`, such as `messages[0].role`, in their order; empty if it is no choice, or a very long one."""
    steps = tuple(step[1] or "" for step in _STEP.finditer(f".{path}"))
    found = tuple(dict.fromkeys(_values_at([_type_info(annotation)], steps)))
    return found if len(found) <= SHOWN_MAX else ()


@lru_cache
def _type_info(annotation: Any) -> inspect.Type:
    return inspect.type_info(annotation)


def _values_at(types: Iterable[inspect.Type], steps: tuple[str, ...]) -> Iterator[str]:
    """`steps`: names of fields, "" for an item of a list."""
    if not steps:
        for one in _members(types):
            if isinstance(one, inspect.LiteralType):
                yield from map(str, one.values)
            elif isinstance(one, inspect.EnumType):
                yield from (str(member.value) for member in one.cls)
        return
    step, rest = steps[0], steps[1:]
    for one in _members(types):
        yield from _values_at(list(_children(one, step)), rest)
        if not rest and isinstance(one, inspect.StructType) and one.tag_field == step:
            yield str(one.tag)


def _children(one: inspect.Type, step: str) -> Iterator[inspect.Type]:
    if isinstance(one, inspect.StructType):
        yield from (field.type for field in one.fields if field.encode_name == step)
    elif isinstance(one, inspect.DictType):
        yield one.value_type
    elif not step and isinstance(one, inspect.ListType | inspect.VarTupleType):
        yield one.item_type


def _members(types: Iterable[inspect.Type]) -> Iterator[inspect.Type]:
    for one in types:
        if isinstance(one, inspect.UnionType):
            yield from _members(one.types)
        elif isinstance(one, inspect.Metadata):
            yield from _members([one.type])
        else:
            yield one


# The shape of a JSON text, measured before it is decoded: a decoder holds the GIL while it runs.

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
