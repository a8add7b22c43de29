"""POST /v1/chat/completions and /v1/completions, and the translation of their requests into the internal request, which is pure.

Also POST /tokenize and /detokenize, in vLLM's format, which read the same messages and texts.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, Final

import msgspec

from headwater.actors.edge.answer.run import Generator
from headwater.actors.edge.apis.chat_encoder import (
    CHAT_PREFIX,
    COMPLETION_PREFIX,
    ChatEncoder,
    CompletionEncoder,
    shown_in_chat,
    shown_in_completion,
)
from headwater.actors.edge.apis.chat_types import (
    MESSAGES_MAX,
    TOOLS_MAX,
    ChatMessage,
    ChatRequest,
    ChatTool,
    CompletionCommon,
    CompletionRequest,
    ContentPart,
    MessageCall,
    TokenId,
    refuse_template,
)
from headwater.actors.edge.prompt.media import audio_media, data_media, file_media, url_media
from headwater.actors.edge.prompt.prompts import load_chat, text_prompts, tokens_of
from headwater.actors.edge.prompt.request import (
    OPENAI,
    GenerationRequest,
    Hints,
    MediaPart,
    Part,
    PromptOptions,
    Reasoning,
    SamplingFields,
    TextPart,
    Tool,
    ToolCall,
    ToolChoice,
    Turn,
    hosted_name,
    joined_texts,
)
from headwater.actors.edge.saga.http_call import Call, Serving
from headwater.actors.http.body import decode_body
from headwater.actors.http.errors import ApiError, bad_field, bad_request


def turns_of(messages: Sequence[ChatMessage], param: str = "messages") -> tuple[Turn, ...]:
    """The conversation in the field `param`. Raises `ApiError` 400 naming the message or part."""
    return tuple([_turn(message, f"{param}[{number}]") for number, message in enumerate(messages)])


def _turn(message: ChatMessage, param: str) -> Turn:
    content = message.content if message.content is not None else message.refusal
    return Turn(
        role=message.role,
        parts=_parts(content, f"{param}.content"),
        name=message.name or "",
        calls=tuple(
            [
                _call(call, f"{param}.tool_calls[{number}]")
                for number, call in enumerate(message.tool_calls or ())
            ]
        ),
        call_id=message.tool_call_id or "",
        reasoning=message.reasoning_content or message.reasoning or "",
    )


def _call(call: MessageCall, param: str) -> ToolCall:
    if call.type != "function":
        raise bad_field(f"{param}.type", f"is {call.type[:64]!r}; calls are of functions.")
    return ToolCall(call.id, call.function.name, call.function.arguments)


def _parts(content: str | list[ContentPart] | None, param: str) -> tuple[Part, ...]:
    if content is None:
        return ()
    if isinstance(content, str):
        return (TextPart(content),)
    return joined_texts(_part(part, f"{param}[{number}]") for number, part in enumerate(content))


def _part(part: ContentPart, param: str) -> Part:
    if part.type in ("text", "refusal"):
        text = part.text if part.type == "text" else part.refusal
        if text is None:
            raise bad_field(f"{param}.{part.type}", "is missing.")
        return TextPart(text)
    read = _MEDIA.get(part.type)
    if read is None:
        part_types = ", ".join(["text", *_MEDIA])
        raise bad_field(f"{param}.type", f"is {part.type[:64]!r}; it is one of {part_types}.")
    return read(getattr(part, part.type), f"{param}.{part.type}")


def _image(value: Any, param: str) -> MediaPart:
    image_url = {"url": value} if isinstance(value, str) else _object(value, param)
    detail = image_url.get("detail") or ""
    if detail not in ("", "auto", "low", "high", "original"):
        raise bad_field(f"{param}.detail", "is auto, low, high or original.")
    return url_media("image", image_url.get("url"), param, detail=detail)


def _file(value: Any, param: str) -> MediaPart:
    file = _object(value, param)
    return file_media(
        param, name=file.get("filename"), data=file.get("file_data"), file_id=file.get("file_id")
    )


def _object(value: Any, param: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise bad_field(param, "must be an object.")
    return value


_MEDIA: Final[dict[str, Callable[[Any, str], MediaPart]]] = {
    "image_url": _image,
    "image_embeds": lambda value, param: data_media("embedding", value, param, media_type=""),
    "input_audio": lambda value, param: audio_media(_object(value, param), param),
    "audio_url": lambda value, param: url_media("audio", _object(value, param).get("url"), param),
    "video_url": lambda value, param: url_media("video", _object(value, param).get("url"), param),
    "file": _file,
}


# Tools and tool choices.

_CHOICES: Final = (
    'tool_choice is "none", "auto", "required", {"type": "function", "function": {"name": NAME}}, or'
    ' {"type": "allowed_tools", "allowed_tools": {"mode": "auto" or "required", "tools": [...]}}.'
)


def tools_of(tools: Sequence[ChatTool]) -> tuple[Tool, ...]:
    """The functions on offer, without tools that OpenAI hosts. Raises `ApiError` 400 naming the tool."""
    by_name: dict[str, Tool] = {}
    for number, tool in enumerate(tools):
        param = f"tools[{number}]"
        if hosted_name(tool, OPENAI):
            continue
        if tool.type != "function":
            raise bad_field(f"{param}.type", f"is {tool.type[:64]!r}; this model's tools are functions.")
        function = tool.function
        if function is None:
            raise bad_field(f"{param}.function", "is missing.")
        if function.name in by_name:
            raise bad_request(f"Two tools are named {function.name!r}.", param=f"{param}.function.name")
        by_name[function.name] = Tool(
            function.name, function.description or "", function.parameters or {}, bool(function.strict)
        )
    return tuple(by_name.values())


def choice_of(value: Any, tools: tuple[Tool, ...], *, parallel: bool) -> tuple[ToolChoice, tuple[Tool, ...]]:
    """The tool choice, and the tools that it allows. Raises `ApiError` 400."""
    if value is None or value in ("auto", "none", "required"):
        if value == "required" and not tools:
            raise bad_field("tool_choice", "is required, but there are no tools.")
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
    named_tools = []
    for name in names:
        if name not in by_name:
            raise bad_field("tool_choice", f"names {name[:64]!r}, which is not among the tools.")
        named_tools.append(by_name[name])
    return tuple(named_tools)


def _unknown() -> ApiError:
    return bad_request(_CHOICES, param="tool_choice")


# Whole requests.

DEFAULT_COMPLETION_TOKENS: Final = 16
"""What /v1/completions generates when the client sets no limit, as OpenAI does."""


def chat_request(request: ChatRequest) -> GenerationRequest:
    """A chat completion. Raises `ApiError` 400."""
    newer = request.max_completion_tokens
    offered = request.tools or ()
    choice, tools = choice_of(
        request.tool_choice, tools_of(offered), parallel=request.parallel_tool_calls is not False
    )
    variables = dict(request.chat_template_kwargs or {})
    if request.documents:
        variables["documents"] = request.documents
    return GenerationRequest(
        param="messages",
        endpoint="chat",
        id_prefix=CHAT_PREFIX,
        messages=turns_of(request.messages),
        tools=tools,
        omitted_tools=tuple([name for tool in offered if (name := hosted_name(tool, OPENAI))]),
        tool_choice=choice,
        reasoning=_reasoning(request),
        best_of=request.n or 1,
        sampling=_sampling(request, request.logprob_count()),
        max_tokens=newer or request.max_tokens,
        max_tokens_param="max_completion_tokens" if newer else "max_tokens",
        logprobs_param="top_logprobs",
        prompt_options=PromptOptions(
            add_special_tokens=request.add_special_tokens,
            add_generation_prompt=request.add_generation_prompt is not False,
            continue_final=bool(request.continue_final_message),
            truncate_tokens=request.truncate_prompt_tokens,
            truncate_end=request.truncation_side == "right",
            variables=variables,
        ),
        **_common(request),
    )


def completion_request(request: CompletionRequest) -> GenerationRequest:
    """A text completion. Raises `ApiError` 400."""
    limit = DEFAULT_COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
    if not limit and not request.echo:
        raise bad_field("max_tokens", "0 is possible with echo only.")
    return GenerationRequest(
        param="prompt",
        endpoint="completions",
        id_prefix=COMPLETION_PREFIX,
        prompts=tuple(request.prompts()),
        suffix=request.suffix or "",
        echo=bool(request.echo),
        best_of=_best_of(request),
        sampling=_sampling(request, request.logprobs),
        max_tokens=limit,
        prompt_options=PromptOptions(
            add_special_tokens=request.add_special_tokens,
            truncate_tokens=request.truncate_prompt_tokens,
            truncate_end=request.truncation_side == "right",
        ),
        raw_answer=True,
        **_common(request),
    )


def _best_of(request: CompletionRequest) -> int:
    choices = request.n or 1
    best_of = request.best_of or choices
    if best_of < choices:
        raise bad_field("best_of", f"is {best_of}, less than n, which is {choices}.")
    if best_of > choices and request.stream:
        raise bad_field("best_of", "above n cannot be streamed.")
    return best_of


def _reasoning(request: ChatRequest) -> Reasoning:
    thinking, enabled, budget = request.thinking, request.enable_thinking, request.thinking_token_budget
    if thinking is not None:
        if enabled is None and thinking.type != "auto":
            enabled = thinking.type == "enabled"
        budget = thinking.budget_tokens if budget is None else budget
    param = "thinking_token_budget" if request.thinking_token_budget is not None else ""
    return Reasoning(request.reasoning_effort, enabled, budget, param)


def _common(request: CompletionCommon) -> dict[str, Any]:
    guided = request.guide()
    return {
        "model": request.model,
        "choices": request.n or 1,
        "stops": request.stops(),
        "guide": guided[1] if guided else None,
        "guide_param": guided[0] if guided else "",
        "stream": bool(request.stream),
        "return_token_ids": bool(request.return_token_ids),
        "include_stop": bool(request.include_stop_str_in_output),
        "skip_special_tokens": request.skip_special_tokens is not False,
        "hints": Hints(
            user=request.user,
            session=request.prompt_cache_key,
            priority=request.priority,
            cache_salt=request.cache_salt or "",
        ),
    }


def _sampling(request: CompletionCommon, logprobs: int | None) -> SamplingFields:
    return SamplingFields(
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        min_p=request.min_p,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        repetition_penalty=request.repetition_penalty,
        seed=request.seed,
        min_tokens=request.min_tokens,
        ignore_eos=bool(request.ignore_eos),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        logit_bias=request.bias(),
        allowed_token_ids=tuple(request.allowed_token_ids or ()),
        bad_words=tuple(request.bad_words or ()),
        logprobs=logprobs,
        prompt_logprobs=request.prompt_logprobs,
        processors=request.logits_processors,
    )


# The endpoints.


class OpenAiApi:
    """The endpoints that generate, in OpenAI's format."""

    def __init__(self, serving: Serving, generator: Generator) -> None:
        self._serving = serving
        self._generator = generator

    async def chat(self, call: Call) -> None:
        """POST /v1/chat/completions."""
        request = decode_body(ChatRequest, call.body)
        serving = self._serving
        serving.fields.check(request, request.logits_processors)
        model = serving.model(request.model, call)
        encoder = ChatEncoder(model.tokenizer, shown_in_chat(request, serving.settings.reasoning_field))
        await self._generator.run(chat_request(request), encoder, call)

    async def complete(self, call: Call) -> None:
        """POST /v1/completions."""
        request = decode_body(CompletionRequest, call.body)
        serving = self._serving
        serving.fields.check(request, request.logits_processors)
        model = serving.model(request.model, call)
        encoder = CompletionEncoder(model.tokenizer, shown_in_completion(request))
        await self._generator.run(completion_request(request), encoder, call)


