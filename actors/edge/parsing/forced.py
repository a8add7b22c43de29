"""Tool calls that structured output enforces: `tool_choice` "required" or a named tool.

The engine is held to a JSON schema (`forced_schema`), so the whole answer is JSON: the arguments of the named tool
(`forced_call`), or an array of calls (`forced_calls`).
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from headwater.actors.edge.parsing.context import ToolFormat
from headwater.actors.edge.parsing.events import offered_tools
from headwater.actors.edge.parsing.json_calls import JsonCalls
from headwater.actors.edge.parsing.regions import ForcedCall

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
    own = {key: schema.pop(key, None) or {} for key in _DEFINITIONS}
    clashes = any(
        name in definitions and definitions[name] != body
        for part in own.values()
        for name, body in part.items()
    )
    suffix = f"_{number}" if clashes else ""
    whole = f"#/$defs/tool_{number}"
    found = _References(suffix, whole)
    moved: dict[str, Any] = found.moved(schema)
    for part in own.values():
        for name, body in part.items():
            definitions[name + suffix] = found.moved(body)
    if not found.refer_to_root:
        return moved
    definitions[f"tool_{number}"] = moved
    return {"$ref": whole}


_DEFINITIONS: Final = ("$defs", "definitions")


class _References:
    """Rewrites references of a schema that becomes a part of another."""

    def __init__(self, suffix: str, whole: str) -> None:
        self._suffix = suffix
        self._whole = whole
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
