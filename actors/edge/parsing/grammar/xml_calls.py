"""Calls as markup: a name, then parameters as plain text between markers. Qwen 3 Coder, GLM, MiniMax, DeepSeek's DSML.

The markup has no types. A parameter that the tool's schema declares a string is streamed; others are cast once whole.
"""

import html
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from headwater.actors.edge.parsing.casting import cast, escape, quote, types_of_parameter
from headwater.actors.edge.parsing.grammar.context import Context
from headwater.actors.edge.parsing.grammar.headed_calls import Header
from headwater.actors.edge.parsing.grammar.reader import Steps, Write, markers

_STRING: Final = frozenset({"string"})


@dataclass(frozen=True, slots=True)
class XmlCalls:
    """One call.

    `name` is the header with the name (group `name`), after `prefix` if the opening marker is another one. Each
    parameter is `parameter`, the header `key` (groups `key` and, if the model writes a type, `type`, which `types`
    maps to JSON's), the value, `value_end`. `close` ends the call, `after` may follow it. With `newlines` a newline at
    each side of a value belongs to the markup.

    A value ends at a `value_end` behind which the markup continues: what only looks like one is part of the value.
    Models forget `value_end`; `missing_end` maps markers that end a value nevertheless to what must follow them (or the
    answer's end; with nothing named anything may follow). With `entities` names and keys are escaped as in XML.
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
    types: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def read(self, context: Context, marker: str) -> Steps[None]:
        """Read one call."""
        reader = context.reader
        prefixed = not self.prefix or marker in self.prefix
        if not prefixed and not (yield from reader.accept_after_space(markers(*self.prefix))):
            context.abandon()
            return
        found, end = yield from self.name.read(context)
        if found is None:
            context.abandon()
            return
        call = _XmlCall(self, context, self.unescape(found["name"]))
        if end.endswith("/>"):
            call.end()
        else:
            if end == self.parameter or end in self.close:
                reader.at -= len(end)
            yield from call.read()
        yield from reader.accept_after_space(markers(*self.after))

    def unescape(self, text: str) -> str:
        """Return a name or key as it is meant."""
        return html.unescape(text) if self.entities else text


class _XmlCall:
    """Reads the parameters of one call and writes them as JSON."""

    __slots__ = (
        "_context",
        "_grammar",
        "_missing_end",
        "_name",
        "_next",
        "_schema",
        "_started",
        "_value_end",
    )

    def __init__(self, grammar: XmlCalls, context: Context, name: str) -> None:
        self._grammar: Final = grammar
        self._context: Final = context
        self._name: Final = name
        self._schema: Final = context.offered.get(name, {})
        self._next: Final = markers(grammar.parameter, *grammar.close)
        self._value_end: Final = markers(grammar.value_end, *grammar.missing_end)
        self._missing_end: Final = {
            marker: markers(*following) for marker, following in grammar.missing_end.items()
        }
        self._started = False

    def read(self) -> Steps[None]:
        """Read up to the end of the call."""
        reader, out = self._context.reader, self._context.out
        while True:
            marker = yield from reader.accept_after_space(self._next)
            if marker in self._grammar.close:
                self.end()
                return
            if not marker or not (yield from self._read_parameter()):
                break
        if not self._started:
            self._context.abandon()
        else:
            yield from reader.copy_until(markers(*self._grammar.close), out.write_arguments)

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

    def _read_parameter(self) -> Steps[bool]:
        """Read one parameter; return whether it is one, and whole."""
        found, _end = yield from self._grammar.key.read(self._context)
        if found is None:
            return False
        key = self._grammar.unescape(found["key"])
        types = self._grammar.types.get(found.groupdict().get("type") or "")
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
            whole = yield from self._read_value(pieces.append)
            out.write_arguments(cast("".join(pieces), types))
            return whole
        out.write_arguments('"')
        whole = yield from self._read_value(lambda text: out.write_arguments(escape(text)))
        if whole:
            out.write_arguments('"')
        return whole

    def _read_value(self, write: Write) -> Steps[bool]:
        """Read a value up to its end; return whether that was reached."""
        reader = self._context.reader
        value = _TrimmedValue(write) if self._grammar.newlines else None
        take = write if value is None else value.write
        while True:
            marker = yield from reader.copy_until(self._value_end, take)
            if not marker:
                return False
            following = self._missing_end.get(marker, self._next)
            if (
                not following.literals
                or (yield from reader.look_after_space(following))
                or reader.only_space_follows()
            ):
                if marker in self._missing_end:
                    reader.at -= len(marker)
                return True
            take(marker)


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
