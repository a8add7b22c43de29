"""Structured output: what an answer must conform to, as one checked `Guide`. Pure.

There are three ways to request it: OpenAI's `response_format`, vLLM's `structured_outputs`, and vLLM's older
`guided_*` fields. All are checked here, before they reach an engine: an invalid one is a 400 that names the field.

A regular expression must describe a regular language, without look-around and back-references, whose counted repetitions expand to a
small automaton: `(a{1000}){1000}` is twelve bytes and a million states.

The check of a JSON schema is not a complete validator. It rejects what the engine would reject with a worse message (a misspelt type, a dangling
reference), what an engine cannot handle (depth, size, cyclic references), and what must never be resolved (references
out of the document).
"""

import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from headwater.actors.edge.saga.fields import is_reserved, without_reserved
from headwater.actors.http.errors import ApiError, bad_field, bad_request
from headwater.schemas.inference import Guide

BYTES_MAX: Final = 4_096
STATES_MAX: Final = 10_000
"""Characters of the expression with its counted repetitions expanded."""

_COUNTED: Final = re.compile(r"\{(\d*)(?:,(\d*))?\}")
_BEYOND: Final = re.compile(r"\(\?(?:=|!|<=|<!|P=|\()")
_GROUP_NAME: Final = re.compile(r"\(\?<(?=[A-Za-z_])")
_CATEGORY: Final = re.compile(r"\\[pP](?:\{[^{}]*\}|[A-Za-z])")


def check_regex(pattern: str, param: str) -> None:
    """Raises `ApiError` 400 naming `param` and what to change."""
    if not pattern:
        raise bad_field(param, "is empty; leave it out to allow any answer.")
    if len(pattern.encode("utf-8", "surrogatepass")) > BYTES_MAX:
        raise bad_field(param, f"is larger than {BYTES_MAX} bytes; shorten it.")
    # Syntax of engines that Python spells differently or lacks.
    plain = _CATEGORY.sub(r"\\w", _GROUP_NAME.sub("(?P<", pattern))
    try:
        with warnings.catch_warnings(action="ignore"):
            re.compile(plain)
    except (re.error, OverflowError, RecursionError, ValueError) as error:
        raise bad_field(param, f"is not a valid regular expression: {error}.") from error
    if _states(plain, param) > STATES_MAX:
        raise _too_large(param)


def _states(pattern: str, param: str) -> int:
    """Atoms of the expression with its counted repetitions expanded. It compiles, so brackets match."""
    groups: list[int] = []
    total = last = at = 0
    while at < len(pattern):
        character = pattern[at]
        counted = _COUNTED.match(pattern, at) if character == "{" else None
        if counted is not None and counted[0] not in ("{}", "{,}"):
            # One copy is counted already.
            times = max(int(digits[:9]) for digits in (counted[1] or "0", counted[2] or "0"))
            total += last * max(0, times - 1)
            last *= max(1, times)
            at = counted.end()
        elif character == "(":
            if _BEYOND.match(pattern, at):
                raise _not_regular(param, "look-around, references and conditions")
            groups.append(total)
            total = last = 0
            at += 1
        elif character == ")":
            last = total
            total += groups.pop()
            at += 1
        elif character == "[":
            at = _behind_class(pattern, at)
            total, last = total + 1, 1
        elif character == "\\":
            if pattern[at + 1] in "123456789":
                raise _not_regular(param, "references to groups")
            at += 2
            total, last = total + 1, 1
        else:
            at += 1
            if character not in "*+?|":
                total, last = total + 1, 1
        if total > STATES_MAX:
            raise _too_large(param)
    return total


def _behind_class(pattern: str, at: int) -> int:
    """Index after the character class that begins at `at`."""
    at += 2 if pattern[at + 1] == "^" else 1
    first = at
    while pattern[at] != "]" or at == first:
        at += 2 if pattern[at] == "\\" else 1
    return at + 1


