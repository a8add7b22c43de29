"""Calls as markup: a name, then parameters as plain text between markers. Qwen 3 Coder, GLM, MiniMax, DeepSeek's DSML.

The markup has no types. A parameter that the tool's schema declares a string is streamed; others are cast once whole.
"""

import html
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from headwater.actors.edge.parsing.grammar import Context
from headwater.actors.edge.parsing.json_calls import Header
from headwater.actors.edge.parsing.json_value import cast, escape, quote, types_of_parameter
from headwater.actors.edge.parsing.reader import HEADER_MAX, WHITESPACE, Steps, Write, markers

_STRING: Final = frozenset({"string"})
_JSON_BEGINS: Final = frozenset('{["-0123456789tfnTFN')
_CUT: Final = "\0"

_CDATA: Final = markers("<![CDATA[")
_CDATA_END: Final = "]]>"


@dataclass(frozen=True, slots=True)
class XmlCalls:
    """One call.

    `name` is the header with the name (group `name`), after `prefix` if the opening marker is another one. Each
    parameter is `parameter`, the header `key` (groups `key` and, if the model writes a type, `type`, which `types`
    maps to JSON's), the value, `value_end`. `close` ends the call, `after` may follow it. With `newlines` a newline at
    each side of a value belongs to the markup.

    A value ends at a `value_end` behind which the markup continues: with the call's end, or with a parameter that has not come
    yet. What only looks like one is part of the value, and so is a whole call in it, as in a file about calls. Models forget
    `value_end`; `missing_end` maps markers that end a value nevertheless to what must follow them (or the answer's end; with
    nothing named, a parameter that the tool has). With `entities` names and keys are escaped as in XML. With `cdata` a value may
    be in a CDATA section, which ends where `value_end` comes right behind it.
    """

    name: Header
    parameter: str
    key: Header
    value_end: str
    close: tuple[str, ...]
    after: tuple[str, ...] = ()
    prefix: tuple[str, ...] = ()
    missing_end: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    newlines: bool = False
    entities: bool = False
    cdata: bool = False
    types: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def read(self, context: Context, marker: str) -> Steps[None]:
        """Read one call."""
        reader = context.reader
        prefixed = not self.prefix or marker in self.prefix
        prefix = markers(*self.prefix)
        if not prefixed and not (yield from reader.accept_after_space(prefix)):
            reader.drop_cut(prefix)
            context.abandon()
            return
        name_match, end, cut = yield from self.name.read(context)
        if name_match is None:
            context.abandon(cut=cut)
            return
        call = _XmlCall(self, context, self.unescape(name_match["name"]), self.prefix or (marker,))
        if end.endswith("/>"):
            call.end()
        else:
            if end == self.parameter or end in self.close:
                reader.at -= len(end)
            yield from call.read()
        yield from reader.accept_end(markers(*self.after))

    def unescape(self, text: str) -> str:
        """Return a name or key as it is meant."""
        return html.unescape(text) if self.entities else text


