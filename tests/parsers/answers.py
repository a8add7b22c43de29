"""Answers as they are meant: reasoning, text and calls, and what a parser made of the text that was written for them."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from headwater.actors.edge.parsing.grammar import (
    OutputEvent,
    ReasoningDelta,
    TextDelta,
    ToolArgumentsDelta,
    ToolCallEnd,
    ToolCallStart,
)

Schema = Mapping[str, Any]


class Call(NamedTuple):
    name: str
    arguments: dict[str, Any]


class Answer(NamedTuple):
    """An answer as it is meant. `parts` are texts and groups of calls, in their order."""

    reasoning: str
    parts: tuple[str | tuple[Call, ...], ...]

    @property
    def calls(self) -> tuple[Call, ...]:
        return tuple(call for part in self.parts if not isinstance(part, str) for call in part)

    @property
    def items(self) -> tuple[str | Call, ...]:
        """Texts and calls in their order, without empty texts."""
        found: list[str | Call] = []
        for part in self.parts:
            if not isinstance(part, str):
                found += part
            elif part.strip():
                found.append(part.strip())
        return tuple(found)


class ReadCall(NamedTuple):
    """A call as a parser read it. `arguments` is JSON text."""

    name: str
    arguments: str
    complete: bool


class Reading(NamedTuple):
    """What a parser made of a text. Texts have no whitespace at their ends, and none is empty."""

    reasoning: str
    items: tuple[str | ReadCall, ...]

    @property
    def calls(self) -> tuple[ReadCall, ...]:
        return tuple(item for item in self.items if not isinstance(item, str))

    @property
    def text(self) -> str:
        return "".join(item for item in self.items if isinstance(item, str))


def reading_of(events: Iterable[OutputEvent]) -> Reading:
    """Put the events of one answer together, with the texts in their places."""
    reasoning: list[str] = []
    items: list[list[str] | int] = []
    calls: list[tuple[str, list[str]]] = []
    ended: set[int] = set()
    for event in events:
        match event:
            case TextDelta(text):
                if not items or isinstance(items[-1], int):
                    items.append([])
                last = items[-1]
                assert isinstance(last, list)
                last.append(text)
            case ReasoningDelta(text):
                reasoning.append(text)
            case ToolCallStart(call, name):
                assert call == len(calls), "calls are counted from 0"
                calls.append((name, []))
                items.append(call)
            case ToolArgumentsDelta(call, text):
                calls[call][1].append(text)
            case ToolCallEnd(call):
                ended.add(call)
    found: list[str | ReadCall] = []
    for item in items:
        if isinstance(item, int):
            found.append(ReadCall(calls[item][0], "".join(calls[item][1]), item in ended))
        elif text := "".join(item).strip():
            found.append(text)
    return Reading("".join(reasoning).strip(), tuple(found))


def same(one: Any, other: Any) -> bool:
    """Whether two values are the same JSON value: 1 and 1.0 are, 1 and true are not."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, int | float) and isinstance(other, int | float):
        return one == other
    return type(one) is type(other) and bool(one == other)


def loads(text: str) -> Any:
    """The value of JSON text; text that is none is a `ValueError`."""

    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


def parameters_of(tools: Sequence[Mapping[str, Any]], name: str) -> Schema:
    for tool in tools:
        if tool["function"]["name"] == name:
            found: Schema = tool["function"]["parameters"]
            return found
    return {}
