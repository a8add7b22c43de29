"""What endpoints check before anything else: the method, and the body, read from JSON into msgspec types.

Errors name the field, and the values that it may have: these are found in the type, as msgspec's own errors have none.
"""

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any, Final

import msgspec
from msgspec import inspect

from headwater.actors.http.errors import ApiError, bad_request, method_not_allowed
from headwater.actors.http.long_strings import ShortenedBody

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