def _not_regular(param: str, construct: str) -> ApiError:
    return bad_field(param, f"uses {construct}, which guided decoding does not support; remove it.")


def _too_large(param: str) -> ApiError:
    return bad_field(
        param,
        f"has more than {STATES_MAX} characters once its repetitions are expanded: use smaller counts or *.",
    )


# JSON schemas, checked before an engine compiles them to a grammar.

DEPTH_MAX: Final = 32
"""Levels of nested schemas, and of nested lists and objects within a value."""

PARTS_MAX: Final = 10_000
PROPERTIES_MAX: Final = 1_000
"""Properties of a schema in total. Engines compile them to an automaton; for 3,000 some take most of a minute."""

LENGTH_MAX: Final = 65_536
"""The largest length or count that a schema may require."""

TYPES: Final = frozenset({"object", "array", "string", "number", "integer", "boolean", "null"})
_BY_NAME: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_ONE: Final = (
    "items", "additionalItems", "unevaluatedItems", "contains", "additionalProperties", "unevaluatedProperties",
    "propertyNames", "not", "if", "then", "else",
)  # fmt: skip
_SEVERAL: Final = ("anyOf", "oneOf", "allOf", "prefixItems")
_AT_ONCE: Final = ("anyOf", "oneOf", "allOf")
_WITH_SCHEMAS: Final = frozenset((*_BY_NAME, *_ONE, *_SEVERAL))
_REFUSED: Final = ("$dynamicRef", "$recursiveRef", "dependencies")
_LENGTHS: Final = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_NUMBERS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")


def check_schema(schema: Any, param: str) -> None:
    """Raises `ApiError` 400 that names `param`, the place in the schema and what to change."""
    if not isinstance(schema, dict):
        raise bad_field(param, "must be a JSON schema: an object.")
    check = _Check(schema, param)
    check.schema(schema, "#", 1)
    check.references()


