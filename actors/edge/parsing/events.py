"""The events of an output parser (deltas of text and reasoning, and tool calls in pieces), and the tools that a request offers."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol


class TextDelta(NamedTuple):
    """A piece of the answer's text."""

    text: str


class ReasoningDelta(NamedTuple):
    """A piece of the answer's reasoning."""

    text: str


class ToolCallStart(NamedTuple):
    """A tool call begins.

    `call` counts the answer's calls from 0. `id` is the one that the model wrote (Kimi K2, Mistral), or "": then the
    edge makes one.
    """

    call: int
    name: str
    id: str = ""


class ToolArgumentsDelta(NamedTuple):
    """A piece of a call's arguments, as JSON text.

    The pieces of a call that has a `ToolCallEnd` are, put together, a valid JSON object. Of a call that was cut off or
    is malformed they are what can be said so far, or the text as the model wrote it.
    """

    call: int
    text: str


class ToolCallEnd(NamedTuple):
    """A tool call ended properly. A call that the answer's end cut off, or that is malformed, has none."""

    call: int


OutputEvent = TextDelta | ReasoningDelta | ToolCallStart | ToolArgumentsDelta | ToolCallEnd


class OutputParser(Protocol):
    """Turns the text of one answer into events, piece by piece."""

    def push(self, text: str) -> list[OutputEvent]:
        """Take the next piece of the answer and return the events it completes.

        The text has its special tokens spelled out, apart from the one that ends the turn. Pieces may be cut anywhere,
        also inside a marker: the events, with adjacent deltas merged, do not depend on the cuts. Never raises.
        """
        ...

    def finish(self) -> list[OutputEvent]:
        """Return the remaining events: the answer has ended."""
        ...


class ParsedCall(NamedTuple):
    """A tool call as a whole. `complete`: whether it ended properly."""

    name: str
    id: str
    arguments: str
    complete: bool


class ParsedOutput(NamedTuple):
    """An answer as a whole."""

    text: str
    reasoning: str
    calls: tuple[ParsedCall, ...]


def collect(events: Iterable[OutputEvent]) -> ParsedOutput:
    """Put the events of one answer together."""
    text: list[str] = []
    reasoning: list[str] = []
    starts: list[ToolCallStart] = []
    arguments: list[list[str]] = []
    ended: set[int] = set()
    for event in events:
        match event:
            case TextDelta(piece):
                text.append(piece)
            case ReasoningDelta(piece):
                reasoning.append(piece)
            case ToolCallStart():
                starts.append(event)
                arguments.append([])
            case ToolArgumentsDelta(call, piece):
                arguments[call].append(piece)
            case ToolCallEnd(call):
                ended.add(call)
    calls = tuple(
        ParsedCall(start.name, start.id, "".join(arguments[start.call]), start.call in ended)
        for start in starts
    )
    return ParsedOutput("".join(text), "".join(reasoning), calls)


# The tools that a request offers.


def offered_tools(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return the JSON schema of each tool's parameters, by name.

    Definitions may have the form of any API: with or without `function` around them, with `parameters` or
    `input_schema`.
    """
    offered: dict[str, Mapping[str, Any]] = {}
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            schema = function.get("parameters", function.get("input_schema"))
            offered[function["name"]] = schema if isinstance(schema, Mapping) else {}
    return offered
