"""Calls as a header with the name, then the arguments as JSON: DeepSeek, Kimi K2, Mistral."""

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import regex

from headwater.actors.edge.parsing.context import CallGrammar, Context
from headwater.actors.edge.parsing.json_calls import is_object
from headwater.actors.edge.parsing.json_value import copy_value, read_string
from headwater.actors.edge.parsing.reader import HEADER_MAX, Steps, markers


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