class _Check:
    """The check of one schema."""

    def __init__(self, root: dict[str, Any], param: str) -> None:
        self._root = root
        self._param = param
        self._parts = 0
        self._properties = 0
        self._schemas: list[tuple[dict[str, Any], str]] = []
        self._known: set[int] = set()

    def schema(self, schema: Any, where: str, depth: int) -> None:
        """Check one schema and those nested in it."""
        if isinstance(schema, bool):
            return
        if not isinstance(schema, dict):
            raise self._bad(where, "a schema must be an object, true or false")
        self._count(where, depth)
        self._schemas.append((schema, where))
        self._known.add(id(schema))
        self._keywords(schema, where)
        for keyword, value, place in _inner(schema, where):
            if keyword in _BY_NAME and not isinstance(value, dict):
                raise self._bad(place, f"{keyword} must map names to schemas")
            if keyword in _SEVERAL and not (isinstance(value, list) and value):
                raise self._bad(place, f"{keyword} must be a non-empty list of schemas")
            if isinstance(value, dict) and keyword in _BY_NAME:
                self._properties += len(value)
                if self._properties > PROPERTIES_MAX:
                    raise self._bad(place, f"more than {PROPERTIES_MAX} properties and definitions")
                for name, inner in value.items():
                    if keyword == "patternProperties":
                        check_regex(name, self._param)
                    self.schema(inner, f"{place}/{name[:40]}", depth + 1)
            elif isinstance(value, list):
                for number, inner in enumerate(value):
                    self.schema(inner, f"{place}/{number}", depth + 1)
            else:
                self.schema(value, place, depth + 1)

    def references(self) -> None:
        """Check that no reference leads out of the schema, dangles, or resolves only to itself."""
        done: set[int] = set()
        for schema, where in self._schemas:
            self._follow(schema, where, [], done)

    def _follow(self, schema: Any, where: str, path: list[int], done: set[int]) -> None:
        if not isinstance(schema, dict) or id(schema) in done:
            return
        if id(schema) in path:
            raise self._bad(where, "this reference leads to itself with nothing in between")
        if len(path) >= DEPTH_MAX:
            raise self._bad(where, f"a chain of more than {DEPTH_MAX} references")
        path.append(id(schema))
        if "$ref" in schema:
            self._follow(self._target(schema["$ref"], where), where, path, done)
        for keyword in _AT_ONCE:
            for inner in schema.get(keyword, ()):
                self._follow(inner, where, path, done)
        done.add(path.pop())

    def _target(self, reference: Any, where: str) -> Any:
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            raise self._bad(where, "$ref may point into this schema only, as #/$defs/name")
        target: Any = self._root
        for step in reference[2:].split("/") if reference != "#" else ():
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(target, dict) and name in target:
                target = target[name]
            elif (
                isinstance(target, list) and name.isascii() and name.isdigit() and int(name[:9]) < len(target)
            ):
                target = target[int(name)]
            else:
                raise self._bad(where, f"$ref {reference[:80]!r} does not exist")
        if not isinstance(target, bool) and id(target) not in self._known:
            raise self._bad(where, f"$ref {reference[:80]!r} is not a schema")
        return target

    def _keywords(self, schema: dict[str, Any], where: str) -> None:
        kinds = schema.get("type", [])
        kinds = kinds if isinstance(kinds, list) else [kinds]
        if ("type" in schema and not kinds) or any(k not in TYPES for k in kinds if isinstance(k, str)):
            raise self._bad(where, f"type must be one or several of {', '.join(sorted(TYPES))}")
        if not all(isinstance(kind, str) for kind in kinds):
            raise self._bad(where, "type must be a name or a list of names")
        required = schema.get("required", [])
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise self._bad(where, "required must be a list of names")
        if "enum" in schema and not (isinstance(schema["enum"], list) and schema["enum"]):
            raise self._bad(where, "enum must be a non-empty list of values")
        if "pattern" in schema:
            if not isinstance(schema["pattern"], str):
                raise self._bad(where, "pattern is a regular expression")
            check_regex(schema["pattern"], self._param)
        for keyword in _LENGTHS:
            value = schema.get(keyword, 0)
            if type(value) is not int or not 0 <= value <= LENGTH_MAX:
                raise self._bad(where, f"{keyword} must be a number from 0 to {LENGTH_MAX}")
        for keyword in _NUMBERS:
            if type(schema.get(keyword, 0)) not in (int, float):
                raise self._bad(where, f"{keyword} must be a number")
        for keyword in _REFUSED:
            if keyword in schema:
                raise self._bad(
                    where, f"{keyword} is not supported: use $ref, dependentSchemas or dependentRequired"
                )
        for keyword, value in schema.items():
            if keyword not in _WITH_SCHEMAS:
                self._value(value, f"{where}/{keyword[:40]}", 1)

    def _value(self, value: Any, where: str, depth: int) -> None:
        """Check a value in the schema that is not itself a schema."""
        self._count(where, depth)
        if isinstance(value, dict):
            value = list(value.values())
        if isinstance(value, list):
            for inner in value:
                self._value(inner, where, depth + 1)

    def _count(self, where: str, depth: int) -> None:
        self._parts += 1
        if depth > DEPTH_MAX:
            raise self._bad(where, f"deeper than {DEPTH_MAX} levels: use $defs and $ref")
        if self._parts > PARTS_MAX:
            raise self._bad(where, f"more than {PARTS_MAX} parts")

    def _bad(self, where: str, why: str) -> ApiError:
        return bad_field(self._param, f"is invalid at {where[:200]}: {why}.")


def _inner(schema: dict[str, Any], where: str) -> Iterator[tuple[str, Any, str]]:
    for keyword in (*_BY_NAME, *_ONE, *_SEVERAL):
        if keyword in schema:
            yield keyword, schema[keyword], f"{where}/{keyword}"


# Guides.

