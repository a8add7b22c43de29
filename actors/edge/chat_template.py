"""Chat messages to prompt tokens: a model's chat template, and the control tokens that users spell in their text.

Templates are rendered as Hugging Face does, but without importing it: by Jinja2 in its immutable sandbox, since a
template comes with a model and is not trusted. Values reach it as plain JSON types only.

A template puts control tokens between messages. The content of a message is text: `<|im_start|>` in it must not begin a
message. Such spellings are replaced by marks before the template is rendered, and encoded separately, as plain
characters. Messages without any, which is most, are encoded as a whole.
"""

import asyncio
import json
import re
import secrets
from collections.abc import Mapping
from datetime import datetime
from functools import cached_property
from typing import Any, Final, NamedTuple, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import numpy as np

from headwater.actors.edge.template_form import TemplateForm, find_form
from headwater.actors.edge.tokenizer import MARK, Tokenizer
from headwater.actors.http.errors import bad_request
from headwater.schemas.hashing import U32

USER_ROLES: Final = frozenset({"user", "tool"})

SPELLINGS_MAX: Final = 4_096

DATE: Final = "%d %B %Y"
"""The format of the variable `datetime`, which few templates have. It has no time of day, which would make each prompt different for a cache."""

ENCODED_A_TURN: Final = 32
"""Pieces around marks that are encoded in a turn of the event loop."""


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks assistant text for training; serving passes it through."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class ChatTemplate:
    """One model's template, compiled once. `special_tokens` such as bos_token are variables in it."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        # Not at compile time: `9 ** 9 ** 9` in a template would be computed there, without any bound.
        environment.optimized = False
        try:
            self._template = environment.from_string(source)
            # Of its own and not chained to the environment's, which do not change: every rendering goes through all of them.
            self._template.globals = dict(self._template.globals)
        except jinja2.TemplateError as error:
            raise ValueError(f"its chat template is not usable: {error}") from error
        self._special_tokens = special_tokens
        self._source = source
        self._is_dated = self.mentions("datetime")
        self.form = find_form(
            lambda messages, tools, form: self._rendered(messages, tools, True, _tools_by_name(tools, form)),
            self.mentions,
        )

    def mentions(self, word: str) -> bool:
        """Return whether a word, such as the name of a variable or a role, is in the template's source."""
        return word in self._source

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text; `variables` are further ones for the template.

        Raises `ApiError` 400 with the template's own complaint, unless it is made of parts of the messages.
        """
        if not tools:
            # Many templates ask whether `tools` is defined; an empty list would count as such.
            tools = [] if self.form.empty_tools else None
        further = _tools_by_name(tools, self.form)
        return self._rendered(messages, tools, add_generation_prompt, {**further, **(variables or {})})

    def _rendered(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        standard_variables = {
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            # As one dictionary: a client may name a variable anything.
            dated = {"datetime": _strftime_now(DATE)} if self._is_dated else {}
            return self._template.render({**self._special_tokens, **dated, **variables, **standard_variables})
        except jinja2.TemplateError as error:
            complaint = str(error)
            reason = f": {complaint}" if complaint and complaint in self._source else "."
            raise bad_request(
                f"The model's chat template refused the messages{reason}", param="messages"
            ) from error
        except Exception as error:  # a template can fail in any way, and it fails on what the client sent
            raise bad_request(
                f"The model's chat template cannot render these messages ({type(error).__name__}).",
                param="messages",
            ) from error


def _tools_by_name(tools: list[dict[str, Any]] | None, form: TemplateForm) -> dict[str, Any]:
    """The tools under the names that a template has for them besides Hugging Face's."""
    if form.tools_as_json:
        text = json.dumps([tool["function"] for tool in tools or ()], ensure_ascii=False, indent=4)
        return dict.fromkeys(form.tool_variables, text)
    return dict.fromkeys(form.tool_variables, tools) if tools else {}


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(fmt: str) -> str:
    return datetime.now().strftime(fmt)


