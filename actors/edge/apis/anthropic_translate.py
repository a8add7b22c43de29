"""Translation of requests of Anthropic's Messages API into the internal request. Pure.

A user's message may contain tool results and text. Chat templates know a tool's result as a message, so each becomes a
turn, in the order of the blocks. Neighbouring messages of one role are one turn, as Anthropic has it.
"""

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from headwater.actors.edge.apis.anthropic_types import (
    Base64Source,
    Block,
    DocumentBlock,
    FileSource,
    ImageBlock,
    InputMessage,
    MessagesRequest,
    PlainTextSource,
    PromptFields,
    RedactedThinkingBlock,
    SearchResultBlock,
    SystemBlock,
    TextBlock,
    ThinkingBlock,
    ThinkingConfig,
    ToolChoiceField,
    ToolDefinition,
    ToolName,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
    UrlSource,
)
from headwater.actors.edge.apis.chat_types import checked_stops
from headwater.actors.edge.prompt.guides import json_schema_guide
from headwater.actors.edge.prompt.request import (
    ANTHROPIC,
    TEXT_SEPARATOR,
    GenerationRequest,
    Hints,
    MediaPart,
    Part,
    PromptOptions,
    Reasoning,
    Role,
    SamplingFields,
    TextPart,
    Tool,
    ToolCall,
    ToolChoice,
    Turn,
    hosted_name,
    joined_texts,
)
from headwater.actors.http.errors import ApiError, bad_field, bad_request

BILLING_PREFIX: Final = "x-anthropic-billing-header"
"""Claude Code's first system block: it differs in every request, and would keep all others from sharing a prefix."""

IMAGE_TYPES: Final = ("image/jpeg", "image/png", "image/gif", "image/webp")
DOCUMENT_TYPES: Final = ("application/pdf",)
ERROR_PREFIX: Final = "Error: "

Content = TextBlock | ImageBlock | DocumentBlock | SearchResultBlock


def turns_of(
    system: str | list[SystemBlock] | None,
    messages: Sequence[InputMessage],
) -> tuple[Turn, ...]:
    """All turns; there is at least one message. Raises `ApiError` 400 naming the block."""
    names: dict[str, str] = {}
    turns: list[Turn] = []
    text = _system_text(system)
    if text:
        turns.append(Turn(role="system", parts=(TextPart(text),)))
    for number, message in enumerate(messages):
        for turn in _of_message(message, f"messages[{number}].content", names):
            _append(turns, turn)
    if turns[-1].calls:
        raise bad_request(
            "Each tool_use block needs a tool_result block in the next message.",
            param=f"messages[{len(messages) - 1}].content",
        )
    return tuple(turns)


def _system_text(system: str | list[SystemBlock] | None) -> str:
    texts = [system] if isinstance(system, str) else [block.text for block in system or []]
    # Without a first line that differs in every request.
    texts = [text.partition("\n")[2] if text.startswith(BILLING_PREFIX) else text for text in texts]
    return TEXT_SEPARATOR.join(filter(None, texts))


def _append(turns: list[Turn], turn: Turn) -> None:
    last = turns[-1] if turns else None
    if last is None or last.role != turn.role or turn.role not in ("user", "assistant") or last.calls:
        turns.append(turn)
        return
    turns[-1] = msgspec.structs.replace(
        last,
        parts=joined_texts([*last.parts, *turn.parts]),
        calls=turn.calls,
        reasoning=TEXT_SEPARATOR.join(filter(None, (last.reasoning, turn.reasoning))),
    )


def _of_message(message: InputMessage, param: str, names: dict[str, str]) -> Iterator[Turn]:
    if isinstance(message.content, str):
        yield Turn(role=message.role, parts=(TextPart(message.content),))
    elif message.role == "assistant":
        yield _assistant(message.content, param, names)
    else:
        yield from _given(message.role, message.content, param, names)


def _assistant(blocks: Sequence[Block], param: str, names: dict[str, str]) -> Turn:
    parts: list[Part] = []
    calls: list[ToolCall] = []
    thoughts: list[str] = []
    for number, block in enumerate(blocks):
        if isinstance(block, TextBlock):
            parts.append(TextPart(block.text))
        elif isinstance(block, ThinkingBlock):
            thoughts.append(block.thinking)
        elif isinstance(block, ToolUseBlock):
            # A model may write the same id again: a result belongs to the last call that has it.
            names[block.id] = block.name
            calls.append(ToolCall(block.id, block.name, msgspec.json.encode(block.input).decode()))
        elif not isinstance(block, RedactedThinkingBlock):
            raise _misplaced(block, f"{param}[{number}]", "user")
    return Turn(
        role="assistant",
        parts=joined_texts(parts),
        calls=tuple(calls),
        reasoning=TEXT_SEPARATOR.join(filter(None, thoughts)),
    )


