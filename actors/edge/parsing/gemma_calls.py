"""Gemma's calls: `call:name{key:<|"|>text<|"|>,other:[1,true]}`, rewritten as JSON while they arrive.

Gemma also writes strings of JSON, bare strings, bare ones with the closing quote only, and Python's arguments in parentheses; and
it quotes inside its strings with the marker that ends them. What follows a mark decides whether it ends a value.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple

import regex

from headwater.actors.edge.parsing.context import Context
from headwater.actors.edge.parsing.headed_calls import Header
from headwater.actors.edge.parsing.json_value import (
    cast,
    copy_value,
    escape,
    quote,
    read_string,
    types_of_parameter,
)
from headwater.actors.edge.parsing.pythonic_calls import DEPTH_MAX, copy_arguments
from headwater.actors.edge.parsing.reader import Markers, Reader, Steps, Write, markers

_HEADER: Final = Header(ends=("{", "("), pattern=r"\s*call:(?P<name>[^\s{(]+)\s*")
_COLON: Final = markers(":")
_WORD: Final = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_PYTHON: Final = {"None": "null", "True": "true", "False": "false"}


class _Ends(NamedTuple):
    """What follows a value in an object and in a list, behind optional whitespace."""

    object: "regex.Pattern[str]"
    list: "regex.Pattern[str]"


@lru_cache(maxsize=16)
def _ends(quote_mark: str, close: tuple[str, ...]) -> _Ends:
    mark, closed = regex.escape(quote_mark), "|".join(map(regex.escape, close))
    key = rf"(?:{mark}.{{1,200}}?{mark}|\"[^\"]{{1,200}}\"|(?P<bare>[^:,{{}}\[\]<>\"'()]{{1,200}}))\s*:"
    value = rf"(?:{mark}|[\"\[{{]|[-+.\w]{{1,200}}\s*[,\]])"
    bracket = rf",?\s*[}}\]](?=\s*(?:[,}}\]]|{closed}|<|call:|\s\w|$))"
    return _Ends(
        regex.compile(rf"\s*(?:,\s*{key}|{bracket})", regex.DOTALL),
        regex.compile(rf"\s*(?:,\s*{value}|{bracket})", regex.DOTALL),
    )


@dataclass(frozen=True, slots=True)
class GemmaCalls:
    """One call. Strings stand between markers `quote`, keys are bare; a bare value is what the tool's schema says, else a JSON word or a string."""

    close: tuple[str, ...]
    quote: str = '<|"|>'

    def read(self, context: Context, _marker: str) -> Steps[None]:
        """Read one call."""
        reader, out = context.reader, context.out
        found, end, cut = yield from _HEADER.read(context)
        if found is None or not (yield from reader.skip_space()):
            context.abandon(cut=cut or found is not None)
            return
        close = markers(*self.close)
        reader.take_record()
        out.start_call(found["name"])
        if end == "(":
            whole = yield from copy_arguments(reader, out.write_arguments)
        else:
            value = _Value(reader, out.write_arguments, self.quote, self.close)
            whole = yield from value.copy_object(context.offered.get(found["name"], {}), DEPTH_MAX)
        if whole:
            out.end_call()
            yield from reader.accept_end(close)
        else:
            yield from reader.copy_value_until(close, out.write_arguments)


