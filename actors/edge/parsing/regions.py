"""The parser: it reads one answer's text by the grammar of its format, or as the tool calls that structured output enforces.

Calls are enforced by `tool_choice` "required" or a named tool. The engine is held to a JSON schema (`forced_schema`), so the whole answer is JSON:
the arguments of the named tool (`FORCED_CALL`), or an array of calls (`FORCED_CALLS`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from headwater.actors.edge.parsing.grammar import Context, ReasoningFormat, ToolFormat, offered_tools
from headwater.actors.edge.parsing.json_calls import JsonCalls
from headwater.actors.edge.parsing.json_value import copy_value
from headwater.actors.edge.parsing.reader import Steps, markers


class Regions:
    """Reads an answer of text, reasoning and calls.

    Reasoning opens at the beginning of text only: a marker of it further on is text about reasoning. A marker that opens no call is text,
    and so is one without a meaning of its own that stands neither next to a call nor, around the response, at its beginning or end.
    """

    __slots__ = (
        "_around_calls", "_around_text", "_calls", "_context", "_ends_before", "_in_reasoning", "_in_text",
        "_reasoning", "_whole",
    )  # fmt: skip

    def __init__(self, context: Context, tools: ToolFormat | None, reasoning: ReasoningFormat | None) -> None:
        self._context: Final = context
        self._reasoning: Final = reasoning if reasoning is not None else ReasoningFormat(open=(), close=())
        self._calls: Final = tools.calls if tools is not None else {}
        self._whole: Final = tools.whole if tools is not None and tools.whole else self._reasoning.whole
        self._around_calls: Final = frozenset(tools.framing if tools is not None else ())
        self._around_text: Final = frozenset(self._reasoning.framing)
        self._ends_before: Final = frozenset(self._reasoning.ends_before)
        framing = (*self._around_text, *self._around_calls)
        ends = (*self._ends_before, *(tools.end_reasoning if tools is not None else ()))
        self._in_text: Final = markers(*self._calls, *framing, *self._reasoning.open, *self._reasoning.close)
        self._in_reasoning: Final = markers(*self._reasoning.close, *ends)

    def read(self, *, inside: bool) -> Steps[None]:
        """Read the answer. `inside`: it begins inside reasoning."""
        reader, out = self._context.reader, self._context.out
        opens = markers(*self._reasoning.open)
        if inside:
            # The template opened the reasoning; the model may open it again.
            yield from reader.accept_after_space(opens)
            yield from self._read_reasoning()
        elif self._whole is not None and (yield from reader.accept_after_space(opens)):
            yield from self._read_reasoning()
        if self._whole is not None:
            self._context.begin("")
            yield from self._whole.read(self._context, "")
        while marker := (yield from reader.copy_until(self._in_text, out.text.write, self._is_behind_markup)):
            if marker in self._calls:
                yield from self._read_call(marker)
            elif marker in self._reasoning.open or marker in self._reasoning.close:
                yield from self._read_reasoning_marker(marker)
            elif self._is_behind_call() or (marker in self._around_text and not out.text.written):
                out.text.drop_held()
            else:
                out.text.hold_markup(marker)
        if not out.calls or out.text.written:
            out.text.keep_held()

    def _is_behind_markup(self) -> bool:
        """Return whether text that begins here, and that the answer's end cuts off, is markup too."""
        return self._is_behind_call() or self._context.out.text.holds_markup

    def _is_behind_call(self) -> bool:
        """Return whether only whitespace and markup came since a call."""
        out = self._context.out
        return bool(out.calls) and not out.text.written

    def _read_reasoning_marker(self, marker: str) -> Steps[None]:
        """Deal with a marker of reasoning in text."""
        out = self._context.out
        if out.text.written:
            out.text.write(marker)
        elif marker in self._reasoning.open:
            yield from self._read_reasoning()
        else:
            out.text.drop_held()

    def _read_call(self, marker: str) -> Steps[bool]:
        """Read the calls that a marker opens, which has been read; return whether there is one."""
        context = self._context
        context.reader.at -= len(marker)
        context.begin(marker)
        before = context.out.calls
        yield from self._calls[marker].read(context, marker)
        if context.out.calls == before:
            return False
        context.out.text.start()
        return True

    def _read_reasoning(self) -> Steps[None]:
        context = self._context
        reader, out = context.reader, context.out
        out.text.drop_held()
        out.reasoning.start(self._reasoning.trim)
        while marker := (yield from reader.copy_until(self._in_reasoning, out.reasoning.write)):
            if marker in self._reasoning.close or marker in self._ends_before:
                out.reasoning.drop_held()
                if marker in self._ends_before:
                    reader.at -= len(marker)
                out.text.start(self._reasoning.trim)
                return
            if marker in self._around_calls:
                out.reasoning.hold_markup(marker)
                continue
            # What opens a call ends the reasoning if there is one: else it is reasoning about calls.
            opening = next(call_marker for call_marker in self._calls if marker.startswith(call_marker))
            reader.at -= len(marker) - len(opening)
            context.no_call = out.reasoning
            is_call = yield from self._read_call(opening)
            context.no_call = out.text
            if is_call:
                return
        out.reasoning.keep_held()


