"""Calls whose arguments are written as JSON: in an object with the name (Hermes, Qwen, Llama 3, many others), in one with the name as its only key, or
after a header with the name (DeepSeek, Kimi K2, Mistral, gpt-oss).

In Harmony, the format of gpt-oss, the prompt ends in `<|start|>assistant`, so an answer begins inside a header. Analysis is reasoning, commentary and final
are text, and a message to `functions.<name>` is a call. The recipient may stand in the role's part of the header or in
the channel's. Messages to tools that are built into the model (`python`, `browser`) belong to its reasoning.
"""

import json
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

import regex

from headwater.actors.edge.parsing.grammar import CallGrammar, Context
from headwater.actors.edge.parsing.json_value import BracketCount, copy_value, read_string
from headwater.actors.edge.parsing.reader import HEADER_MAX, Steps, Write, markers


@dataclass(frozen=True, slots=True)
class JsonCalls:
    """One object, several with `separators` between them, or an array of them.

    `{"name": "f", "arguments": {...}}`. Arguments are streamed once the name is known. Arguments that are a string
    are JSON inside JSON. Where text can be mistaken for a call (`strict`: no marker opens it), the object's keys must
    be known ones and the name that of an offered tool; anything else is text. `name` and `id` are the keys of a call's
    name and id.
    """

    close: tuple[str, ...] = ()
    separators: tuple[str, ...] = ()
    strict: bool = False
    adjacent: bool = False
    """True if several objects have only whitespace between them."""
    arguments: tuple[str, ...] = ("arguments", "parameters")
    name: str = "name"
    id: str = "id"

    def read(self, context: Context, marker: str) -> Steps[None]:
        """Read the calls that `marker` opens."""
        reader = context.reader
        if marker.endswith(("{", "[")):
            reader.at -= 1
        first = yield from reader.skip_space()
        if first == "[":
            reader.at += 1
            yield from self._read_array(context)
        elif first == "{":
            separators = markers(*self.separators)
            while (yield from _JsonCall(self, context).read()):
                if self.adjacent:
                    if (yield from reader.skip_space()) != "{":
                        break
                elif not self.separators or not (yield from reader.accept_after_space(separators)):
                    break
                context.begin("")
                if (yield from reader.skip_space()) != "{":
                    context.give_back()
                    return
        else:
            context.abandon(strict=self.strict)
            return
        yield from reader.accept_end(markers(*self.close))

    def _read_array(self, context: Context) -> Steps[None]:
        reader = context.reader
        while (following := (yield from reader.skip_space())) == "{":
            if not (yield from _JsonCall(self, context).read()):
                return
            following = yield from reader.skip_space()
            if following != ",":
                break
            reader.at += 1
            context.begin("")
        if following == "]":
            reader.at += 1
            reader.take_record()
        else:
            context.abandon(strict=self.strict)


@dataclass(frozen=True, slots=True)
class KeyedCalls:
    """An array of objects `{"f": {...}}`, each with one call: its name and its arguments. Apertus."""

    close: tuple[str, ...]

    def read(self, context: Context, _marker: str) -> Steps[None]:
        """Read the calls that the marker opens."""
        reader = context.reader
        if (yield from reader.skip_space()) != "[":
            context.abandon()
            return
        reader.at += 1
        while (yield from reader.skip_space()) == "{":
            reader.at += 1
            if not (yield from self._read_call(context)):
                return
            context.begin("")
            if (yield from reader.skip_space()) != ",":
                break
            reader.at += 1
        if (yield from reader.skip_space()) != "]":
            context.abandon()
            return
        reader.at += 1
        reader.take_record()
        yield from reader.accept_end(markers(*self.close))

    def _read_call(self, context: Context) -> Steps[bool]:
        """Read one object; return whether it was a whole call. If not, what was read has been dealt with."""
        reader, out = context.reader, context.out
        yield from reader.skip_space()
        name = yield from read_string(reader)
        if not name or (yield from reader.skip_space()) != ":":
            context.abandon()
            return False
        reader.at += 1
        if (yield from reader.skip_space()) != "{":
            context.abandon()
            return False
        reader.take_record()
        out.start_call(name)
        if not (yield from copy_value(reader, out.write_arguments)):
            yield from reader.copy_value_until(markers(*self.close), out.write_arguments)
            return False
        if (yield from reader.skip_space()) == "}":
            reader.at += 1
            out.end_call()
            return True
        return False