VALUE_BYTES_MAX: Final = 128 * 1024
CHOICES_MAX: Final = 1_000
GRAMMAR_DEPTH_MAX: Final = 32
_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_QUOTED: Final = re.compile(r'"(?:[^"\\\n]|\\.)*"|\'(?:[^\'\\\n]|\\.)*\'|\[(?:[^\]\\\n]|\\.)*\]')
_IGNORED: Final = ("disable_fallback", "backend", "_backend", "_backend_was_auto")

FieldGuide = tuple[str, Guide]
"""A request field, and the guide that it requests."""


def guide_of(fields: Mapping[str, Any]) -> FieldGuide | None:
    """The guide that one of a request's fields for structured output asks for, None for unconstrained output. Raises `ApiError` 400."""
    guides = [
        *_of_response_format(fields["response_format"]),
        *_of_structured_outputs(fields["structured_outputs"]),
    ]
    for name, read in _READERS.items():
        value = fields[f"guided_{name}"]
        if value is not None:
            guides.append((f"guided_{name}", read(value, f"guided_{name}")))
    if len(guides) > 1:
        names = " and ".join(field for field, _ in guides)
        raise bad_request(f"{names} exclude each other; send one of them.", param=guides[1][0])
    return guides[0] if guides else None


def _of_response_format(response_format: dict[str, Any] | None) -> Iterator[FieldGuide]:
    kind = "text" if response_format is None else response_format.get("type")
    if kind == "json_object" and response_format is not None and response_format.get("schema") is not None:
        # As llama.cpp's server and Together have it.
        yield "response_format", json_schema_guide(response_format["schema"], "response_format.schema")
    elif kind == "json_object":
        yield "response_format", Guide("json_object")
    elif kind == "json_schema" and response_format is not None:
        param = "response_format.json_schema"
        described = response_format.get("json_schema")
        if not isinstance(described, dict):
            raise bad_field(param, "is missing; it contains name and schema.")
        name = described.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise bad_field(f"{param}.name", "must have 1 to 64 letters, digits, underscores and dashes.")
        if type(described.get("strict", False)) not in (bool, type(None)):
            raise bad_field(f"{param}.strict", "must be true or false.")
        # The schema is always enforced, with or without `strict`.
        yield "response_format", json_schema_guide(described.get("schema"), f"{param}.schema")
    elif kind != "text":
        raise bad_field("response_format.type", "is text, json_object or json_schema.")


def _of_structured_outputs(structured_outputs: dict[str, Any] | None) -> Iterator[FieldGuide]:
    if structured_outputs is None:
        return
    yielded = 0
    for name, value in structured_outputs.items():
        field = f"structured_outputs.{name[:64]}"
        if value is None or value is False or name in _IGNORED:
            continue
        if name == "json_object":
            if value is not True:
                raise bad_field(field, "must be true or left out.")
            yield field, Guide("json_object")
        elif name in _READERS:
            yield field, _READERS[name](value, field)
        else:
            raise bad_field(field, "is not supported by this release; leave it out.")
        yielded += 1
    if not yielded:
        raise bad_field("structured_outputs", "needs one of json, json_object, regex, choice and grammar.")


def json_schema_guide(value: Any, param: str) -> Guide:
    """The guide of a JSON schema, or of its JSON text. Raises `ApiError` 400 naming `param`."""
    if isinstance(value, str):
        _check_size(value, param)
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError) as error:
            raise bad_field(param, f"is not valid JSON: {error}.") from error
    return schema_guide(value, param)


def schema_guide(schema: Any, param: str) -> Guide:
    """The guide of a JSON schema. Raises `ApiError` 400 naming `param`."""
    check_schema(schema, param)
    return Guide("json_schema", _as_json(schema, param))


def _regex(value: Any, param: str) -> Guide:
    if not isinstance(value, str):
        raise bad_field(param, "must be a regular expression as a string.")
    check_regex(value, param)
    return Guide("regex", value)


