"""Translation of a request of the Responses API into the internal request, with its tools. Pure.

Functions, custom tools and namespaces of both are served; tools that OpenAI hosts are left out.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal, NamedTuple, cast

import msgspec

from headwater.actors.edge.apis.responses_items import (
    CUSTOM_INPUT,
    Item,
    additional_tools,
    invalid_member,
    offered_name,
    turns_of,
)
from headwater.actors.edge.apis.responses_types import LOGPROBS, CreateFields, InputFields, TextFormat
from headwater.actors.edge.prompt.guides import schema_guide
from headwater.actors.edge.prompt.request import (
    OPENAI,
    GenerationRequest,
    Hints,
    Reasoning,
    SamplingFields,
    Tool,
    ToolChoice,
    ToolMode,
    Turn,
    hosted_name,
)
from headwater.actors.http.errors import bad_field, bad_request
from headwater.schemas.inference import Guide

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
    """What the input of a custom tool must look like. A grammar is a part of the tool's description."""

    type: Literal["text", "grammar"] = "text"
    syntax: str | None = None
    definition: str | None = None


class CustomTool(msgspec.Struct, tag="custom"):
    """A tool whose input is plain text. The model sees a function with one argument."""

    name: ToolName
    description: str | None = None
    format: CustomToolFormat | None = None
    defer_loading: bool | None = None
    allowed_callers: Callers | None = None


AnyTool = FunctionTool | CustomTool


class Namespace(msgspec.Struct):
    """Functions and custom tools that belong together, as those of a server of tools."""

    name: ToolName
    tools: list[dict[str, Any]]
    description: str | None = None


class OfferedTool(NamedTuple):
    """A tool as the model sees it, under a name that no other has, and where its client has it."""

    name: str
    tool: AnyTool
    namespace: str = ""


class NamedChoice(msgspec.Struct):
    """The model must call this tool."""

    type: Literal["function", "custom"]
    name: str
    namespace: str | None = None


class AllowedTools(msgspec.Struct):
    """The model may call some of the tools only."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[dict[str, Any]]


class ToolSet(NamedTuple):
    """What the model gets. `custom`: names of the custom tools among `tools`. `echo`: the tools as responses show them.

    `namespaces`: namespace and own name of those tools that are in one, by the name that the model sees. `omitted`: types of the tools that
    are left out, as nothing here runs them.
    """

    tools: tuple[Tool, ...]
    custom: frozenset[str]
    choice: ToolChoice
    echo: list[dict[str, Any]]
    namespaces: Mapping[str, tuple[str, str]] = {}
    omitted: tuple[str, ...] = ()


def tools_of(definitions: list[dict[str, Any]] | None, choice: Any, *, parallel: bool) -> ToolSet:
    """The request's tools, checked. Raises `ApiError` 400 naming the field."""
    if len(definitions or ()) > TOOLS_MAX:
        raise bad_request(f"At most {TOOLS_MAX} tools.", param="tools")
    offered: list[OfferedTool] = []
    echo: list[dict[str, Any]] = []
    omitted: list[str] = []
    for index, tool in enumerate(definitions or ()):
        param = f"tools[{index}]"
        if kind := hosted_name(tool, OPENAI):
            omitted.append(kind)
            echo.append(tool)
        elif tool.get("type") == "namespace":
            offered += _of_namespace(tool, param)
            echo.append(tool)
        else:
            read = _read(tool, param)
            offered.append(OfferedTool(read.name, read))
            echo.append(_shown(read, tool))
    names = [offered_tool.name for offered_tool in offered]
    if len(set(names)) < len(names):
        raise bad_request("Two tools have the same name.", param="tools")
    tool_choice, allowed = _choice(choice, names)
    return ToolSet(
        tuple(
            _offered(offered_tool)
            for offered_tool in offered
            if allowed is None or offered_tool.name in allowed
        ),
        frozenset(offered_tool.name for offered_tool in offered if isinstance(offered_tool.tool, CustomTool)),
        ToolChoice(tool_choice.mode, tool_choice.name, parallel),
        echo,
        {
            offered_tool.name: (offered_tool.namespace, offered_tool.tool.name)
            for offered_tool in offered
            if offered_tool.namespace
        },
        tuple(omitted),
    )


