"""Fields of a msgspec struct as rows."""

import types
import typing
from typing import Any

import msgspec


def fields(struct: type[msgspec.Struct]) -> list[tuple[str, str, str]]:
    """(name, type, default) of each field; no default: required."""
    hints = typing.get_type_hints(struct)
    return [
        (f"`{field.encode_name}`", f"`{type_name(hints[field.name])}`", _default(field))
        for field in msgspec.structs.fields(struct)
    ]


def type_name(hint: Any) -> str:
    """A type as it is written, without the bounds of its values."""
    origin, given = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return " | ".join(repr(value) for value in given).replace("'", '"')
    if origin in (typing.Union, types.UnionType):
        return " | ".join(type_name(one) for one in given)
    if origin is typing.Annotated:
        return type_name(given[0])
    if origin is not None and given:
        inside = ", ".join("…" if one is Ellipsis else type_name(one) for one in given)
        return f"{origin.__name__}[{inside}]"
    if hint is type(None):
        return "None"
    return str(getattr(hint, "__name__", hint))


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.default is not msgspec.NODEFAULT:
        value = field.default
        return f"`{value!r}`".replace("'", '"') if not isinstance(value, msgspec.Struct) else "its defaults"
    if field.default_factory is not msgspec.NODEFAULT:
        return f"`{field.default_factory()!r}`"
    return "required"
