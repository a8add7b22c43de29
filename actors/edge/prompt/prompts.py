"""Translation of messages and texts into prompt tokens, and the format in which the answer is read.

`tool_choice` "required" and a named tool are enforced by structured output: the whole answer is JSON then, whatever
format the model would write calls in.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from headwater.actors.edge.catalog import Model
from headwater.actors.edge.chat_template import ChatTemplate, LiteralText, fill_in_middle
from headwater.actors.edge.parsing.formats import REASONING_FORMATS, TOOL_FORMATS
from headwater.actors.edge.parsing.grammar import OutputParser
from headwater.actors.edge.parsing.regions import forced_schema
from headwater.actors.edge.parsing.response_template import ResponseTemplate
from headwater.actors.edge.parsing.selection import RESPONSE_TEMPLATE, make_parser, starts_in_reasoning
from headwater.actors.edge.prompt.conversation import (
    template_messages,
    template_variables,
    tools_as_text,
)
from headwater.actors.edge.prompt.guides import check_schema
from headwater.actors.edge.prompt.media import (
    NO_MEDIA,
    LoadedMedia,
    given_of,
    load_media,
    prompt_shape,
    shown_as,
    with_texts_of_files,
)
from headwater.actors.edge.prompt.request import GenerationRequest, MediaPart, TextPart, Tool, Turn
from headwater.actors.edge.template_form import described
from headwater.actors.http.errors import ApiError, bad_field, bad_request
from headwater.actors.media.intake import MediaFetcher
from headwater.actors.media.item import ID_BYTES, MediaItem
from headwater.schemas.hashing import U32
from headwater.schemas.inference import Guide
from headwater.schemas.media import ONE, SEVERAL, PromptMedia, PromptMediaKind
from headwater.schemas.tables import ModelCard


def expand_placeholders(
    tokens: U32, loaded: LoadedMedia, model: Model, param: str
) -> tuple[U32, tuple[PromptMedia, ...]]:
    """The prompt with each item's placeholder token repeated, and where each item is. Raises `ApiError` 400."""
    placeholders = model.card.media.placeholders
    if not loaded.items and not any((tokens == token).any() for token in placeholders.values()):
        return tokens, ()
    is_place = np.zeros(len(tokens), np.bool_)
    for token in placeholders.values():
        is_place |= tokens == token
    places = np.flatnonzero(is_place)
    kinds = [shown_as(item.kind) for item in loaded.items]
    if tokens[places].tolist() != [placeholders[kind] for kind in kinds]:
        raise _unmatched(tokens[places].tolist(), loaded, placeholders, param)
    repeats = np.ones(len(tokens), np.int64)
    repeats[places] = loaded.tokens
    starts = (np.cumsum(repeats) - repeats)[places].tolist()
    media = tuple(
        PromptMedia(
            kind,
            item.id,
            start,
            count,
            prompt_shape(item, model.card),
            given=given_of(item) if item.kind == "embedding" else None,
        )
        for kind, item, start, count in zip(kinds, loaded.items, starts, loaded.tokens, strict=True)
    )
    return np.repeat(tokens, repeats).astype(np.uint32, copy=False), media


def of_tenant(media: Sequence[PromptMedia], salt: str) -> tuple[PromptMedia, ...]:
    """The media under ids that tenants with other salts cannot have.

    Blocks are kept apart by the salt of their hashes, but engines and workers also keep media and embeddings by their ids alone: how soon
    an answer begins would reveal that another tenant has sent the same.
    """
    key = blake2b(salt.encode(), digest_size=ID_BYTES, person=b"headwater-tenant").digest()
    return tuple(
        msgspec.structs.replace(item, id=blake2b(item.id.encode(), digest_size=ID_BYTES, key=key).hexdigest())
        for item in media
    )