class _JsonCall:
    """Reads one object."""

    __slots__ = ("_arguments_whole", "_context", "_early", "_grammar", "_has_key", "_id", "_name", "_started")

    def __init__(self, grammar: JsonCalls, context: Context) -> None:
        self._grammar: Final = grammar
        self._context: Final = context
        self._name = ""
        self._id = ""
        self._early: list[str] | None = None
        """Arguments that came before the name."""
        self._has_key = False
        self._started = False
        self._arguments_whole = False

    def read(self) -> Steps[bool]:
        """Read the object; return whether it was a whole call. If not, what was read has been dealt with."""
        reader, out = self._context.reader, self._context.out
        reader.at += 1
        is_complete = yield from self._read_members()
        if is_complete and self._name and not self._started:
            self._start()
            out.write_arguments("{}" if self._early is None else "".join(self._early))
        if not self._started:
            if self._grammar.strict and self._has_key:
                yield from _pass_over(self._context)
            else:
                self._context.abandon(cut=not is_complete, strict=self._grammar.strict)
            return False
        # Models forget the object's own brace, but a marker after whole arguments leaves no doubt.
        if is_complete or (
            self._arguments_whole and (yield from reader.accept_after_space(markers(*self._grammar.close)))
        ):
            out.end_call()
        return is_complete

    def _start(self) -> None:
        self._started = True
        self._context.reader.take_record()
        self._context.out.start_call(self._name, self._id)

    def _read_members(self) -> Steps[bool]:
        """Read the members up to the closing brace; return whether that was reached."""
        reader = self._context.reader
        if (yield from reader.skip_space()) == "}":
            reader.at += 1
            return True
        while True:
            key = yield from read_string(reader)
            if key is None or (yield from reader.skip_space()) != ":":
                return False
            reader.at += 1
            self._has_key = True
            if not (yield from self._read_member(key)):
                return False
            following = yield from reader.skip_space()
            if following not in (",", "}"):
                return False
            reader.at += 1
            if following == "}":
                return True

    def _read_member(self, key: str) -> Steps[bool]:
        """Read one value; return whether it is JSON, and what a call may have there."""
        reader = self._context.reader
        if key == self._grammar.name and not self._name:
            name = yield from read_string(reader)
            if not name or (self._grammar.strict and name not in self._context.offered):
                return False
            self._name = name
            return True
        if key in self._grammar.arguments and not self._started and self._early is None:
            return (yield from self._read_arguments())
        if key == self._grammar.id and (yield from reader.skip_space()) == '"':
            self._id = (yield from read_string(reader)) or ""
            return bool(self._id)
        if self._grammar.strict and key != "type":
            return False
        return (yield from copy_value(reader, _ignore))

    def _read_arguments(self) -> Steps[bool]:
        reader, out = self._context.reader, self._context.out
        following = yield from reader.skip_space()
        if following == "{" and self._name:
            self._start()
            if (yield from copy_value(reader, out.write_arguments)):
                self._arguments_whole = True
                return True
            yield from reader.copy_value_until(markers(*self._grammar.close), out.write_arguments)
            return False
        pieces: list[str] = []
        if following == '"':
            # JSON inside JSON: whether it is an object shows only at its end.
            text = yield from read_string(reader)
            if text is None or not is_object(text):
                return False
            pieces.append(text)
        elif following == "{":
            if not (yield from copy_value(reader, pieces.append)):
                return False
        else:
            if not (yield from copy_value(reader, pieces.append)) or pieces != ["null"]:
                return False
            pieces = ["{}"]
        self._early = pieces
        return True


def _pass_over(context: Context) -> Steps[None]:
    """Give back what looked like a call, with the rest of the value: what is nested in it is no call either."""
    reader = context.reader
    text = reader.take_record()
    balance = BracketCount()
    write = context.out.text.write
    end = balance.end_of(text)
    write(text)
    while end < 0:
        if reader.at >= len(reader.text):
            if reader.ended:
                return
            yield
        rest = reader.text[reader.at :]
        end = balance.end_of(rest)
        text = rest if end < 0 else rest[:end]
        write(text)
        reader.at += len(text)


def is_object(text: str) -> bool:
    """Return whether `text` is a JSON object."""
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _ignore(_text: str) -> None:
    """Read a value without keeping it."""


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
        header_match, end, cut = yield from self.header.read(context)
        if end == "{":
            reader.at -= 1
        if header_match is None:
            context.abandon(cut=cut)
            return
        close = markers(*self.close)
        first = yield from reader.skip_space()
        other = None if first == "{" else (yield from self._read_other(context, first, marker))
        if first != "{" and other is None:
            context.abandon()
            return
        reader.take_record()
        out.start_call(header_match["name"], header_match.groupdict().get("id") or "")
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
        match = _RECIPIENT.search(header)
        recipient = match[1] if match else ""
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