def _choice(value: Any, param: str) -> Guide:
    if isinstance(value, list) and len(value) > CHOICES_MAX:
        raise bad_field(param, f"has more than {CHOICES_MAX} choices.")
    if (
        not isinstance(value, list)
        or not value
        or not all(isinstance(choice, str) and choice for choice in value)
    ):
        raise bad_field(param, "must be a non-empty list of non-empty strings.")
    if len(set(value)) < len(value):
        raise bad_field(param, "contains a choice twice.")
    return Guide("choice", _as_json(value, param))


def _grammar(value: Any, param: str) -> Guide:
    if not isinstance(value, str) or not value.strip():
        raise bad_field(param, "must be a grammar as a non-empty string.")
    _check_size(value, param)
    depth = 0
    for character in _QUOTED.sub("", value):
        depth += (character in "({[") - (character in ")}]")
        if depth > GRAMMAR_DEPTH_MAX:
            raise bad_field(param, f"nests brackets deeper than {GRAMMAR_DEPTH_MAX}; use named rules.")
    return Guide("grammar", value)


def _as_json(value: Any, param: str) -> str:
    try:
        text = msgspec.json.encode(value).decode()
    except (OverflowError, ValueError, RecursionError) as error:
        raise bad_field(param, f"has a value that cannot be encoded: {error}.") from error
    _check_size(text, param)
    return text


def _check_size(text: str, param: str) -> None:
    if len(text) > VALUE_BYTES_MAX or len(text.encode("utf-8", "surrogatepass")) > VALUE_BYTES_MAX:
        raise bad_field(param, f"is larger than {VALUE_BYTES_MAX} bytes; shorten it.")


_READERS: Final = {"json": json_schema_guide, "regex": _regex, "choice": _choice, "grammar": _grammar}


# Logits processors by name: only those that the worker was started with.

PARAM: Final = "logits_processors"
ARGUMENT_BYTES_MAX: Final = 16 * 1024
PROCESSOR_DEPTH_MAX: Final = 8
INTEGERS: Final = range(-(2**63), 2**64)

Processors = dict[str, dict[str, Any]]


def processors_of(value: Any, available: tuple[str, ...]) -> Processors:
    """`{name: arguments}` or a list of names, checked against the model's. Raises `ApiError` 400.

    Arguments are copied to the engine as they are, without the fields that only we may set.
    """
    if value is None or value == [] or value == {}:
        return {}
    if isinstance(value, list) and all(isinstance(name, str) for name in value):
        value = dict.fromkeys(value)
    if not isinstance(value, dict):
        raise bad_field(PARAM, "must be a list of names, or an object of names with their arguments.")
    processors: Processors = {}
    for name, arguments in value.items():
        if name not in available or is_reserved(name):
            served = ", ".join(available) or "none"
            raise bad_request(
                f"This model has no logits processor {name[:64]!r}. Available: {served}.", param=PARAM
            )
        if not isinstance(arguments, dict | None):
            raise bad_field(f"{PARAM}.{name}", "must be an object of arguments, or null.")
        if not _plain(arguments, 0):
            raise bad_field(
                f"{PARAM}.{name}",
                f"is nested deeper than {PROCESSOR_DEPTH_MAX}, or has a number beyond 64 bits.",
            )
        processors[name] = without_reserved(arguments or {})
    if len(msgspec.json.encode(processors)) > ARGUMENT_BYTES_MAX:
        raise bad_field(PARAM, f"is larger than {ARGUMENT_BYTES_MAX} bytes.")
    return processors


def _plain(value: Any, depth: int) -> bool:
    """Return whether msgpack can encode the value."""
    if depth > PROCESSOR_DEPTH_MAX:
        return False
    if isinstance(value, dict):
        return all(_plain(inner, depth + 1) for inner in value.values())
    if isinstance(value, list):
        return all(_plain(inner, depth + 1) for inner in value)
    return not isinstance(value, int) or value in INTEGERS