def _unmatched(
    placeholder_tokens: Sequence[int],
    loaded: LoadedMedia,
    placeholders: dict[PromptMediaKind, int],
    param: str,
) -> ApiError:
    places, items = Counter(placeholder_tokens), Counter[str](shown_as(item.kind) for item in loaded.items)
    for kind, token in placeholders.items():
        count = items[kind]
        if places[token] == count:
            continue
        if not count:
            return bad_request(
                f"The prompt spells the token that stands for {ONE[kind]}, without {ONE[kind]}.", param=param
            )
        return bad_request(
            f"The model's chat template made {places[token]} places for {count} {SEVERAL[kind]}; it does not take "
            f"{SEVERAL[kind]} here.",
            param=param,
        )
    return bad_request("The model's chat template puts media in another order than the request.", param=param)


# The format of the answer: plain text, or a parser that finds reasoning and tool calls. Pure.


class AnswerFormat(NamedTuple):
    """The formats of tool calls and reasoning ("" for none), the tools on offer, and whether several calls are wanted.

    `guide` enforces a tool choice. `response_template` is the model's own description of its answers, if it has one.
    """

    tool_format: str = ""
    reasoning_format: str = ""
    tools: tuple[dict[str, Any], ...] = ()
    parallel: bool = True
    guide: Guide | None = None
    starts_in_reasoning: bool = False
    response_template: ResponseTemplate | None = None

    @property
    def is_plain(self) -> bool:
        """Return whether the answer is text and nothing else."""
        return not self.tool_format and not self.reasoning_format

    def after(self, prompt: str, *, guided: bool = False) -> "AnswerFormat":
        """The same for an answer that follows this rendered prompt. `guided`: it conforms to a guide from its first token on.

        Such an answer is no reasoning, also where the prompt opens some, or the model always begins with it.
        """
        if not self.reasoning_format or guided:
            return self
        inside = starts_in_reasoning(self.reasoning_format, prompt, self.response_template)
        return self._replace(starts_in_reasoning=inside)

    def parser(self) -> OutputParser:
        """A parser for one answer."""
        return make_parser(
            self.tool_format,
            self.reasoning_format,
            tools=self.tools,
            starts_in_reasoning=self.starts_in_reasoning,
            response_template=self.response_template,
        )


PLAIN = AnswerFormat()


def answer_format(
    request: GenerationRequest, card: ModelCard, response_template: ResponseTemplate | None = None
) -> AnswerFormat:
    """Return how the answer is read. Raises `ApiError` 400 for a tool choice that this model cannot serve."""
    if request.raw_answer or not request.messages:
        return PLAIN
    template_formats = {RESPONSE_TEMPLATE} if response_template is not None else set()
    reasoning = (
        card.reasoning_parser if card.reasoning_parser in REASONING_FORMATS.keys() | template_formats else ""
    )
    choice = request.tool_choice
    tools = tuple(tool_definition(tool) for tool in request.tools)
    if choice.mode in ("required", "named"):
        named = choice.name if choice.mode == "named" else ""
        if named:
            tools = tuple(tool for tool in tools if tool["function"]["name"] == named)
        return AnswerFormat(
            "forced_call" if named else "forced_calls",
            tools=tools,
            parallel=choice.parallel,
            guide=_guide(request, named),
        )
    if not tools or choice.mode == "none":
        return AnswerFormat(reasoning_format=reasoning, response_template=response_template)
    if card.tool_parser not in TOOL_FORMATS.keys() | template_formats:
        raise bad_request(
            f"The format in which {card.name} writes tool calls is not known, so tool_choice auto is not supported for"
            " it; the operator sets --tool-parser on its workers. tool_choice required, or naming a tool, works"
            " without.",
            param="tools",
        )
    return AnswerFormat(
        card.tool_parser, reasoning, tools, choice.parallel, response_template=response_template
    )


def tool_definition(tool: Tool) -> dict[str, Any]:
    """A tool as chat templates and parsers expect it."""
    function: dict[str, Any] = {"name": tool.name, "description": tool.description}
    function["parameters"] = tool.parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def _guide(request: GenerationRequest, named: str) -> Guide:
    if not request.tools:
        raise bad_field("tool_choice", "asks for a call, but there are no tools.")
    for number, tool in enumerate(request.tools):
        if not named or tool.name == named:
            check_schema(tool.parameters, f"tools[{number}].function.parameters")
    definitions = [tool_definition(tool) for tool in request.tools]
    try:
        schema = forced_schema(definitions, named, request.tool_choice.parallel)
    except ValueError as error:
        raise bad_request(f"{error}.", param="tools") from error
    return Guide("json_schema", msgspec.json.encode(schema).decode())


