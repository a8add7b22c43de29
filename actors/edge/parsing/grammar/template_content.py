"""What stands inside a region of a response template, as a value: JSON and its dialects, shallow XML, lines of pairs."""

import json
from collections.abc import Mapping
from typing import Any, Final

import regex

CONTENTS: Final = frozenset({"text", "int", "float", "bool", "json", "xml-inline", "kv-lines"})
"""The kinds of content that a template may name."""

_REFERENCE: Final = regex.compile(r"\{(\w+(?:\.\w+)*)\}")


def parse_content(kind: str, text: str, options: Mapping[str, Any]) -> Any:
    """Return the value of a region's text. Raises ValueError."""
    if kind == "json":
        return _parse_json(text, options)
    if kind == "xml-inline":
        return _parse_tags(text, options)
    if kind == "kv-lines":
        return _parse_lines(text, options)
    plain = text.strip() if options.get("strip", True) else text
    if kind == "int":
        return int(plain)
    if kind == "float":
        return float(plain)
    return plain.lower() in ("true", "1") if kind == "bool" else plain


def _parse_json(text: str, options: Mapping[str, Any]) -> Any:
    """JSON, whose strings may stand between other marks, and whose keys may lack quotes."""
    parts: list[str] = []
    rest = text
    marks = [(str(start), str(end)) for start, end in options.get("string_delims", ())]
    while rest:
        found = [(at, start, end) for start, end in marks if (at := rest.find(start)) >= 0]
        if not found:
            break
        at, start, end = min(found)
        stop = rest.find(end, at + len(start))
        if stop < 0:
            break
        parts += (rest[:at], json.dumps(rest[at + len(start) : stop]))
        rest = rest[stop + len(end) :]
    parts.append(rest)
    if options.get("unquoted_keys"):
        # Every second part is a string, which is left alone.
        parts[::2] = [regex.sub(r"(?<=[{,])\s*(\w+)\s*:", r'"\1":', part) for part in parts[::2]]
    try:
        return json.loads("".join(parts))
    except (ValueError, RecursionError) as error:
        if options.get("allow_non_json"):
            return text.strip()
        raise ValueError("no JSON") from error


def _parse_inner(text: str, parser: Mapping[str, Any] | None) -> Any:
    if parser is None:
        return text
    return parse_content(str(parser.get("name", "text")), text, parser.get("args", {}))


def _parse_tags(text: str, options: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for found in regex.finditer(options["tag_pattern"], text, flags=regex.DOTALL):
        groups = found.groupdict()
        value = _parse_inner(groups.get("value") or "", options.get("value_parser"))
        key = str(groups["key"])
        if key in values and options.get("merge_duplicates"):
            known = values[key]
            values[key] = [*known, value] if isinstance(known, list) else [known, value]
        else:
            values[key] = value
    return values


def _parse_lines(text: str, options: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    separator = str(options.get("kv_sep", ":"))
    for line in text.split(str(options.get("line_sep", "\n"))):
        key, found, value = line.partition(separator)
        if found:
            values[key.strip()] = _parse_inner(value.strip(), options.get("value_parser"))
    return values


def transform_value(value: Any, shape: Any, each: bool, captures: Mapping[str, str]) -> Any:
    """Return a value in the shape that a template wants, in which `{name}` stands for a capture or for `content`.

    `each`: the value is a list, and each of its items, with its keys by name, gets the shape. Raises ValueError.
    """
    if shape is None:
        return value
    if not each:
        return _fill(shape, {**captures, "content": value})
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ValueError("no list of objects")
    return [_fill(shape, {**captures, **item}) for item in value]


def _fill(shape: Any, scope: Mapping[str, Any]) -> Any:
    if isinstance(shape, dict):
        return {key: _fill(one, scope) for key, one in shape.items()}
    if isinstance(shape, list):
        return [_fill(one, scope) for one in shape]
    found = _REFERENCE.fullmatch(shape) if isinstance(shape, str) else None
    if found is None:
        return shape
    value: Any = scope
    for key in found[1].split("."):
        if not isinstance(value, Mapping) or key not in value:
            raise ValueError(f"nothing for {shape}")
        value = value[key]
    return value
