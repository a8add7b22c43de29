"""Values written as plain text, made JSON by the tool's schema: the XML formats have no types of their own."""

import ast
import json
import math
from collections.abc import Mapping
from typing import Any, Final, NoReturn

from headwater.actors.edge.parsing.json_value import JSON_NUMBER

_encode: Final = json.JSONEncoder(ensure_ascii=False).encode

_REFERENCES_MAX: Final = 16
"""Nested references that are followed in a schema."""

_LITERAL_MAX: Final = 100_000
"""Characters of a value that is tried as a Python literal."""

_NAMES: Final[Mapping[type, str]] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    type(None): "null",
    list: "array",
    dict: "object",
}


def quote(text: str) -> str:
    """Return `text` as a JSON string."""
    return _encode(text)


def escape(text: str) -> str:
    """Return `text` as it stands inside a JSON string."""
    return _encode(text)[1:-1]


def types_of_parameter(schema: Mapping[str, Any], name: str) -> frozenset[str]:
    """Return the JSON types that a tool's schema allows for a parameter; none if it does not say."""
    properties = schema.get("properties")
    declared = properties.get(name) if isinstance(properties, Mapping) else None
    if declared is None:
        declared = schema.get("additionalProperties")
    return frozenset(_types(declared, schema, 0))


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> set[str]:
    if not isinstance(schema, Mapping) or depth > _REFERENCES_MAX:
        return set()
    reference = schema.get("$ref")
    if isinstance(reference, str):
        return _types(_resolve(reference, root), root, depth + 1)
    declared = schema.get("type")
    types = {declared} if isinstance(declared, str) else set()
    if isinstance(declared, list):
        types.update(one for one in declared if isinstance(one, str))
    for key in ("anyOf", "oneOf", "allOf"):
        for choice in schema.get(key) or ():
            types |= _types(choice, root, depth + 1)
    if not types:
        values = schema.get("enum") or ([schema["const"]] if "const" in schema else [])
        types = {_NAMES[type(value)] for value in values if type(value) in _NAMES}
    if types and schema.get("nullable") is True:
        types.add("null")
    return types


def _resolve(reference: str, root: Mapping[str, Any]) -> Any:
    target: Any = root
    for part in reference.removeprefix("#").strip("/").split("/"):
        target = target.get(part) if isinstance(target, Mapping) else None
    return target


def cast(raw: str, types: frozenset[str]) -> str:
    """Return the JSON text of a value that a model wrote as `raw`.

    The value becomes the first of the declared types that it can be read as, text last. Without declared types it is
    JSON if it can be read as such. A value that is none of its types is not lost: it becomes JSON or else text.
    """
    text = raw.strip()
    if "null" in types and text in ("null", "None"):
        return "null"
    if "boolean" in types and text.lower() in ("true", "false"):
        return text.lower()
    # What JSON would not write as a number is text where that is allowed: a postal code, a telephone number.
    numeric = ("integer" in types or "number" in types) and (
        "string" not in types or JSON_NUMBER.fullmatch(text)
    )
    if numeric and (number := _number(text, "number" in types)):
        return number
    wanted = tuple(kind for name, kind in (("object", dict), ("array", list)) if name in types)
    if wanted and (structure := _structure(text, wanted)):
        return structure
    if "string" in types:
        return quote(raw)
    return _any(text) or quote(raw)


def _number(text: str, fractions: bool) -> str:
    if JSON_NUMBER.fullmatch(text) and (fractions or text.lstrip("-").isdigit()):
        return text
    try:
        value = float(text)
    except ValueError:
        return ""
    if not math.isfinite(value) or "_" in text:
        return ""
    if value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return repr(value) if fractions else ""


def _structure(text: str, wanted: tuple[type, ...]) -> str:
    """Return an object or array as JSON; "" if `text` is neither. Python's notation is read as well."""
    try:
        return text if isinstance(_loads(text), wanted) else ""
    except (ValueError, RecursionError):
        pass
    if len(text) > _LITERAL_MAX:
        return ""
    try:
        value = ast.literal_eval(text)
        return json.dumps(value, ensure_ascii=False, allow_nan=False) if isinstance(value, wanted) else ""
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return ""


def _any(text: str) -> str:
    try:
        _loads(text)
    except (ValueError, RecursionError):
        return ""
    return text


def _loads(text: str) -> Any:
    return json.loads(text, parse_constant=_refuse)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