def _of_namespace(fields: dict[str, Any], param: str) -> list[OfferedTool]:
    """Its tools, each with the namespace in its name; the first says what the namespace is."""
    try:
        space = msgspec.convert(fields, Namespace)
    except msgspec.ValidationError as error:
        raise invalid_member(error, param) from error
    tools: list[OfferedTool] = []
    for number, definition in enumerate(space.tools):
        tool = _read(definition, f"{param}.tools[{number}]")
        if space.description and not tools:
            described = f"{space.description}\n{tool.description or ''}".rstrip()
            tool = msgspec.structs.replace(tool, description=described)
        tools.append(OfferedTool(offered_name(space.name, tool.name), tool, space.name))
    return tools


def _read(tool: dict[str, Any], param: str) -> AnyTool:
    kind = tool.get("type")
    if kind not in ("function", "custom"):
        shown = repr(kind[:64]) if isinstance(kind, str) else "unknown"
        raise bad_request(
            f"{param}: tools of type {shown} are not served here; use type 'function', 'custom' or 'namespace'.",
            param=f"{param}.type",
        )
    try:
        read = cast(AnyTool, msgspec.convert(tool, AnyTool))
    except msgspec.ValidationError as error:
        raise invalid_member(error, param) from error
    if read.allowed_callers is not None and "direct" not in read.allowed_callers:
        raise bad_field(
            f"{param}.allowed_callers", "is not supported: only the model itself calls tools here."
        )
    return read


def _offered(offered: OfferedTool) -> Tool:
    tool = offered.tool
    if isinstance(tool, FunctionTool):
        return Tool(offered.name, tool.description or "", tool.parameters or {}, bool(tool.strict))
    description = tool.description or ""
    if tool.format is not None and tool.format.definition:
        syntax = f" ({tool.format.syntax})" if tool.format.syntax else ""
        description += f"\n\nThe input conforms to this grammar{syntax}:\n{tool.format.definition}"
    schema = {
        "type": "object",
        "properties": {CUSTOM_INPUT: {"type": "string", "description": "the input, as plain text"}},
        "required": [CUSTOM_INPUT],
        "additionalProperties": False,
    }
    return Tool(offered.name, description.strip(), schema)


def _shown(tool: AnyTool, definition: dict[str, Any]) -> dict[str, Any]:
    if isinstance(tool, CustomTool):
        return {key: value for key, value in definition.items() if value is not None}
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
            raise bad_field("tool_choice", "is none, auto, required or an object.")
        if choice == "required" and not names:
            raise bad_field("tool_choice", "is required, but there are no tools.")
        return ToolChoice(cast(ToolMode, choice)), None
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "allowed_tools":
        allowed = _convert(choice, AllowedTools)
        chosen = [_chosen(tool.get("namespace"), str(tool.get("name", ""))) for tool in allowed.tools]
        _check_known(chosen, names)
        return ToolChoice(allowed.mode), frozenset(chosen)
    if kind not in ("function", "custom"):
        raise bad_field(
            "tool_choice.type", "must be function, custom or allowed_tools; hosted tools are not served here."
        )
    named = _convert(choice, NamedChoice)
    chosen_name = _chosen(named.namespace, named.name)
    _check_known([chosen_name], names)
    return ToolChoice("named", chosen_name), None


def _chosen(namespace: str | None, name: str) -> str:
    return offered_name(namespace, name) if namespace else name


def _convert(choice: Any, kind: type[Any]) -> Any:
    try:
        return msgspec.convert(choice, kind)
    except msgspec.ValidationError as error:
        raise invalid_member(error, "tool_choice") from error


def _check_known(chosen: list[str], names: list[str]) -> None:
    for name in chosen:
        if name not in names:
            shown = name[:64] if re.fullmatch(r"[a-zA-Z0-9_-]+", name) else "that name"
            raise bad_field("tool_choice", f"names {shown}, which is not among tools.")


ENDPOINT: Final = "responses"
ID_PREFIX: Final = "resp_"


