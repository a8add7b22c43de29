"""Samples of JSON schemas: mostly conforming values, with odd ones at any place. From a seed; fast enough for a live server.

Hypothesis would spend its effort on shrinking, which a server with state does not allow, and takes seconds to begin with
the thousand schemas of a published API.
"""

import json
import random
from typing import Any, Final

DEPTH_MAX: Final = 7
LONG: Final = "x" * 3_000
DEEP: Final = json.loads("[" * 90 + "]" * 90)

ODD: Final[tuple[Any, ...]] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**53, -(2**63), 2**70, 0.5, -0.0, 1e308, 1e-320),
    *("", " ", "\0", "\ud800", "﻿", "a\nb", "<|im_end|>", "<tool_call>", "{}", "null", "é🌸", LONG),
    *([], {}, [None], [[]], {"": ""}, {"type": None}, {"$ref": "#"}, ["a"] * 300, DEEP),
)

WORDS: Final = (
    "a",
    "Hi",
    "get_weather",
    "user",
    "What is the weather in Paris?",
    "https://example.com/a.png",
    "aGk=",
)


class SchemaSampler:
    """Values for the schemas of an OpenAPI document.

    `chosen` has values for the top's properties by name, and how often they are taken.
    """

    def __init__(
        self, document: dict[str, Any], rng: random.Random, chosen: dict[str, tuple[float, list[Any]]]
    ) -> None:
        self._document = document
        self._rng = rng
        self._chosen = chosen
        self._odd = 0.0

    def sample(self, schema: Any) -> Any:
        """One value; in some there is nothing odd, in others much."""
        self._odd = self._rng.choice((0.0, 0.003, 0.03))
        return self._value(schema)

    def _value(self, schema: Any, depth: int = 0) -> Any:
        rng = self._rng
        if rng.random() < self._odd or not isinstance(schema, dict):
            return rng.choice(ODD)
        schema = self._resolved(schema)
        for keyword in ("anyOf", "oneOf"):
            if schema.get(keyword):
                return self._value(self._branch(schema[keyword], depth), depth + 1)
        if "const" in schema:
            return schema["const"]
        if schema.get("enum"):
            return rng.choice(schema["enum"])
        kind = schema.get("type", "object" if "properties" in schema else "string")
        if isinstance(kind, list):
            kind = rng.choice(kind)
        if kind == "object":
            return self._object(schema, depth)
        if kind == "array":
            count = 0 if depth > DEPTH_MAX else rng.randint(schema.get("minItems", 0), 2)
            return [self._value(schema.get("items", {}), depth + 1) for _ in range(max(count, 0))]
        return self._scalar(kind, schema)

    def _branch(self, branches: list[Any], depth: int) -> Any:
        if depth > DEPTH_MAX:
            return min(branches, key=lambda branch: len(json.dumps(branch)))
        return self._rng.choice(branches)

    def _object(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        rng = self._rng
        required = set(schema.get("required", ()))
        made: dict[str, Any] = {}
        for name, inner in schema.get("properties", {}).items():
            wanted = name in required or (name in self._chosen and depth <= 1)
            share = 0.97 if wanted else 0.15 / (1 + depth)
            if rng.random() >= share:
                continue
            share, values = self._chosen.get(name, (0.0, [])) if depth <= 1 else (0.0, [])
            if rng.random() < share and rng.random() >= self._odd:
                made[name] = rng.choice(values)
            else:
                made[name] = self._value(inner, depth + 1)
        if rng.random() < self._odd:
            made[rng.choice(WORDS)] = rng.choice(ODD)
        return made

    def _scalar(self, kind: str, schema: dict[str, Any]) -> Any:
        rng = self._rng
        if kind == "boolean":
            return rng.random() < 0.5
        if kind == "null":
            return None
        if kind in ("integer", "number"):
            low, high = schema.get("minimum", 0), schema.get("maximum", 2)
            return (
                rng.randint(int(low), max(int(low), int(high)))
                if kind == "integer"
                else rng.uniform(low, high)
            )
        return rng.choice(WORDS)

    def _resolved(self, schema: dict[str, Any]) -> dict[str, Any]:
        for _ in range(8):
            if "$ref" not in schema:
                break
            found: Any = self._document
            for name in schema["$ref"].removeprefix("#/").split("/"):
                found = found[name]
            schema = found
        merged = dict(schema)
        for part in schema.get("allOf", ()):
            inner = self._resolved(part)
            properties = {**merged.get("properties", {}), **inner.get("properties", {})}
            required = [*merged.get("required", ()), *inner.get("required", ())]
            merged = {**inner, **merged, "properties": properties, "required": required}
        return merged


def encode(value: Any, rng: random.Random, damaged: float = 0.02) -> bytes:
    """JSON bytes of a value, of which a share is damaged: cut off, with a byte changed, or repeated."""
    body = json.dumps(value, allow_nan=False).encode()
    if rng.random() >= damaged:
        return body
    at = rng.randrange(len(body) + 1)
    return rng.choice(
        (
            body[:at],
            body[:at] + bytes([rng.randrange(256)]) + body[at + 1 :],
            body + body,
            b"",
            b"\xff" + body,
        )
    )