# Prompts.

RENDERED_INLINE_MAX: Final = 65_536
"""Longer conversations, in characters, are rendered in a thread."""


async def text_prompts(request: GenerationRequest, model: Model, context: int) -> list[U32]:
    """Texts and lists of token ids as token ids. Raises `ApiError` 400.

    `context`: tokens that this client may use. What cannot fit is refused before it is tokenized.
    """
    for entry in request.prompts:
        if request.prompt_options.truncate_tokens is None:
            _check_length(model, context, entry, request.param)
    special = request.prompt_options.add_special_tokens is not False
    if request.suffix:
        encoded = [
            await _around(model, context, entry, request.suffix, special=special) for entry in request.prompts
        ]
    else:
        encoded = [await tokens_of(model, entry, request.param, special=special) for entry in request.prompts]
    for tokens in encoded:
        refuse_places(tokens, model, request.param)
    return encoded


def refuse_places(tokens: U32, model: Model, param: str) -> None:
    """Raises `ApiError` 400 for a prompt of text with a token that stands for an item of media: engines end on one without an item."""
    if takes_media(model):
        expand_placeholders(tokens, NO_MEDIA, model, param)


async def _around(model: Model, context: int, prefix: str | list[int], suffix: str, *, special: bool) -> U32:
    if not isinstance(prefix, str):
        raise bad_field("suffix", "needs a prompt that is text.")
    _check_length(model, context, suffix, "suffix")
    prompt = await fill_in_middle(model.tokenizer, prefix, suffix, special=special)
    if prompt is None:
        raise bad_field(
            "suffix",
            f"is not supported for {model.card.name}: its vocabulary has no tokens to fill in the middle.",
        )
    return prompt


def truncated(prompts: list[U32], request: GenerationRequest, context: int) -> list[U32]:
    """The prompts' last or first tokens, as many as the request keeps; -1: as many as leave room for the answer."""
    options = request.prompt_options
    keep = options.truncate_tokens
    if keep is None:
        return prompts
    if keep < 0:
        keep = context - max(1, request.max_tokens or 1)
    if not 0 < keep <= context:
        raise bad_field("truncate_prompt_tokens", f"must be from 1 to {context}, the context, or -1.")
    return [prompt[:keep] if options.truncate_end else prompt[-keep:] for prompt in prompts]


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


class ChatPrompt(NamedTuple):
    """A conversation as `text` and as token ids, and where its media, if `load_chat` has loaded them, are among these."""

    text: str
    tokens: U32
    media: tuple[PromptMedia, ...] = ()
    loaded: LoadedMedia = NO_MEDIA


async def chat_prompt(
    request: GenerationRequest,
    model: Model,
    context: int,
    loaded: LoadedMedia = NO_MEDIA,
    *,
    special_tokens_in_text: bool = False,
) -> ChatPrompt:
    """The rendered conversation, with its `loaded` media. `context` as in `text_prompts`. Raises `ApiError` 400."""
    template = model.template
    if template is None:
        raise bad_request(
            f"{request.model} has no chat template: use /v1/completions, or start its workers with --chat-template.",
            param="model",
        )
    is_limited = request.prompt_options.truncate_tokens is None
    texts = [part.text for turn in request.messages for part in turn.parts if isinstance(part, TextPart)]
    if is_limited:
        _check_texts(model, context, texts, request.param)
    # Of the tools and the template's variables, as JSON: texts that no message contains.
    given = (request.tools, request.prompt_options.variables)
    definitions = len(msgspec.json.encode(given)) if any(given) else 0
    if definitions > context * model.tokenizer.token_bytes_max:
        raise too_long(model, context, f"{definitions} bytes of tools", "tools")
    literal = LiteralText(model.tokenizer)
    size = definitions + sum(map(len, texts))
    arguments = request, template, literal, not special_tokens_in_text
    # A template may do anything with what it renders.
    text = render(*arguments) if size <= RENDERED_INLINE_MAX else await asyncio.to_thread(render, *arguments)
    if is_limited:
        _check_texts(model, context, [text], request.param)
    special = bool(request.prompt_options.add_special_tokens)
    tokens = await literal.encode(text, add_special_tokens=special)
    if not takes_media(model):
        return ChatPrompt(text, tokens)
    return ChatPrompt(text, *expand_placeholders(tokens, loaded, model, request.param))