def generation_request(
    fields: CreateFields, history: Sequence[Item], items: Sequence[Item], id_: str, *, stream: bool
) -> tuple[GenerationRequest, ToolSet]:
    """The internal request, and its tools. `items` is the input, `history` comes before it.

    `id_`: the response's id without its prefix. Raises `ApiError` 400 naming the field.
    """
    tools, prompt = _prompt(fields, history, items)
    logprobs = (fields.top_logprobs or 0) if fields.includes(LOGPROBS) or fields.top_logprobs else None
    request = GenerationRequest(
        **prompt,
        id_prefix=ID_PREFIX,
        id=id_,
        sampling=SamplingFields(
            temperature=fields.temperature,
            top_p=fields.top_p,
            presence_penalty=fields.presence_penalty,
            frequency_penalty=fields.frequency_penalty,
            logprobs=logprobs,
        ),
        max_tokens=fields.max_output_tokens,
        max_tokens_param="max_output_tokens",
        logprobs_param="top_logprobs",
        stream=stream,
        hints=Hints(
            user=fields.user or fields.safety_identifier,
            session=fields.prompt_cache_key or fields.conversation_id or None,
            priority=fields.priority,
            cache_salt=fields.cache_salt or "",
        ),
    )
    return request, tools


def count_request(fields: InputFields, history: Sequence[Item], items: Sequence[Item]) -> GenerationRequest:
    """The internal request for counting the prompt's tokens. Raises `ApiError` 400."""
    return GenerationRequest(**_prompt(fields, history, items)[1], max_tokens=1)


def _prompt(
    fields: InputFields, history: Sequence[Item], items: Sequence[Item]
) -> tuple[ToolSet, dict[str, Any]]:
    """The tools, and what an internal request has for the prompt."""
    # A tool that is offered again, by a later item too, is the same one.
    added = additional_tools([*history, *items])
    all_tools = [*(fields.tools or []), *(tool for tool in added if tool not in (fields.tools or []))]
    tools = tools_of(
        all_tools if added else fields.tools,
        fields.tool_choice,
        parallel=fields.parallel_tool_calls is not False,
    )
    guide = guide_of(fields.text.format) if fields.text and fields.text.format else None
    return tools, {
        "model": fields.model,
        "param": "input",
        "endpoint": ENDPOINT,
        "messages": conversation_of(history, items, fields.instructions),
        "tools": tools.tools,
        "omitted_tools": tools.omitted,
        "tool_choice": tools.choice,
        "reasoning": Reasoning(effort=fields.reasoning.effort if fields.reasoning else None),
        "guide": guide,
        "guide_param": "text.format" if guide else "",
    }


def conversation_of(
    history: Sequence[Item], items: Sequence[Item], instructions: str | None
) -> tuple[Turn, ...]:
    """The turns of the input and of what comes before it. Raises `ApiError` 400 naming the item."""
    earlier = turns_of(history, "previous_response_id", instructions or "")
    # A call of the earlier response and a text of the input are of different turns.
    return earlier + turns_of(items, "input", earlier=history)


def guide_of(text_format: TextFormat) -> Guide | None:
    """Return what the answer must conform to, None for anything. Raises `ApiError` 400."""
    if text_format.type == "text":
        return None
    if text_format.type == "json_object":
        return Guide("json_object")
    if text_format.name is None:
        raise bad_field("text.format.name", "is missing.")
    # The schema is always enforced, with or without `strict`.
    return schema_guide(text_format.json_schema, "text.format.schema")


_KEPT: Final = ("system", "developer")


def keep_last(request: GenerationRequest, count: int) -> GenerationRequest:
    """The request with its system messages, and the last `count` other turns. Results of calls that were dropped go too."""
    turns = request.messages
    others = [turn for turn in turns if turn.role not in _KEPT]
    kept = others[len(others) - min(count, len(others)) :]
    while kept and kept[0].role == "tool":
        kept.pop(0)
    remaining = {id(turn) for turn in kept}
    return msgspec.structs.replace(
        request, messages=tuple(turn for turn in turns if turn.role in _KEPT or id(turn) in remaining)
    )