class _XmlCall:
    """Reads the parameters of one call and writes them as JSON."""

    __slots__ = (
        "_close", "_context", "_grammar", "_keys", "_missing_end", "_name", "_next", "_opening", "_schema",
        "_started", "_value_end",
    )  # fmt: skip

    def __init__(self, grammar: XmlCalls, context: Context, name: str, opening: tuple[str, ...]) -> None:
        self._grammar: Final = grammar
        self._context: Final = context
        self._name: Final = name
        self._schema: Final = context.offered.get(name, {})
        self._close: Final = markers(*grammar.close)
        self._next: Final = markers(grammar.parameter, *grammar.close)
        self._opening: Final = markers(*opening)
        self._value_end: Final = markers(grammar.value_end, *opening, *grammar.missing_end)
        self._missing_end: Final = {
            marker: markers(*following) for marker, following in grammar.missing_end.items()
        }
        self._keys: set[str] = set()
        self._started = False

    def read(self) -> Steps[None]:
        """Read up to the end of the call."""
        reader, out = self._context.reader, self._context.out
        while True:
            marker = yield from reader.accept_after_space(self._next)
            if marker in self._grammar.close:
                self.end()
                return
            if not marker:
                cut = reader.drop_cut(self._next)
                break
            cut, is_complete = yield from self._read_parameter()
            if not is_complete:
                break
        if not self._started:
            self._context.abandon(cut=cut)
        else:
            yield from reader.copy_value_until(self._close, out.write_arguments)

    def end(self) -> None:
        """The call ended properly."""
        if not self._started:
            self._start("{")
        self._context.out.write_arguments("}")
        self._context.out.end_call()

    def _start(self, text: str) -> None:
        self._started = True
        self._context.reader.take_record()
        self._context.out.start_call(self._name)
        self._context.out.write_arguments(text)

    def _read_parameter(self) -> Steps[tuple[bool, bool]]:
        """Read one parameter; return whether the answer's end cut its header, and whether it is whole."""
        key_match, _end, cut = yield from self._grammar.key.read(self._context)
        if key_match is None:
            return cut, False
        key = self._grammar.unescape(key_match["key"])
        self._keys.add(key)
        types = self._grammar.types.get(key_match.groupdict().get("type") or "")
        if types is None:
            types = types_of_parameter(self._schema, key)
        member = quote(key) + ": "
        if self._started:
            self._context.out.write_arguments(", " + member)
        else:
            self._start("{" + member)
        out = self._context.out
        if types != _STRING:
            pieces: list[str] = []
            is_complete = yield from self._read_value(pieces.append)
            text = "".join(pieces)
            out.write_arguments(cast(text, types) if is_complete else _begun(text.lstrip(WHITESPACE)))
            return False, is_complete
        out.write_arguments('"')
        is_complete = yield from self._read_value(lambda text: out.write_arguments(escape(text)))
        if is_complete:
            out.write_arguments('"')
        return False, is_complete

    def _read_value(self, write: Write) -> Steps[bool]:
        """Read a value up to its end; return whether that was reached."""
        reader, grammar = self._context.reader, self._grammar
        value = _TrimmedValue(write) if grammar.newlines else None
        take = write if value is None else value.write
        nested, end, ends = 0, grammar.value_end, self._value_end
        if grammar.cdata and (yield from reader.accept_end(_CDATA)):
            end = _CDATA_END + grammar.value_end
            ends = markers(end)
        while marker := (yield from reader.copy_value_until(ends, take)):
            if marker in self._opening.literals:
                nested += yield from self._call_follows()
            elif marker == end:
                if (yield from self._ends_value(nested)):
                    return True
                take(marker)
                if nested and (yield from reader.copy_after_space(self._close, take)):
                    nested -= 1
                    yield from reader.copy_after_space(markers(*grammar.after), take)
                continue
            elif not nested and (yield from self._ends_without_end(marker)):
                return True
            take(marker)
        return False

    def _ends_value(self, nested: int) -> Steps[bool]:
        """Return whether a `value_end`, which was read, ends the value. Within `nested` calls in the value, only the answer's end ends it."""
        reader = self._context.reader
        if nested:
            return (yield from self._only_ends_follow())
        following = yield from reader.look_after_space(self._next)
        if following == self._grammar.parameter:
            key = yield from self._next_key()
            return key is not None and key not in self._keys and self._may_have(key)
        return bool(following) or reader.is_cut(self._next)

    def _ends_without_end(self, marker: str) -> Steps[bool]:
        """Return whether a marker of `missing_end`, which was read, ends the value; if it does, the marker is given back to be read again.

        What was read is gone once more text arrives, so the marker is given back before anything is waited for.
        """
        reader, following = self._context.reader, self._missing_end[marker]
        reader.at -= len(marker)
        if following.literals:
            behind, next_marker = yield from reader.find_after_space(following, len(marker))
            if next_marker in self._opening.literals:
                ends = yield from self._call_follows(behind + len(next_marker), whole=True)
            else:
                ends = bool(next_marker) or reader.only_space_follows(len(marker))
        else:
            key = yield from self._next_key()
            ends = key is not None and key not in self._keys and self._has(key)
        if not ends:
            reader.at += len(marker)
        return ends

    def _has(self, key: str) -> bool:
        """Return whether the tool has this parameter, as far as its parameters are known."""
        properties = self._schema.get("properties")
        return not isinstance(properties, Mapping) or not properties or key in properties

    def _may_have(self, key: str) -> bool:
        """The same, of a tool that takes others too unless its schema says that it does not."""
        return key == _CUT or self._schema.get("additionalProperties") is not False or self._has(key)

    def _next_key(self) -> Steps[str | None]:
        """Return the key of the parameter that follows, perhaps after whitespace, and read nothing; None if it has none, `_CUT` if it is cut off."""
        reader, grammar = self._context.reader, self._grammar
        ends = markers(*grammar.key.ends)
        while True:
            start = reader.text.find(grammar.parameter, reader.at) + len(grammar.parameter)
            end, marker = ends.find(reader.text, start, ended=reader.ended)
            text = reader.text[start:end]
            if marker:
                match = re.fullmatch(grammar.key.pattern, text, re.DOTALL)
                return grammar.unescape(match["key"]) if match is not None else None
            if len(text) > HEADER_MAX or not grammar.key.begins(text[: ends.find_cut(text, 0)]):
                return None
            if reader.ended:
                return _CUT
            yield

    def _call_follows(self, behind: int = 0, *, whole: bool = False) -> Steps[bool]:
        """Return whether a call follows, that many characters further on: a name and a parameter. Consumes nothing.

        With `whole` one without parameters is a call too, but its tool must be offered. What the answer's end cuts off is none.
        """
        reader, grammar = self._context.reader, self._grammar
        ends = markers(*grammar.name.ends)
        nexts = self._next.literals if whole else (grammar.parameter,)
        while True:
            at = reader.at + behind
            end, marker = ends.find(reader.text, at, ended=reader.ended)
            text = reader.text[at:end]
            if marker:
                match = re.fullmatch(grammar.name.pattern, text, re.DOTALL)
                if match is None or (whole and not self._is_offered(grammar.unescape(match["name"]))):
                    return False
                start = end if marker in (grammar.parameter, *grammar.close) else end + len(marker)
                following = reader.text[start:].lstrip(WHITESPACE)
                if following.startswith(nexts):
                    return True
                if not any(candidate.startswith(following) for candidate in nexts):
                    return False
            elif len(text) > HEADER_MAX or not grammar.name.begins(text[: ends.find_cut(text, 0)]):
                return False
            if reader.ended:
                return False
            yield

    def _is_offered(self, name: str) -> bool:
        """Return whether a tool of this name is offered, as far as it is known which are."""
        return name in self._context.offered or not self._context.offered

    def _only_ends_follow(self) -> Steps[bool]:
        """Return whether only the call's end markers follow, up to the answer's end. Consumes nothing."""
        reader = self._context.reader
        ends = (*self._grammar.close, *self._grammar.after)
        while True:
            rest = reader.text[reader.at :].lstrip(WHITESPACE)
            while matched := next((marker for marker in ends if rest.startswith(marker)), ""):
                rest = rest[len(matched) :].lstrip(WHITESPACE)
            if reader.ended:
                return not rest
            if rest and not any(marker.startswith(rest) for marker in ends):
                return False
            yield


def _begun(text: str) -> str:
    """The beginning of a value that was cut off, whose type is open, as JSON so far."""
    return text if not text or text[0] in _JSON_BEGINS else f'"{escape(text)}'


class _TrimmedValue:
    """A value between newlines that are not part of it."""

    __slots__ = ("_begun", "_newline", "_write")

    def __init__(self, write: Write) -> None:
        self._write: Final = write
        self._begun = False
        self._newline = False

    def write(self, text: str) -> None:
        """Append text; a newline at its end is held back until more follows."""
        if not self._begun:
            self._begun = True
            text = text.removeprefix("\n")
            if not text:
                return
        if self._newline:
            text = "\n" + text
        self._newline = text.endswith("\n")
        if self._newline:
            text = text[:-1]
        if text:
            self._write(text)