def _given(role: Role, blocks: Sequence[Block], param: str, names: dict[str, str]) -> Iterator[Turn]:
    """Turns of what the client gives: tool results, and between them what the user says."""
    parts: list[Part] = []
    for number, block in enumerate(blocks):
        block_param = f"{param}[{number}]"
        if isinstance(block, ToolResultBlock) and role == "user":
            if parts:
                yield Turn(role=role, parts=joined_texts(parts))
                parts = []
            yield _tool_result(block, block_param, names)
        elif isinstance(block, TextBlock | ImageBlock | DocumentBlock | SearchResultBlock):
            parts += _parts(block, block_param)
        else:
            raise _misplaced(block, block_param, "assistant" if role == "user" else "user")
    if parts or not blocks:
        yield Turn(role=role, parts=joined_texts(parts))


def _tool_result(block: ToolResultBlock, param: str, names: dict[str, str]) -> Turn:
    name = names.get(block.tool_use_id)
    if name is None:
        raise bad_field(
            f"{param}.tool_use_id",
            f"{block.tool_use_id!r} is not the id of a tool_use block in an earlier message.",
        )
    content = [TextBlock(block.content)] if isinstance(block.content, str) else block.content or []
    parts = [
        part
        for number, element in enumerate(content)
        for part in (
            [TextPart(f"The tool {element.tool_name} is available.")]
            if isinstance(element, ToolReferenceBlock)
            else _parts(element, f"{param}.content[{number}]")
        )
    ]
    if block.is_error:
        parts = [TextPart(ERROR_PREFIX), *parts]
        if len(parts) > 1 and isinstance(parts[1], TextPart):
            parts[:2] = [TextPart(ERROR_PREFIX + parts[1].text)]
    return Turn(role="tool", parts=joined_texts(parts), name=name, call_id=block.tool_use_id)


def _parts(block: Content, param: str) -> list[Part]:
    """A block's parts: what its client says about a document precedes it."""
    part = _part(block, param)
    if isinstance(block, DocumentBlock) and isinstance(part, MediaPart) and block.context:
        return [TextPart(block.context), part]
    return [part]


def _part(block: Content, param: str) -> Part:
    if isinstance(block, TextBlock):
        return TextPart(block.text)
    if isinstance(block, ImageBlock):
        return _media(block, param)
    if isinstance(block, SearchResultBlock):
        texts = (text.text for text in block.content)
        return TextPart(TEXT_SEPARATOR.join((block.title, block.source, *texts)))
    if isinstance(block.source, PlainTextSource):
        return TextPart(TEXT_SEPARATOR.join(filter(None, (block.title, block.context, block.source.data))))
    return _media(block, param)


def _media(block: ImageBlock | DocumentBlock, param: str) -> MediaPart:
    """An image or a file, its source checked."""
    kind, types = ("image", IMAGE_TYPES) if isinstance(block, ImageBlock) else ("file", DOCUMENT_TYPES)
    source, source_param = block.source, f"{param}.source"
    name = (block.title or "") if isinstance(block, DocumentBlock) else ""
    part = MediaPart("image" if kind == "image" else "file", param, name=name)
    if isinstance(source, UrlSource):
        if not source.url.startswith(("https://", "http://")):
            raise bad_field(f"{source_param}.url", "must be an http or https URL.")
        return msgspec.structs.replace(part, url=source.url)
    if isinstance(source, FileSource):
        return msgspec.structs.replace(part, file_id=source.file_id)
    assert isinstance(source, Base64Source), "plain text is not media"
    if source.media_type not in types:
        raise bad_field(f"{source_param}.media_type", f"must be {' or '.join(types)}.")
    if not source.data:
        raise bad_field(f"{source_param}.data", "must have base64.")
    # The media intake decodes it, in a process of its own.
    return msgspec.structs.replace(part, data=source.data, media_type=source.media_type)


def _misplaced(block: Block, param: str, role: Role) -> ApiError:
    kind = type(block).__struct_config__.tag
    return bad_field(param, f"of type {kind} belongs in a message of role {role}.")