async def load_chat(
    request: GenerationRequest,
    model: Model,
    context: int,
    intake: MediaFetcher | None,
    fetched: dict[MediaPart, MediaItem] | None = None,
    *,
    special_tokens_in_text: bool,
) -> ChatPrompt:
    """Do what `chat_prompt` does, of a conversation whose files and media have yet to be fetched: of those in `fetched`, none is again."""
    by_part = {} if fetched is None else fetched
    turns = await with_texts_of_files(request.messages, intake, by_part)
    loaded = await load_media(turns, model, intake, by_part)
    request = msgspec.structs.replace(request, messages=turns)
    chat = await chat_prompt(request, model, context, loaded, special_tokens_in_text=special_tokens_in_text)
    return chat._replace(loaded=loaded)


def takes_media(model: Model) -> bool:
    """Has the model tokens that stand for items of media?"""
    card = model.card
    return card.images is not None or card.videos is not None or card.audio is not None


def render(request: GenerationRequest, template: ChatTemplate, literal: LiteralText, mark: bool) -> str:
    """The conversation as text; `mark`: with marks for the control tokens that are spelled in it. Raises `ApiError` 400."""
    options = request.prompt_options
    tools = [tool_definition(tool) for tool in request.tools] if request.tool_choice.mode != "none" else []
    variables = template_variables(request)
    turns = request.messages
    if mark:
        # Most requests have neither.
        tools, variables = tools and literal.mark(tools), variables and literal.mark(variables)
    if template.form.descriptions:
        tools = [described(tool) for tool in tools]
    if tools and not template.form.tools:
        turns, tools = (Turn(role="system", parts=(TextPart(tools_as_text(tools)),)), *turns), []
    if mark:
        messages = template_messages(turns, template.form, literal.mark)
        messages = [literal.mark_message(message) for message in messages]
    else:
        messages = template_messages(turns, template.form)
    end = literal.mark_end(messages[-1]) if options.continue_final else ""
    text = template.render(
        messages,
        tools=tools or None,
        add_generation_prompt=options.add_generation_prompt and not end,
        variables=variables,
    )
    if end:
        text, end_mark, _ = text.partition(end)
        if not end_mark:
            raise bad_request(
                "continue_final_message: the model's chat template changes the last message's text.",
                param="continue_final_message",
            )
    return text


def _check_length(model: Model, context: int, prompt: str | list[int], param: str) -> None:
    """Refuse a prompt that cannot fit the context before it is tokenized. Raises `ApiError` 400."""
    if isinstance(prompt, list):
        if len(prompt) > context:
            raise too_long(model, context, f"{len(prompt)} tokens", param, tokens=len(prompt))
        return
    _check_texts(model, context, [prompt], param)


def _check_texts(model: Model, context: int, texts: list[str], param: str) -> None:
    """Refuse texts that cannot fit the context together. Raises `ApiError` 400."""
    size = sum(
        [len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass")) for text in texts]
    )
    if size > context * model.tokenizer.token_bytes_max:
        raise too_long(model, context, f"{size} bytes of text", param)


def too_long(model: Model, context: int, has: str, param: str, *, tokens: int | None = None) -> ApiError:
    """400: the request does not fit the context, the model's or that of its client. `tokens`: the prompt's, if they were counted.

    Agents shorten a conversation when they read the words of the API that they speak: OpenAI's and Anthropic's are in the message.
    """
    whose = "This model's" if context == model.card.context_length else "Your"
    message = f"{whose} maximum context length is {context} tokens. However, you requested {has}."
    if tokens is not None:
        message += f" The prompt is too long: {tokens} tokens > {context} maximum."
    return bad_request(message, param=param, code="context_length_exceeded")
