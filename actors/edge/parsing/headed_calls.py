"""Calls as a header with the name, then the arguments as JSON: DeepSeek, Kimi K2, Mistral, gpt-oss.

In Harmony, the format of gpt-oss, the prompt ends in `<|start|>assistant`, so an answer begins inside a header. Analysis is reasoning, commentary and final
are text, and a message to `functions.<name>` is a call. The recipient may stand in the role's part of the header or in
the channel's. Messages to tools that are built into the model (`python`, `browser`) belong to its reasoning.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

import regex

from headwater.actors.edge.parsing.context import CallGrammar, Context
from headwater.actors.edge.parsing.json_calls import is_object
from headwater.actors.edge.parsing.json_value import copy_value, read_string
from headwater.actors.edge.parsing.reader import HEADER_MAX, Steps, Write, markers


class ReadHeader(NamedTuple):
    """What was read of a header. `match` is None for other text; then `cut` says that the answer ended in what may be one."""

    match: "re.Match[str] | None"
    end: str = ""
    cut: bool = False


@dataclass(frozen=True, slots=True)
class Header:
    """Text up to one of the markers `ends`, of the form `pattern`, whose groups have names."""

    ends: tuple[str, ...]
    pattern: str

    def read(self, context: Context) -> Steps[ReadHeader]:
        """Read the header and the marker that ends it, or text up to where it is certain that it is no header."""
        reader, ends = context.reader, markers(*self.ends)
        text = ""
        while True:
            end, marker = ends.find(reader.text, reader.at, ended=reader.ended)
            text += reader.text[reader.at : end]
            reader.at = end + len(marker)
            if len(text) > HEADER_MAX:
                return ReadHeader(None)
            if marker:
                return ReadHeader(re.fullmatch(self.pattern, text, re.DOTALL), marker)
            ended = reader.ended and reader.at >= len(reader.text)
            if not self.begins(text[: ends.find_cut(text, 0)] if ended else text):
                return ReadHeader(None)
            if ended:
                return ReadHeader(None, cut=True)
            yield

    def begins(self, text: str) -> bool:
        """Return whether `text` is the beginning of a header."""
        return _compiled(self.pattern).fullmatch(text, partial=True) is not None


@lru_cache(maxsize=256)
def _compiled(pattern: str) -> "regex.Pattern[str]":
    return regex.compile(pattern, regex.DOTALL)


@dataclass(frozen=True, slots=True)
class HeadedCalls:
    """A header whose pattern has the groups `name` and, where the model writes one, `id`; then a JSON object.

    The object may stand in a JSON string; `null`, or nothing up to `close` or the next call, are no arguments. Of arguments that are not
    JSON everything up to `close` is passed on.
    """

    header: Header
    close: tuple[str, ...] = ()

    def read(self, context: Context, marker: str) -> Steps[None]:
        """Read one call."""
        reader, out = context.reader, context.out
        found, end, cut = yield from self.header.read(context)
        if end == "{":
            reader.at -= 1
        if found is None:
            context.abandon(cut=cut)
            return
        close = markers(*self.close)
        first = yield from reader.skip_space()
        other = None if first == "{" else (yield from self._read_other(context, first, marker))
        if first != "{" and other is None:
            context.abandon()
            return
        reader.take_record()
        out.start_call(found["name"], found.groupdict().get("id") or "")
        if other is not None:
            out.write_arguments(other)
        elif not (yield from copy_value(reader, out.write_arguments)):
            yield from reader.copy_value_until(close, out.write_arguments)
            return
        out.end_call()
        yield from reader.accept_end(close)

    def _read_other(self, context: Context, first: str, marker: str) -> Steps[str | None]:
        """Return the arguments that are no object in the text as one; None if nothing of the kind follows."""
        reader = context.reader
        if first == '"':
            text = yield from read_string(reader)
            return text if text is not None and is_object(text) else None
        if (yield from reader.accept(markers("null"))):
            return "{}"
        follows = yield from reader.look(markers(*self.close, marker))
        return "{}" if follows else None


@dataclass(frozen=True, slots=True)
class ByFirstCharacter:
    """Two forms behind one marker: `json` if a bracket or brace follows, `otherwise` if not."""

    json: CallGrammar
    otherwise: CallGrammar

    def read(self, context: Context, marker: str) -> Steps[None]:
        """Read the calls in whichever form they have."""
        first = yield from context.reader.skip_space()
        grammar = self.json if first in ("[", "{") else self.otherwise
        yield from grammar.read(context, marker)


# Harmony, the response format of gpt-oss: messages with a header (role, recipient, channel) and a body.

_START: Final = markers("<|start|>")
_HEADER_BEGINS: Final = markers("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "to=")
_HEADER_ENDS: Final = markers("<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|start|>")
_IN_HEADER: Final = markers(*_HEADER_BEGINS.literals, *_HEADER_ENDS.literals)
_CHANNELS: Final = ("analysis", "commentary", "final")
_NEXT: Final = (
    "<|start|>",
    *(
        f"<|channel|>{channel}{rest}"
        for channel in _CHANNELS
        for rest in ("<|message|>", " to=", "<|constrain|>")
    ),
)
_BODY_ENDS: Final = markers(*_NEXT, "<|end|>", "<|call|>", "<|return|>")
_AFTER_BODY: Final = markers("<|start|>", "<|channel|>")
_CHANNEL: Final = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT: Final = re.compile(r"\bto=([^\s<]+)")
_UNFINISHED: Final = re.compile(
    r"\w*\s*(?:to=\S*?)?\s*(?:<\|channel\|>\s*\w*\s*(?:to=\S*?)?\s*(?:<\|constrain\|>)?\w*\s*)?"
)
_MARKUP: Final = re.compile(r"<\|\w+\|>")
_FUNCTIONS: Final = "functions."


@dataclass(frozen=True, slots=True)
class Harmony:
    """The messages of an answer."""

    def read(self, context: Context, _marker: str) -> Steps[None]:
        """Read all messages."""
        reader = context.reader
        reader.take_record()
        while (yield from reader.peek()):
            if not (yield from reader.look_after_space(_HEADER_BEGINS)):
                if reader.drop_cut(_HEADER_BEGINS):
                    return
                yield from self._copy_body(context, context.out.text.write)
                continue
            yield from reader.accept_after_space(_START)
            header, end = yield from reader.read_until(_HEADER_ENDS)
            if end == "<|message|>":
                yield from self._read_body(context, header)
                continue
            header = header if end else header[: _IN_HEADER.find_cut(header, 0)]
            if end or not _UNFINISHED.fullmatch(header):
                # A header that never comes to its body: what it says besides markup is text.
                context.out.text.write(_MARKUP.sub("", header))
                if end == "<|start|>":
                    reader.at -= len(end)

    def _read_body(self, context: Context, header: str) -> Steps[None]:
        reader, out = context.reader, context.out
        found = _RECIPIENT.search(header)
        recipient = found[1] if found else ""
        name = recipient.removeprefix(_FUNCTIONS)
        if context.parse_tools and recipient and (name != recipient or name in context.offered):
            out.start_call(name)
            if (yield from reader.skip_space()) == "{":
                if (yield from copy_value(reader, out.write_arguments)):
                    out.end_call()
            elif (yield from reader.look(_BODY_ENDS)):
                out.write_arguments("{}")
                out.end_call()
            yield from self._copy_body(context, out.write_trailing, cut_is_markup=True)
        else:
            channel = _CHANNEL.search(header)
            thinking = bool(recipient) or (channel is not None and channel[1] == "analysis")
            yield from self._copy_body(context, (out.reasoning if thinking else out.text).write)

    def _copy_body(self, context: Context, write: Write, *, cut_is_markup: bool = False) -> Steps[None]:
        """Copy a body up to its end: a marker behind which the next message begins, or the answer's end."""
        reader = context.reader
        while end := (yield from reader.copy_until(_BODY_ENDS, write, lambda: cut_is_markup)):
            if end in _NEXT:
                reader.at -= len(end)
                return
            if (yield from reader.look_after_space(_AFTER_BODY)) or reader.is_cut(_AFTER_BODY):
                return
            write(end)