# The arguments of one call as the whole answer.


@dataclass(frozen=True, slots=True)
class ForcedCall:
    """The arguments of the one tool that is offered."""

    def read(self, context: Context, _marker: str) -> Steps[None]:
        """Read the arguments; an answer that is not an object is text."""
        reader, out = context.reader, context.out
        if (yield from reader.skip_space()) != "{" or not context.offered:
            context.give_back()
            return
        reader.take_record()
        out.start_call(next(iter(context.offered)))
        if (yield from copy_value(reader, out.write_arguments)):
            out.end_call()
            out.text.start()


ANY_OBJECT: Final[Mapping[str, Any]] = {"type": "object"}

FORCED_CALL: Final = ToolFormat(whole=ForcedCall(), trim=" \t\r\n")
"""`tools` given to the parser must hold the named tool only."""

FORCED_CALLS: Final = ToolFormat(whole=JsonCalls(), trim=" \t\r\n")


def forced_schema(tools: Sequence[Mapping[str, Any]], choice: str, parallel: bool) -> dict[str, Any]:
    """Return the JSON schema that an answer must follow.

    `choice` is the name of a tool: the schema is that of its arguments (for `forced_call`). Or it is "": the schema is
    that of an array of one or more calls, of exactly one without `parallel` (for `forced_calls`). Raises ValueError
    if there is no such tool.
    """
    offered = offered_tools(tools)
    if choice:
        if choice not in offered:
            raise ValueError(
                f"tool_choice names {choice!r}, which is not among the tools: {', '.join(offered)}"
            )
        return dict(offered[choice]) or dict(ANY_OBJECT)
    if not offered:
        raise ValueError("tool_choice is required, but there are no tools")
    definitions: dict[str, Any] = {}
    calls: list[dict[str, Any]] = []
    for number, (name, schema) in enumerate(offered.items()):
        parameters = _embedded(dict(schema) or dict(ANY_OBJECT), definitions, number)
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"type": "string", "enum": [name]}, "parameters": parameters},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    items = calls[0] if len(calls) == 1 else {"anyOf": calls}
    array: dict[str, Any] = {"type": "array", "minItems": 1, "items": items}
    if not parallel:
        array["maxItems"] = 1
    if definitions:
        array["$defs"] = definitions
    return array


def _embedded(schema: dict[str, Any], definitions: dict[str, Any], number: int) -> dict[str, Any]:
    """A tool's schema as a part of a larger one with these definitions, to which its own are added.

    References inside it are to its own root, which moves down: its definitions move up, under other names where other tools' have theirs; and
    where it refers to itself, or to a property, it becomes a definition as a whole.
    """
    own_definitions = {key: schema.pop(key, None) or {} for key in _DEFINITIONS}
    clashes = any(
        name in definitions and definitions[name] != body
        for part in own_definitions.values()
        for name, body in part.items()
    )
    suffix = f"_{number}" if clashes else ""
    root_reference = f"#/$defs/tool_{number}"
    references = _References(suffix, root_reference)
    moved: dict[str, Any] = references.moved(schema)
    for part in own_definitions.values():
        for name, body in part.items():
            definitions[name + suffix] = references.moved(body)
    if not references.refer_to_root:
        return moved
    definitions[f"tool_{number}"] = moved
    return {"$ref": root_reference}


_DEFINITIONS: Final = ("$defs", "definitions")


class _References:
    """Rewrites references of a schema that becomes a part of another."""

    def __init__(self, suffix: str, root_reference: str) -> None:
        self._suffix = suffix
        self._whole = root_reference
        self.refer_to_root = False

    def moved(self, schema: Any) -> Any:
        """A copy with its references rewritten."""
        if isinstance(schema, list):
            return [self.moved(item) for item in schema]
        if not isinstance(schema, dict):
            return schema
        return {
            key: self._reference(value) if key == "$ref" and isinstance(value, str) else self.moved(value)
            for key, value in schema.items()
        }

    def _reference(self, target: str) -> str:
        for key in _DEFINITIONS:
            if target.startswith(f"#/{key}/"):
                name, slash, rest = target.removeprefix(f"#/{key}/").partition("/")
                return f"#/$defs/{name}{self._suffix}{slash}{rest}"
        if not target.startswith("#"):
            return target
        self.refer_to_root = True
        return self._whole + target[1:]
