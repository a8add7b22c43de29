"""Tools: functions and custom tools are served, tools that OpenAI hosts are rejected by name. Pure."""

import re
from typing import Annotated, Any, Final, Literal, NamedTuple, cast

import msgspec

from headwater.actors.edge.api.responses.items.turns import CUSTOM_INPUT
from headwater.actors.edge.generation.request import Tool, ToolChoice
from headwater.actors.http.errors import ApiError, bad_request

TOOLS_MAX: Final = 1_024
ToolName = Annotated[str, msgspec.Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
Callers = list[Literal["direct", "programmatic"]]


class FunctionTool(msgspec.Struct, tag="function"):
    """A function of the client. `parameters` is a JSON schema."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    allowed_callers: Callers | None = None


class CustomToolFormat(msgspec.Struct):
    """What the input of a custom tool must look like. Grammars are rejected."""

    type: Literal["text", "grammar"] = "text"


class CustomTool(msgspec.Struct, tag="custom"):
    """A tool whose input is plain text. The model sees a function with one argument."""

    name: ToolName
    description: str | None = None
    format: CustomToolFormat | None = None
    defer_loading: bool | None = None
    allowed_callers: Callers | None = None


AnyTool = FunctionTool | CustomTool


class NamedChoice(msgspec.Struct):
    """The model must call this tool."""

    type: Literal["function", "custom"]
    name: str


class AllowedTools(msgspec.Struct):
    """The model may call some of the tools only."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[dict[str, Any]]


class ToolSet(NamedTuple):
    """What the model gets. `custom`: names of the custom tools among `tools`. `echo`: the tools as responses show them."""

    tools: tuple[Tool, ...]
    custom: frozenset[str]
    choice: ToolChoice
    echo: list[dict[str, Any]]


def tools_of(given: list[dict[str, Any]] | None, choice: Any, *, parallel: bool) -> ToolSet:
    """The request's tools, checked. Raises `ApiError` 400 naming the field."""
    if len(given or ()) > TOOLS_MAX:
        raise bad_request(f"At most {TOOLS_MAX} tools.", param="tools")
    tools = [_read(tool, f"tools[{index}]") for index, tool in enumerate(given or ())]
    names = [tool.name for tool in tools]
    if len(set(names)) < len(names):
        raise bad_request("Two tools have the same name.", param="tools")
    wanted, allowed = _choice(choice, names)
    return ToolSet(
        tuple(_offered(tool) for tool in tools if allowed is None or tool.name in allowed),
        frozenset(tool.name for tool in tools if isinstance(tool, CustomTool)),
        ToolChoice(wanted.mode, wanted.name, parallel),
        [_shown(tool, one) for tool, one in zip(tools, given or (), strict=True)],
    )


def _read(tool: dict[str, Any], param: str) -> AnyTool:
    kind = tool.get("type")
    if kind not in ("function", "custom"):
        shown = repr(kind[:64]) if isinstance(kind, str) else "unknown"
        raise bad_request(
            f"{param}: tools of type {shown} are not served here; use type 'function' or 'custom'.",
            param=f"{param}.type",
        )
    try:
        read = cast(AnyTool, msgspec.convert(tool, AnyTool))
    except msgspec.ValidationError as error:
        message, _, where = str(error).partition(" - at `$")
        where = param + where.rstrip("`")
        raise bad_request(f"{message} (at {where})", param=where) from error
    if isinstance(read, CustomTool) and read.format is not None and read.format.type == "grammar":
        raise bad_request(
            f"{param}.format: grammars of custom tools are not supported.", param=f"{param}.format"
        )
    if read.defer_loading:
        raise _unsupported(f"{param}.defer_loading", "tool search is not served here")
    if read.allowed_callers is not None and "direct" not in read.allowed_callers:
        raise _unsupported(f"{param}.allowed_callers", "only the model itself calls tools here")
    return read


def _offered(tool: AnyTool) -> Tool:
    if isinstance(tool, FunctionTool):
        return Tool(tool.name, tool.description or "", tool.parameters or {}, bool(tool.strict))
    schema = {
        "type": "object",
        "properties": {CUSTOM_INPUT: {"type": "string", "description": "the input, as plain text"}},
        "required": [CUSTOM_INPUT],
        "additionalProperties": False,
    }
    return Tool(tool.name, tool.description or "", schema)


def _shown(tool: AnyTool, given: dict[str, Any]) -> dict[str, Any]:
    if isinstance(tool, CustomTool):
        return {key: value for key, value in given.items() if value is not None}
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": tool.strict,
    }


def _choice(choice: Any, names: list[str]) -> tuple[ToolChoice, frozenset[str] | None]:
    """The choice, and the names of the tools that remain, None for all."""
    if choice is None:
        return ToolChoice(), None
    if isinstance(choice, str):
        if choice not in ("none", "auto", "required"):
            raise bad_request("tool_choice is none, auto, required or an object.", param="tool_choice")
        if choice == "required" and not names:
            raise bad_request("tool_choice is required, but there are no tools.", param="tool_choice")
        return ToolChoice("none" if choice == "none" else _mode(choice)), None
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "allowed_tools":
        allowed = _convert(choice, AllowedTools)
        chosen = [str(tool.get("name", "")) for tool in allowed.tools]
        _check_known(chosen, names)
        return ToolChoice(_mode(allowed.mode)), frozenset(chosen)
    if kind not in ("function", "custom"):
        raise bad_request(
            "tool_choice.type must be function, custom or allowed_tools; hosted tools are not served here.",
            param="tool_choice.type",
        )
    named = _convert(choice, NamedChoice)
    _check_known([named.name], names)
    return ToolChoice("named", named.name), None


def _mode(word: str) -> Literal["auto", "required"]:
    return "required" if word == "required" else "auto"


def _convert(choice: Any, kind: type[Any]) -> Any:
    try:
        return msgspec.convert(choice, kind)
    except msgspec.ValidationError as error:
        message, _, where = str(error).partition(" - at `$")
        where = "tool_choice" + where.rstrip("`")
        raise bad_request(f"{message} (at {where})", param=where) from error


def _check_known(chosen: list[str], names: list[str]) -> None:
    for name in chosen:
        if name not in names:
            shown = name[:64] if re.fullmatch(r"[a-zA-Z0-9_-]+", name) else "that name"
            raise bad_request(f"tool_choice names {shown}, which is not among tools.", param="tool_choice")


def _unsupported(param: str, reason: str) -> ApiError:
    return bad_request(f"{param} is not supported: {reason}.", param=param)