# Tokens of texts and messages.

TOKENS_MAX = 1_000_000


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /tokenize: of a text, or of a conversation as the model's chat template renders it."""

    model: str
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], msgspec.Meta(min_length=1, max_length=MESSAGES_MAX)] | None = None
    tools: Annotated[list[ChatTool], msgspec.Meta(max_length=TOOLS_MAX)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    model: str
    tokens: Annotated[list[TokenId], msgspec.Meta(max_length=TOKENS_MAX)]


class TokensApi:
    """The endpoints that count and translate tokens. No engine takes part."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def tokenize(self, call: Call) -> None:
        """POST /tokenize."""
        request = decode_body(TokenizeRequest, call.body)
        if (request.prompt is None) == (request.messages is None):
            raise bad_request("Send one of prompt and messages.", param="prompt")
        model = self._serving.model(request.model, call)
        call.quota.enter(model.card.name)
        context = call.context(model)
        prompt = _prompt_of(request)
        if prompt.messages:
            special = self._serving.settings.allow_special_tokens_in_text
            intake = self._serving.intake_of(call)
            chat = await load_chat(prompt, model, context, intake, special_tokens_in_text=special)
            tokens = chat.tokens
        else:
            [tokens] = await text_prompts(prompt, model, context)
        ids = tokens.tolist()
        texts = [model.tokenizer.text_of(token) for token in ids] if request.return_token_strs else None
        await call.answer({"count": len(ids), "max_model_len": context, "tokens": ids, "token_strs": texts})

    async def detokenize(self, call: Call) -> None:
        """POST /detokenize. Special tokens are spelled out."""
        request = decode_body(DetokenizeRequest, call.body)
        model = self._serving.model(request.model, call)
        call.quota.enter(model.card.name)
        await tokens_of(model, request.tokens, "tokens")
        text = model.tokenizer.reference.decode(request.tokens, skip_special_tokens=False)
        await call.answer({"prompt": text})


def _prompt_of(request: TokenizeRequest) -> GenerationRequest:
    refuse_template(request.chat_template_kwargs)
    return GenerationRequest(
        model=request.model,
        param="prompt" if request.messages is None else "messages",
        messages=turns_of(request.messages or ()),
        prompts=(request.prompt,) if request.prompt is not None else (),
        tools=tools_of(request.tools or ()),
        prompt_options=PromptOptions(
            add_special_tokens=request.add_special_tokens,
            add_generation_prompt=request.add_generation_prompt is not False,
            continue_final=bool(request.continue_final_message),
            variables=request.chat_template_kwargs or {},
        ),
    )
