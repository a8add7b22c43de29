"""From Anthropic's Messages API to the internal request. Pure."""

from collections.abc import Sequence
from typing import Final

import msgspec

from headwater.actors.edge.api.anthropic.conversation import found_tools, turns_of
from headwater.actors.edge.api.anthropic.types import (
    MessagesRequest,
    PromptFields,
    ThinkingConfig,
    ToolChoiceField,
    ToolDefinition,
    ToolName,
)
from headwater.actors.edge.api.openai.types import STOP_CHARACTERS_MAX, STOPS_MAX
from headwater.actors.edge.generation.hosted_tools import ANTHROPIC, hosted_name
from headwater.actors.edge.generation.messages.turn import Turn
from headwater.actors.edge.generation.request import (
    DEFAULT_PROMPT_OPTIONS,
    DEFAULT_TOOL_CHOICE,
    GenerationRequest,
    Hints,
    PromptOptions,
    Reasoning,
    SamplingFields,
    Tool,
    ToolChoice,
)
from headwater.actors.edge.guided.structured_output import json_schema_guide
from headwater.actors.http.errors import bad_request
from headwater.schemas.messages.inference import Guide

ID_PREFIX: Final = "msg_"
FORMAT_PARAM: Final = "output_config.format.schema"


def to_generation(
    request: MessagesRequest, id_: str = "", *, keep_billing_line: bool = False
) -> GenerationRequest:
    """What a message request asks for; the message's id ends with `id_`. Raises `ApiError` 400 naming the field."""
    prompt = to_prompt(request, keep_billing_line=keep_billing_line)
    return msgspec.structs.replace(
        prompt,
        id=id_,
        sampling=SamplingFields(
            temperature=request.temperature, top_p=request.top_p, top_k=request.top_k or None
        ),
        max_tokens=request.max_tokens,
        stops=_stops(request.stop_sequences or []),
        stream=bool(request.stream),
        hints=Hints(
            user=request.metadata.user_id if request.metadata else None, cache_salt=request.cache_salt or ""
        ),
    )


def to_prompt(request: PromptFields, *, keep_billing_line: bool = False) -> GenerationRequest:
    """The part of a request that becomes its prompt, for counting. Raises `ApiError` 400 naming the field."""
    tools = _tools(request.tools or [], found_tools(request.messages))
    turns = turns_of(request.system, request.messages, keep_billing_line=keep_billing_line)
    output = request.output_config
    guide = _guide(request)
    return GenerationRequest(
        model=request.model,
        param="messages",
        endpoint="messages",
        id_prefix=ID_PREFIX,
        messages=turns,
        tools=tools,
        omitted_tools=tuple(filter(None, (hosted_name(tool, ANTHROPIC) for tool in request.tools or ()))),
        tool_choice=_tool_choice(request.tool_choice, tools),
        reasoning=_reasoning(request.thinking, output.effort if output else None),
        prompt_options=_prompt_options(turns),
        guide=guide,
        guide_param=FORMAT_PARAM if guide else "",
    )


def _prompt_options(turns: Sequence[Turn]) -> PromptOptions:
    if turns[-1].role == "assistant":
        return PromptOptions(add_generation_prompt=False, continue_final=True)
    return DEFAULT_PROMPT_OPTIONS


def _tools(definitions: Sequence[ToolDefinition], found: frozenset[str]) -> tuple[Tool, ...]:
    """The tools that the model is offered: a deferred one when a search of the client has found it. Searches that an API's servers would
    run find nothing here, so all are offered.
    """
    searched = any(hosted_name(tool, ANTHROPIC).startswith("tool_search") for tool in definitions)
    tools: list[Tool] = []
    names: set[str] = set()
    for number, tool in enumerate(definitions):
        param = f"tools[{number}]"
        if hosted_name(tool, ANTHROPIC):
            continue
        _check_tool(tool, param)
        if tool.name in names:
            raise bad_request(
                f"{param}.name {tool.name!r} occurs twice; names are unique.", param=f"{param}.name"
            )
        names.add(tool.name)
        if tool.defer_loading and not searched and tool.name not in found:
            continue
        tools.append(Tool(tool.name, tool.description or "", tool.input_schema or {}, bool(tool.strict)))
    return tuple(tools)


def _check_tool(tool: ToolDefinition, param: str) -> None:
    if tool.type not in (None, "custom"):
        raise bad_request(
            f"{param}.type {tool.type[:64]!r} is not known here; send tools of type custom and run them in the client.",
            param=f"{param}.type",
        )
    try:
        msgspec.convert(tool.name, ToolName)
    except msgspec.ValidationError as error:
        raise bad_request(
            f"{param}.name has 1 to 128 letters, digits, underscores and dashes.", param=f"{param}.name"
        ) from error
    if tool.input_schema is None or tool.input_schema.get("type") != "object":
        raise bad_request(
            f"{param}.input_schema must be a JSON schema of type object.", param=f"{param}.input_schema"
        )
    if tool.allowed_callers is not None and "direct" not in tool.allowed_callers:
        raise bad_request(
            f"{param}.allowed_callers must contain direct: nothing else calls tools here.",
            param=f"{param}.allowed_callers",
        )


def _tool_choice(choice: ToolChoiceField | None, tools: Sequence[Tool]) -> ToolChoice:
    if choice is None:
        return DEFAULT_TOOL_CHOICE
    parallel = not choice.disable_parallel_tool_use
    if choice.type in ("any", "tool") and not tools:
        raise bad_request("tool_choice may be specified only with tools.", param="tool_choice")
    if choice.type == "tool":
        if choice.name not in {tool.name for tool in tools}:
            raise bad_request(
                f"tool_choice.name {(choice.name or '')[:128]!r} is none of the tools.",
                param="tool_choice.name",
            )
        return ToolChoice("named", choice.name or "", parallel)
    if choice.type == "any":
        return ToolChoice("required", "", parallel)
    return ToolChoice("auto" if choice.type == "auto" else "none", "", parallel)


def _reasoning(thinking: ThinkingConfig | None, effort: str | None) -> Reasoning:
    if thinking is None:
        return Reasoning(effort=effort)
    if thinking.type == "enabled":
        if thinking.budget_tokens is None:
            raise bad_request(
                "thinking.budget_tokens is required when thinking is enabled.", param="thinking.budget_tokens"
            )
        return Reasoning(effort=effort, enabled=True, budget=thinking.budget_tokens)
    return Reasoning(effort=effort, enabled=thinking.type == "adaptive")


def _guide(request: PromptFields) -> Guide | None:
    output = request.output_config
    if output is None or output.format is None:
        return None
    return json_schema_guide(output.format.schema, FORMAT_PARAM)


def _stops(sequences: Sequence[str]) -> tuple[str, ...]:
    if len(sequences) > STOPS_MAX:
        raise bad_request(
            f"At most {STOPS_MAX} stop sequences, got {len(sequences)}.", param="stop_sequences"
        )
    for sequence in sequences:
        if not sequence or len(sequence) > STOP_CHARACTERS_MAX:
            raise bad_request(
                f"A stop sequence must have 1 to {STOP_CHARACTERS_MAX} characters.", param="stop_sequences"
            )
    return tuple(sequences)
