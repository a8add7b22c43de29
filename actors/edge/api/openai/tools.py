"""Tools and tool choices of chat completions as the internal ones. Pure."""

from collections.abc import Iterable, Sequence
from typing import Any, Final

from headwater.actors.edge.api.openai.types import ChatTool
from headwater.actors.edge.generation.hosted_tools import OPENAI, hosted_name
from headwater.actors.edge.generation.request import Tool, ToolChoice
from headwater.actors.http.errors import ApiError, bad_request

_CHOICES: Final = (
    'tool_choice is "none", "auto", "required", {"type": "function", "function": {"name": NAME}}, or'
    ' {"type": "allowed_tools", "allowed_tools": {"mode": "auto" or "required", "tools": [...]}}.'
)


def tools_of(tools: Sequence[ChatTool]) -> tuple[Tool, ...]:
    """The functions on offer, without tools that OpenAI hosts. Raises `ApiError` 400 naming the tool."""
    found: dict[str, Tool] = {}
    for number, tool in enumerate(tools):
        param = f"tools[{number}]"
        if hosted_name(tool, OPENAI):
            continue
        if tool.type != "function":
            raise bad_request(
                f"{param}.type is {tool.type[:64]!r}; this model's tools are functions.",
                param=f"{param}.type",
            )
        function = tool.function
        if function is None:
            raise bad_request(f"{param}.function is missing.", param=f"{param}.function")
        if function.name in found:
            raise bad_request(f"Two tools are named {function.name!r}.", param=f"{param}.function.name")
        found[function.name] = Tool(
            function.name, function.description or "", function.parameters or {}, bool(function.strict)
        )
    return tuple(found.values())


def choice_of(value: Any, tools: tuple[Tool, ...], *, parallel: bool) -> tuple[ToolChoice, tuple[Tool, ...]]:
    """The tool choice, and the tools that it allows. Raises `ApiError` 400."""
    if value is None or value in ("auto", "none", "required"):
        if value == "required" and not tools:
            raise bad_request("tool_choice is required, but there are no tools.", param="tool_choice")
        return ToolChoice(value or "auto", parallel=parallel), tools
    if not isinstance(value, dict):
        raise _unknown()
    inner = value.get(value["type"]) if value.get("type") in ("function", "allowed_tools") else None
    if not isinstance(inner, dict):
        raise _unknown()
    if value["type"] == "function":
        name = inner.get("name")
        if not isinstance(name, str):
            raise _unknown()
        _find([name], tools)
        return ToolChoice("named", name, parallel=parallel), tools
    mode, listed = inner.get("mode"), inner.get("tools")
    if mode not in ("auto", "required") or not isinstance(listed, list) or not listed:
        raise _unknown()
    return ToolChoice(mode, parallel=parallel), _find(map(_name_of, listed), tools)


def _name_of(tool: Any) -> str:
    function = tool.get("function") if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise _unknown()
    return name


def _find(names: Iterable[str], tools: tuple[Tool, ...]) -> tuple[Tool, ...]:
    by_name = {tool.name: tool for tool in tools}
    found = []
    for name in names:
        if name not in by_name:
            raise bad_request(
                f"tool_choice names {name[:64]!r}, which is not among the tools.", param="tool_choice"
            )
        found.append(by_name[name])
    return tuple(found)


def _unknown() -> ApiError:
    return bad_request(_CHOICES, param="tool_choice")
