"""Checks of a client's JSON schema before an engine compiles it to a grammar. Pure.

Not a complete validator. It rejects what the engine would reject with a worse message (a misspelt type, a dangling
reference), what an engine cannot handle (depth, size, cyclic references), and what must never be resolved (references
out of the document).
"""

from collections.abc import Iterator
from typing import Any, Final

from headwater.actors.edge.guided.regex import check_regex
from headwater.actors.http.errors import ApiError, bad_request

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
        raise bad_request(f"{param} must be a JSON schema: an object.", param=param)
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
        found: Any = self._root
        for step in reference[2:].split("/") if reference != "#" else ():
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and name in found:
                found = found[name]
            elif isinstance(found, list) and name.isascii() and name.isdigit() and int(name[:9]) < len(found):
                found = found[int(name)]
            else:
                raise self._bad(where, f"$ref {reference[:80]!r} does not exist")
        if not isinstance(found, bool) and id(found) not in self._known:
            raise self._bad(where, f"$ref {reference[:80]!r} is not a schema")
        return found

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
        return bad_request(f"{self._param} is invalid at {where[:200]}: {why}.", param=self._param)


def _inner(schema: dict[str, Any], where: str) -> Iterator[tuple[str, Any, str]]:
    for keyword in (*_BY_NAME, *_ONE, *_SEVERAL):
        if keyword in schema:
            yield keyword, schema[keyword], f"{where}/{keyword}"