class _Value:
    """Copies values of one call."""

    __slots__ = ("_bare_ends", "_ends", "_quote", "_quotes", "_reader", "_write")

    def __init__(self, reader: Reader, write: Write, quote_mark: str, close: tuple[str, ...]) -> None:
        self._reader: Final = reader
        self._write: Final = write
        self._quote: Final = quote_mark
        self._quotes: Final[Markers] = markers(quote_mark)
        self._bare_ends: Final = markers(",", "}", "]", quote_mark)
        self._ends: Final = _ends(quote_mark, close)

    def copy_object(self, schema: Mapping[str, Any], depth: int) -> Steps[bool]:
        """Write an object whose opening brace has been read; return whether it is well-formed."""
        if not depth:
            return False
        reader, write = self._reader, self._write
        write("{")
        first = True
        while (following := (yield from reader.skip_space())) != "}":
            key = yield from self._read_key(following)
            if key is None:
                return False
            write(("" if first else ", ") + quote(key) + ": ")
            first = False
            properties = schema.get("properties")
            inner = properties.get(key) if isinstance(properties, Mapping) else None
            types = types_of_parameter(schema, key)
            keys = properties if isinstance(properties, Mapping) else {}
            schema_of_it = inner if isinstance(inner, Mapping) else {}
            if not (yield from self._copy(schema_of_it, types, depth - 1, keys)):
                return False
            if (yield from reader.skip_space()) == ",":
                reader.at += 1
        reader.at += 1
        write("}")
        return True

    def _read_key(self, following: str) -> Steps[str | None]:
        """Read a key and its colon; None if there is none, which is written as it is."""
        reader = self._reader
        if (yield from reader.accept(self._quotes)):
            key, end = yield from reader.read_until(self._quotes)
            if end:
                _rest, end = yield from reader.read_until(_COLON)
        elif following == '"':
            text = yield from read_string(reader)
            key, end = text or "", ""
            if text is not None:
                _rest, end = yield from reader.read_until(_COLON)
        else:
            key, end = yield from reader.read_until(_COLON)
            key = key.strip()
        if end:
            return key
        self._write(key)
        return None

    def _copy_list(self, schema: Mapping[str, Any], depth: int) -> Steps[bool]:
        if not depth:
            return False
        reader, write = self._reader, self._write
        items = schema.get("items")
        inner = items if isinstance(items, Mapping) else {}
        types = types_of_parameter({"properties": {"item": inner}}, "item")
        write("[")
        first = True
        while (yield from reader.skip_space()) != "]":
            if not first:
                write(", ")
            first = False
            if not (yield from self._copy(inner, types, depth - 1, None)):
                return False
            if (yield from reader.skip_space()) == ",":
                reader.at += 1
        reader.at += 1
        write("]")
        return True

    def _copy(
        self,
        schema: Mapping[str, Any],
        types: frozenset[str],
        depth: int,
        keys: Mapping[str, Any] | None,
    ) -> Steps[bool]:
        """Write the value that follows; return whether it is well-formed. `keys` are those of the object that it is in, None for a list."""
        reader = self._reader
        following = yield from reader.skip_space()
        if (yield from reader.accept(self._quotes)):
            return (yield from self._copy_quoted(keys is None))
        if following == "{":
            reader.at += 1
            return (yield from self.copy_object(schema, depth))
        if following == "[":
            reader.at += 1
            return (yield from self._copy_list(schema, depth))
        if following == '"':
            return (yield from copy_value(reader, self._write))
        return (yield from self._copy_bare(types, keys))

    def _copy_quoted(self, in_list: bool) -> Steps[bool]:
        """Write a string, behind its opening quote."""
        write = self._write
        write('"')
        while mark := (
            yield from self._reader.copy_value_until(self._quotes, lambda text: write(escape(text)))
        ):
            if (yield from self._value_ends(in_list)):
                write('"')
                return True
            write(escape(mark))
        return False

    def _copy_bare(self, types: frozenset[str], keys: Mapping[str, Any] | None) -> Steps[bool]:
        """Write a value without an opening quote."""
        reader, pieces = self._reader, list[str]()
        while mark := (yield from reader.copy_value_until(self._bare_ends, pieces.append)):
            if mark == self._quote:
                if (yield from self._value_ends(keys is None)):
                    self._write(quote("".join(pieces)))
                    return True
            else:
                reader.at -= len(mark)
                if (yield from self._value_ends(keys is None, keys)):
                    self._write(_bare("".join(pieces).strip(), types))
                    return True
                reader.at += len(mark)
            pieces.append(mark)
        self._write("".join(pieces).strip())
        return False

    def _value_ends(self, in_list: bool, keys: Mapping[str, Any] | None = None) -> Steps[bool]:
        """Return whether what follows can only follow a value. Consumes nothing. `keys`, if there are any, are the only ones allowed."""
        reader = self._reader
        pattern = self._ends.list if in_list else self._ends.object
        while True:
            found = pattern.match(reader.text, pos=reader.at, partial=True)
            if found is None:
                return False
            if found.partial and reader.ended:
                return True
            # A bracket is one of a value's end by what is behind it, which may be still to come.
            if reader.ended or not (found.partial or found.end() == len(reader.text)):
                return in_list or not keys or found["bare"] is None or found["bare"].strip() in keys
            yield


def _bare(text: str, types: frozenset[str]) -> str:
    """A bare value as JSON."""
    if types:
        return cast(text, types)
    if text in _PYTHON:
        return _PYTHON[text]
    return text if _WORD.fullmatch(text) else quote(text)