def found_tools(messages: Sequence[InputMessage]) -> frozenset[str]:
    """Names of the tools that searches of the client have found."""
    results = (
        block.content
        for message in messages
        if not isinstance(message.content, str)
        for block in message.content
        if isinstance(block, ToolResultBlock) and isinstance(block.content, list)
    )
    return frozenset(
        element.tool_name
        for content in results
        for element in content
        if isinstance(element, ToolReferenceBlock)
    )


# Whole requests: prompts, tools, reasoning and guides.

ID_PREFIX: Final = "msg_"
FORMAT_PARAM: Final = "output_config.format.schema"


def to_generation(request: MessagesRequest, id_: str = "") -> GenerationRequest:
    """Return what a message request asks for; the message's id ends with `id_`. Raises `ApiError` 400 naming the field."""
    prompt = to_prompt(request)
    return msgspec.structs.replace(
        prompt,
        id=id_,
        sampling=SamplingFields(
            temperature=request.temperature, top_p=request.top_p, top_k=request.top_k or None
        ),
        max_tokens=request.max_tokens,
        stops=checked_stops(request.stop_sequences, "stop sequence", "stop_sequences"),
        stream=bool(request.stream),
        hints=Hints(
            user=request.metadata.user_id if request.metadata else None, cache_salt=request.cache_salt or ""
        ),
    )


def to_prompt(request: PromptFields) -> GenerationRequest:
    """The part of a request that becomes its prompt, for counting. Raises `ApiError` 400 naming the field."""
    tools = _tools(request.tools or [], found_tools(request.messages))
    turns = turns_of(request.system, request.messages)
    output = request.output_config
    guide = json_schema_guide(output.format.schema, FORMAT_PARAM) if output and output.format else None
    continues = turns[-1].role == "assistant"
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
        prompt_options=PromptOptions(add_generation_prompt=not continues, continue_final=continues),
        guide=guide,
        guide_param=FORMAT_PARAM if guide else "",
    )


def _tools(definitions: Sequence[ToolDefinition], found_names: frozenset[str]) -> tuple[Tool, ...]:
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
            raise bad_field(f"{param}.name", f"{tool.name!r} occurs twice; names are unique.")
        names.add(tool.name)
        if tool.defer_loading and not searched and tool.name not in found_names:
            continue
        tools.append(Tool(tool.name, tool.description or "", tool.input_schema or {}, bool(tool.strict)))
    return tuple(tools)


def _check_tool(tool: ToolDefinition, param: str) -> None:
    if tool.type not in (None, "custom"):
        raise bad_field(
            f"{param}.type",
            f"{tool.type[:64]!r} is not known here; send tools of type custom and run them in the client.",
        )
    try:
        msgspec.convert(tool.name, ToolName)
    except msgspec.ValidationError as error:
        raise bad_field(f"{param}.name", "has 1 to 128 letters, digits, underscores and dashes.") from error
    if tool.input_schema is None or tool.input_schema.get("type") != "object":
        raise bad_field(f"{param}.input_schema", "must be a JSON schema of type object.")
    if tool.allowed_callers is not None and "direct" not in tool.allowed_callers:
        raise bad_field(f"{param}.allowed_callers", "must contain direct: nothing else calls tools here.")


def _tool_choice(choice: ToolChoiceField | None, tools: Sequence[Tool]) -> ToolChoice:
    if choice is None:
        return ToolChoice()
    parallel = not choice.disable_parallel_tool_use
    if choice.type in ("any", "tool") and not tools:
        raise bad_field("tool_choice", "may be specified only with tools.")
    if choice.type == "tool":
        if choice.name not in {tool.name for tool in tools}:
            raise bad_field("tool_choice.name", f"{(choice.name or '')[:128]!r} is none of the tools.")
        return ToolChoice("named", choice.name or "", parallel)
    if choice.type == "any":
        return ToolChoice("required", "", parallel)
    return ToolChoice("auto" if choice.type == "auto" else "none", "", parallel)


def _reasoning(thinking: ThinkingConfig | None, effort: str | None) -> Reasoning:
    if thinking is None:
        return Reasoning(effort=effort)
    if thinking.type == "enabled":
        if thinking.budget_tokens is None:
            raise bad_field("thinking.budget_tokens", "is required when thinking is enabled.")
        return Reasoning(effort=effort, enabled=True, budget=thinking.budget_tokens)
    return Reasoning(effort=effort, enabled=thinking.type == "adaptive")