class LiteralText:
    """The control tokens that the messages of one request spell, in order."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._spelled: list[str] = []

    @cached_property
    def _key(self) -> str:
        """Unpredictable, so that no message can contain a valid mark. Most requests need none."""
        return secrets.token_hex(8)

    def mark_message(self, message: dict[str, Any]) -> dict[str, Any]:
        """The message with marks for control tokens: in what users and tools say, in names, reasoning and calls.

        Text that a system or the model itself is said to have written keeps them.
        """
        keep = message.get("role") not in USER_ROLES
        return {
            name: value if name == "role" or (name == "content" and keep) else self.mark(value)
            for name, value in message.items()
        }

    def mark(self, value: Any) -> Any:
        """A JSON value with marks for control tokens in all its texts and names."""
        if isinstance(value, str):
            return self._marked(value)
        if isinstance(value, dict):
            return {self._marked(name): self.mark(inner) for name, inner in value.items()}
        if isinstance(value, list):
            return [self.mark(inner) for inner in value]
        return value

    def mark_end(self, message: dict[str, Any]) -> str:
        """Append a mark to a message's content, in place, and return it: the rendered text up to it ends in that content."""
        if not isinstance(message.get("content"), str) or message.get("role") != "assistant":
            raise bad_request(
                "continue_final_message needs a last message of the assistant with content.",
                param="continue_final_message",
            )
        mark = f"{MARK}{self._key}.end{MARK}"
        message["content"] += mark
        return mark

    def _marked(self, text: str) -> str:
        pieces = self._tokenizer.control.split(text, SPELLINGS_MAX + 1)
        if len(pieces) == 1:
            return text
        return "".join(self._mark(piece) if at % 2 else piece for at, piece in enumerate(pieces))

    def _mark(self, spelling: str) -> str:
        if len(self._spelled) >= SPELLINGS_MAX:
            raise bad_request(
                f"The messages spell more than {SPELLINGS_MAX} control tokens of this model.",
                param="messages",
            )
        self._spelled.append(spelling)
        return f"{MARK}{self._key}.{len(self._spelled) - 1}{MARK}"

    async def encode(self, text: str, *, add_special_tokens: bool) -> U32:
        """Token ids of the rendered text, with each mark replaced by its spelling as plain characters."""
        if not self._spelled:
            return await self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        pieces: list[U32] = []
        plain = {spelling: self._tokenizer.encode_plain(spelling) for spelling in set(self._spelled)}
        # Text and numbers of marks alternate.
        for position, piece in enumerate(re.split(f"{MARK}{self._key}\\.([0-9]+){MARK}", text)):
            if position % 2:
                pieces.append(plain[self._spelled[int(piece)]])
            elif piece or not position:
                special = add_special_tokens and not position
                pieces.append(await self._tokenizer.encode(piece, add_special_tokens=special))
            if position % ENCODED_A_TURN == ENCODED_A_TURN - 1:
                await asyncio.sleep(0)
        return np.concatenate(pieces)


# Prompts for text between a prefix and a suffix.


class _Form(NamedTuple):
    """The tokens before the prefix, before the suffix and at the end ("" for none); `suffix_first`: in that order."""

    prefix: str
    suffix: str
    middle: str
    suffix_first: bool = False


_FORMS: Final = (
    _Form("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen Coder, Gemma, Granite
    _Form("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder
    _Form("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    _Form("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    _Form("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    _Form("[PREFIX]", "[SUFFIX]", "", suffix_first=True),  # Codestral
)


async def fill_in_middle(
    tokenizer: Tokenizer, prefix: str, suffix: str, *, special: bool = True
) -> U32 | None:
    """The prompt's token ids, None if the tokenizer has no tokens for it. `special`: with those that begin any prompt."""
    form = next(
        (
            form_names
            for form_names in _FORMS
            if all(_ids(tokenizer, name) for name in form_names[:3] if name)
        ),
        None,
    )
    if form is None:
        return None
    before = await tokenizer.encode("", add_special_tokens=True) if special else np.array([], np.uint32)
    ids: list[list[int] | U32] = [
        _ids(tokenizer, form.prefix),
        await _text(tokenizer, prefix),
        _ids(tokenizer, form.suffix),
        await _text(tokenizer, suffix),
    ]
    if form.suffix_first:
        ids = ids[2:] + ids[:2]
    pieces = [before, *ids, _ids(tokenizer, form.middle)]
    return np.concatenate([np.array(piece, np.uint32) for piece in pieces])


async def _text(tokenizer: Tokenizer, text: str) -> U32:
    # A control token in a source file must not end the prefix.
    literal = LiteralText(tokenizer)
    return await literal.encode(literal.mark(text), add_special_tokens=False)


def _ids(tokenizer: Tokenizer, name: str) -> list[int]:
    number = tokenizer.reference.token_to_id(name) if name else None
    return [] if number is None else [number]
