"""Decoding of JSON bodies into msgspec types: their shape is bounded, and errors name the field.

The values in an error that a field may have are found in the type, as msgspec's own errors have none.

Shape: compiled code measures it in one pass without the interpreter's lock, about a nanosecond a byte. What is inside strings is text and
costs a decoder nothing but copying.
"""

import asyncio
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
import numpy as np
from msgspec import inspect

from headwater.actors.http.errors import ApiError, bad_request, method_not_allowed
from headwater.schemas.hashing import U8
from headwater.schemas.jit import kernel

T = TypeVar("T")


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


def decode_body(kind: type[T], body: bytes) -> T:
    """A body as this type. Raises `ApiError` 400 naming the field."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise invalid_field(error, kind) from error
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
