"""Structured output: what an answer must conform to, as one checked `Guide`. Pure.

There are three ways to request it: OpenAI's `response_format`, vLLM's `structured_outputs`, and vLLM's older
`guided_*` fields. All are checked here, before they reach an engine: an invalid one is a 400 that names the field.
"""

import re
from collections.abc import Iterator
from operator import attrgetter
from typing import Any, Final

import msgspec

from headwater.actors.edge.guided.json_schema import check_schema
from headwater.actors.edge.guided.regex import check_regex
from headwater.actors.edge.request.fields import UnsupportedFields
from headwater.actors.http.errors import ApiError, bad_request
from headwater.schemas.messages.inference import Guide

VALUE_BYTES_MAX: Final = 128 * 1024
CHOICES_MAX: Final = 1_000
GRAMMAR_DEPTH_MAX: Final = 32
_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_QUOTED: Final = re.compile(r'"(?:[^"\\\n]|\\.)*"|\'(?:[^\'\\\n]|\\.)*\'|\[(?:[^\]\\\n]|\\.)*\]')
_IGNORED: Final = ("disable_fallback", "backend", "_backend", "_backend_was_auto")

FieldGuide = tuple[str, Guide]
"""A request field, and the guide that it requests."""


_guided_of: Final = attrgetter(
    "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"
)
_NOT_GUIDED: Final = (None,) * 6


class Guided(UnsupportedFields, kw_only=True):
    """The request fields for structured output."""

    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None

    def guide(self) -> tuple[str, Guide] | None:
        """The field and its guide, None for unconstrained output. Raises `ApiError` 400."""
        if _guided_of(self) == _NOT_GUIDED:
            return None
        guides = [
            *_of_response_format(self.response_format),
            *_of_structured_outputs(self.structured_outputs),
        ]
        for name, read in _READERS.items():
            value = getattr(self, f"guided_{name}", None)
            if value is not None:
                guides.append((f"guided_{name}", read(value, f"guided_{name}")))
        if len(guides) > 1:
            names = " and ".join(field for field, _ in guides)
            raise bad_request(f"{names} exclude each other; send one of them.", param=guides[1][0])
        return guides[0] if guides else None


def _of_response_format(wanted: dict[str, Any] | None) -> Iterator[FieldGuide]:
    kind = "text" if wanted is None else wanted.get("type")
    if kind == "json_object" and wanted is not None and wanted.get("schema") is not None:
        # As llama.cpp's server and Together have it.
        yield "response_format", json_schema_guide(wanted["schema"], "response_format.schema")
    elif kind == "json_object":
        yield "response_format", Guide("json_object")
    elif kind == "json_schema" and wanted is not None:
        param = "response_format.json_schema"
        described = wanted.get("json_schema")
        if not isinstance(described, dict):
            raise bad_request(f"{param} is missing; it contains name and schema.", param=param)
        name = described.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise bad_request(
                f"{param}.name must have 1 to 64 letters, digits, underscores and dashes.",
                param=f"{param}.name",
            )
        if type(described.get("strict", False)) not in (bool, type(None)):
            raise bad_request(f"{param}.strict must be true or false.", param=f"{param}.strict")
        # The schema is always enforced, with or without `strict`.
        yield "response_format", json_schema_guide(described.get("schema"), f"{param}.schema")
    elif kind != "text":
        raise bad_request(
            "response_format.type is text, json_object or json_schema.", param="response_format.type"
        )


def _of_structured_outputs(wanted: dict[str, Any] | None) -> Iterator[FieldGuide]:
    if wanted is None:
        return
    found = 0
    for name, value in wanted.items():
        field = f"structured_outputs.{name[:64]}"
        if value is None or value is False or name in _IGNORED:
            continue
        if name == "json_object":
            if value is not True:
                raise bad_request(f"{field} must be true or left out.", param=field)
            yield field, Guide("json_object")
        elif name in _READERS:
            yield field, _READERS[name](value, field)
        else:
            raise bad_request(f"{field} is not supported by this release; leave it out.", param=field)
        found += 1
    if not found:
        raise bad_request(
            "structured_outputs needs one of json, json_object, regex, choice and grammar.",
            param="structured_outputs",
        )


def json_schema_guide(value: Any, param: str) -> Guide:
    """The guide of a JSON schema, or of its JSON text. Raises `ApiError` 400 naming `param`."""
    if isinstance(value, str):
        _check_size(value, param)
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError) as error:
            raise bad_request(f"{param} is not valid JSON: {error}.", param=param) from error
    check_schema(value, param)
    return Guide("json_schema", _as_json(value, param))


def _regex(value: Any, param: str) -> Guide:
    if not isinstance(value, str):
        raise bad_request(f"{param} must be a regular expression as a string.", param=param)
    check_regex(value, param)
    return Guide("regex", value)


def _choice(value: Any, param: str) -> Guide:
    if isinstance(value, list) and len(value) > CHOICES_MAX:
        raise bad_request(f"{param} has more than {CHOICES_MAX} choices.", param=param)
    if not isinstance(value, list) or not value or not all(isinstance(one, str) and one for one in value):
        raise bad_request(f"{param} must be a non-empty list of non-empty strings.", param=param)
    if len(set(value)) < len(value):
        raise bad_request(f"{param} contains a choice twice.", param=param)
    return Guide("choice", _as_json(value, param))


def _grammar(value: Any, param: str) -> Guide:
    if not isinstance(value, str) or not value.strip():
        raise bad_request(f"{param} must be a grammar as a non-empty string.", param=param)
    _check_size(value, param)
    depth = 0
    for here in _QUOTED.sub("", value):
        depth += (here in "({[") - (here in ")}]")
        if depth > GRAMMAR_DEPTH_MAX:
            raise bad_request(
                f"{param} nests brackets deeper than {GRAMMAR_DEPTH_MAX}; use named rules.", param=param
            )
    return Guide("grammar", value)


def _as_json(value: Any, param: str) -> str:
    try:
        text = msgspec.json.encode(value).decode()
    except (OverflowError, ValueError, RecursionError) as error:
        raise bad_request(f"{param} has a value that cannot be encoded: {error}.", param=param) from error
    _check_size(text, param)
    return text


def _check_size(text: str, param: str) -> None:
    if len(text) > VALUE_BYTES_MAX or len(text.encode("utf-8", "surrogatepass")) > VALUE_BYTES_MAX:
        raise too_large(param)


def too_large(param: str) -> ApiError:
    """400 for a guide that is too large for an engine."""
    return bad_request(f"{param} is larger than {VALUE_BYTES_MAX} bytes; shorten it.", param=param)


_READERS: Final = {"json": json_schema_guide, "regex": _regex, "choice": _choice, "grammar": _grammar}
