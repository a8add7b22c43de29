"""Loading the `response_template` of a model's tokenizer configuration."""

import json
from collections.abc import Mapping
from typing import Any, Final

import regex

from headwater.actors.edge.parsing.response_template import CONTENTS, Anchor, ResponseTemplate, TemplateField

_TEMPLATE_KEYS: Final = frozenset({"version", "defaults", "fields", "start_anchor", "start_anchor_pattern"})

_FIELD_KEYS: Final = frozenset(
    {
        *("open", "open_pattern", "close", "close_pattern", "content", "content_args"),
        *("repeats", "join", "optional", "transform", "transform_each"),
    }
)


class InvalidTemplate(ValueError):
    """A `response_template` that cannot be used."""


def load_response_template(text: str) -> ResponseTemplate:
    """Read a template from JSON text. Raises `InvalidTemplate`, naming what is wrong."""
    try:
        spec = json.loads(text)
    except ValueError as error:
        raise InvalidTemplate(f"response_template is not JSON: {error}") from error
    _check("response_template", spec, _TEMPLATE_KEYS)
    if spec.get("version", 1) != 1:
        raise InvalidTemplate(
            f"response_template has version {spec['version']}; this release knows version 1"
        )
    if not isinstance(spec.get("fields"), dict) or not spec["fields"]:
        raise InvalidTemplate("response_template has no fields")
    fields = [_load_field(name, one) for name, one in spec["fields"].items()]
    implicit = [one for one in fields if one.open is None]
    if len(implicit) > 1:
        names = ", ".join(one.name for one in implicit)
        raise InvalidTemplate(f"response_template: only one field may lack an opening anchor, but {names} do")
    return ResponseTemplate(
        tuple(one for one in fields if one.open is not None), implicit[0] if implicit else None
    )


def _load_field(name: str, spec: Any) -> TemplateField:
    where = f"response_template: field {name!r}"
    _check(where, spec, _FIELD_KEYS)
    content, options = spec.get("content", "text"), spec.get("content_args", {})
    if content not in CONTENTS:
        raise InvalidTemplate(
            f"{where}: content {content!r} is unknown (known: {', '.join(sorted(CONTENTS))})"
        )
    if not isinstance(options, dict):
        raise InvalidTemplate(f"{where}: content_args is no object")
    if content == "xml-inline":
        found = _compile(where, str(options.get("tag_pattern", "")))
        if not {"key", "value"} <= set(found.groupindex):
            raise InvalidTemplate(f"{where}: tag_pattern needs the groups key and value")
    return TemplateField(
        name,
        _load_anchor(where, spec, "open"),
        _load_anchor(where, spec, "close"),
        content,
        options,
        spec.get("transform"),
        bool(spec.get("transform_each", False)),
    )


def _load_anchor(where: str, spec: Mapping[str, Any], key: str) -> Anchor | None:
    pattern = spec.get(f"{key}_pattern")
    literals = spec.get(key)
    if pattern is not None and literals is not None:
        raise InvalidTemplate(f"{where}: both {key} and {key}_pattern are given")
    if pattern is not None:
        return Anchor(_compile(where, str(pattern)), extensible=True)
    if literals is None:
        return None
    known = [literals] if isinstance(literals, str) else literals
    if not isinstance(known, list) or not known or not all(isinstance(one, str) and one for one in known):
        raise InvalidTemplate(f"{where}: {key} is neither text nor a list of texts")
    longest_first = sorted(known, key=len, reverse=True)
    extensible = any(one != other and one.startswith(other) for one in known for other in known)
    return Anchor(_compile(where, "|".join(map(regex.escape, longest_first))), extensible, tuple(known))


def _compile(where: str, pattern: str) -> "regex.Pattern[str]":
    try:
        return regex.compile(pattern, regex.DOTALL)
    except regex.error as error:
        raise InvalidTemplate(f"{where}: pattern {pattern!r} is no regular expression: {error}") from error


def _check(where: str, spec: Any, known: frozenset[str]) -> None:
    if not isinstance(spec, dict):
        raise InvalidTemplate(f"{where} is no object")
    if unknown := sorted(set(spec) - known):
        raise InvalidTemplate(f"{where}: unknown keys {', '.join(unknown)}")
