"""Messages and texts to prompt tokens."""

from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np

from headwater.actors.edge.generation.request import GenerationRequest, MediaPart, TextPart, ToolCall, Turn
from headwater.actors.edge.model.catalog import Model
from headwater.actors.edge.model.chat_template import LiteralText
from headwater.actors.http.errors import ApiError, bad_request
from headwater.schemas.hashing import U32


async def prompts_of(
    request: GenerationRequest, model: Model, context: int, *, special_tokens_in_text: bool = False
) -> list[U32]:
    """The prompts of a request as token ids; each has at least one. Raises `ApiError` 400.

    `context`: tokens that this client may use. What cannot fit is refused before it is tokenized.
    """
    if request.messages:
        prompts = [await _of_messages(request, model, context, special_tokens_in_text)]
    else:
        special = request.prompt_options.add_special_tokens is not False
        for entry in request.prompts:
            _check_length(model, context, entry, request.param)
        prompts = [await tokens_of(model, entry, request.param, special=special) for entry in request.prompts]
    if not all(len(prompt) for prompt in prompts):
        raise bad_request("The prompt has no tokens.", param=request.param)
    return prompts


async def tokens_of(model: Model, entry: str | list[int], param: str, *, special: bool = True) -> U32:
    """Tokens of a text, or a list of token ids checked against the vocabulary. Raises `ApiError` 400 naming `param`."""
    if isinstance(entry, str):
        return await model.tokenizer.encode(entry, add_special_tokens=special)
    vocabulary = model.tokenizer.vocabulary
    try:
        tokens = np.array(entry, np.int64)
        outside = np.flatnonzero((tokens < 0) | (tokens >= vocabulary))
        bad = int(tokens[outside[0]]) if len(outside) else None
    except OverflowError:
        bad = next(token for token in entry if not 0 <= token < vocabulary)
    if bad is not None:
        raise bad_request(f"Token id {bad} is outside the vocabulary of {vocabulary}.", param=param)
    return tokens.astype(np.uint32)


async def _of_messages(
    request: GenerationRequest, model: Model, context: int, special_tokens_in_text: bool
) -> U32:
    if model.template is None:
        raise bad_request(f"{request.model} has no chat template; use /v1/completions.", param="model")
    _refuse_media(request.messages, model)
    _check_length(model, context, request.messages, request.param)
    messages = [template_message(turn) for turn in request.messages]
    literal = LiteralText(model.tokenizer)
    if not special_tokens_in_text:
        literal.mark_spellings(messages)
    options = request.prompt_options
    text = model.template.render(
        messages, add_generation_prompt=options.add_generation_prompt, variables=options.variables
    )
    _check_length(model, context, text, request.param)
    return await literal.encode(text, add_special_tokens=bool(options.add_special_tokens))


def template_message(turn: Turn) -> dict[str, Any]:
    """A turn as chat templates expect it: plain JSON types, and a call's arguments as an object."""
    content = turn.text() if turn.parts or not turn.calls else None
    message: dict[str, Any] = {"role": turn.role, "content": content}
    if turn.name:
        message["name"] = turn.name
    if turn.call_id:
        message["tool_call_id"] = turn.call_id
    if turn.calls:
        message["tool_calls"] = [_template_call(call) for call in turn.calls]
    return message


def _template_call(call: ToolCall) -> dict[str, Any]:
    try:
        arguments = msgspec.json.decode(call.arguments) if call.arguments else {}
    except (msgspec.DecodeError, RecursionError):
        arguments = call.arguments
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _refuse_media(messages: Iterable[Turn], model: Model) -> None:
    for turn in messages:
        for part in turn.parts:
            if isinstance(part, MediaPart):
                raise bad_request(
                    f"{model.card.name} takes text only; {part.param} is of kind {part.kind}.",
                    param=part.param,
                )


def _check_length(model: Model, context: int, given: str | list[int] | tuple[Turn, ...], param: str) -> None:
    """Refuse what cannot fit the context before it is tokenized. Raises `ApiError` 400."""
    if isinstance(given, list):
        if len(given) > context:
            raise too_long(model, context, f"{len(given)} tokens", param)
        return
    texts = [given] if isinstance(given, str) else _texts(given)
    size = sum(len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass")) for text in texts)
    if size > context * model.tokenizer.token_bytes_max:
        raise too_long(model, context, f"{size} bytes of text", param)


def _texts(turns: Iterable[Turn]) -> Iterable[str]:
    return (part.text for turn in turns for part in turn.parts if isinstance(part, TextPart))


def too_long(model: Model, context: int, has: str, param: str) -> ApiError:
    """400: the request does not fit the context, the model's or that of its client."""
    whose = (
        "This model's context is" if context == model.card.context_length else "Your context is limited to"
    )
    return bad_request(
        f"{whose} {context} tokens; the request has {has}.",
        param=param,
        code="context_length_exceeded",
    )
