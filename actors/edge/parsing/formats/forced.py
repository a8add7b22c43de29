"""Tool calls that structured output enforces: `tool_choice` "required" or a named tool.

The engine is held to a JSON schema (`forced_schema`), so the whole answer is JSON: the arguments of the named tool
(`forced_call`), or an array of calls (`forced_calls`).
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from headwater.actors.edge.parsing.grammar.forced_call import ForcedCall
from headwater.actors.edge.parsing.grammar.format import ToolFormat
from headwater.actors.edge.parsing.grammar.json_calls import JsonCalls
from headwater.actors.edge.parsing.tools import offered_tools

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
    for name, schema in offered.items():
        parameters = dict(schema) or dict(ANY_OBJECT)
        # References inside a tool's schema are to its own root, which moves down here: its definitions move up.
        for key in ("$defs", "definitions"):
            for definition, body in (parameters.pop(key, None) or {}).items():
                if definitions.setdefault(definition, body) != body:
                    raise ValueError(
                        f"the tools' schemas define {definition!r} differently: rename one, or name a tool in tool_choice"
                    )
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"type": "string", "enum": [name]}, "parameters": _moved(parameters)},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    items = calls[0] if len(calls) == 1 else {"anyOf": calls}
    array: dict[str, Any] = {"type": "array", "minItems": 1, "items": items}
    if not parallel:
        array["maxItems"] = 1
    if definitions:
        array["$defs"] = _moved(definitions)
    return array


def _moved(schema: Any) -> Any:
    """Return a schema whose references to `definitions` point to `$defs`."""
    if isinstance(schema, list):
        return [_moved(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: "#/$defs/" + value.removeprefix("#/definitions/")
        if key == "$ref" and isinstance(value, str) and value.startswith("#/definitions/")
        else _moved(value)
        for key, value in schema.items()
    }
