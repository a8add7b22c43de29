"""Calls whose arguments are rewritten as JSON while they arrive: Python's and Gemma's.

Python: `[f(a=1), g(b='x')]`. Llama 4, OLMo 3.

Gemma: `call:name{key:<|"|>text<|"|>,other:[1,true]}`. It also writes strings of JSON, bare strings, bare ones with the closing quote only, and
Python's arguments in parentheses; and it quotes inside its strings with the marker that ends them. What follows a mark decides whether it ends
a value.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple

import regex

from headwater.actors.edge.parsing.grammar import Context
from headwater.actors.edge.parsing.json_calls import Header
from headwater.actors.edge.parsing.json_value import (
    JSON_NUMBER,
    JSON_WORDS,
    cast,
    copy_value,
    escape,
    quote,
    read_string,
    types_of_parameter,
)
from headwater.actors.edge.parsing.reader import Markers, Reader, Steps, Write, markers

DEPTH_MAX: Final = 64
"""Nesting of a value; with more it is malformed."""

_NAME: Final = re.compile(r"[\w.\-]+")
_IDENTIFIER: Final = re.compile(r"\w+")
_WORD: Final = re.compile(r"[-+.\w]+")
_NO_ARGUMENTS: Final = "{}"
_STRING_BEGINS: Final = frozenset("\"'rRuUbB")
_OPENING: Final = regex.compile(r"(?P<prefix>[rRuUbB]{0,2})(?P<quotes>\"\"\"|'''|\"|')")
_PLAIN: Final = {quote_mark: re.compile(rf"[^\\{quote_mark}]*") for quote_mark in "'\""}

_ESCAPES: Final[Mapping[str, str]] = {
    "n": "\n",
    "t": "\t",
    "r": "\r",
    "b": "\b",
    "f": "\f",
    "a": "\a",
    "v": "\v",
    "0": "\0",
    "\\": "\\",
    "'": "'",
    '"': '"',
    "\n": "",
}

_HEX_DIGITS: Final[Mapping[str, int]] = {"x": 2, "u": 4, "U": 8}

_SURROGATES: Final = range(0xD800, 0xE000)
_LOW_BEGINS: Final = 0xDC00
_LOW: Final = re.compile(r"\\u[dD][c-fC-F][0-9a-fA-F]{2}")


@dataclass(frozen=True, slots=True)
class PythonicCalls:
    """Calls between brackets, separated by commas; behind a marker also without brackets, one a line.

    With `strict` no marker opens them: a call is then one of an offered tool.
    """

    close: tuple[str, ...] = ()
    strict: bool = False

    def read(self, context: Context, marker: str) -> Steps[None]:
        """Read the calls that `marker` opens."""
        reader = context.reader
        close = markers(*self.close)
        bracket = marker == "["
        if not bracket and (yield from reader.skip_space()) == "[":
            reader.at += 1
            bracket = True
        while True:
            if not (yield from self._read_call(context)):
                return
            following = yield from reader.skip_space()
            if following == ",":
                reader.at += 1
            elif following == "]" and bracket:
                reader.at += 1
                break
            elif bracket or not following or (yield from reader.look(close)):
                break
            context.begin("")
        reader.take_record()
        yield from reader.accept_end(close)

    def _read_call(self, context: Context) -> Steps[bool]:
        """Read one call; return whether it is whole. If not, what was read has been dealt with."""
        reader, out = context.reader, context.out
        yield from reader.skip_space()
        name = yield from reader.read_run(_NAME)
        is_callable = bool(name) and not (self.strict and name not in context.offered)
        if not is_callable or (yield from reader.skip_space()) != "(":
            context.abandon(strict=self.strict)
            return False
        reader.at += 1
        has_begun, begun = yield from _begin_arguments(reader)
        if not has_begun:
            context.abandon(strict=self.strict)
            return False
        reader.take_record()
        out.start_call(name)
        out.write_arguments(begun)
        is_complete = begun == _NO_ARGUMENTS or (yield from _copy_rest(reader, out.write_arguments))
        if is_complete:
            out.end_call()
        else:
            yield from reader.copy_value_until(markers(*self.close), out.write_arguments)
        return is_complete


def _begin_arguments(reader: Reader) -> Steps[tuple[bool, str]]:
    """Read what is behind an opening parenthesis up to the first value, and return it as JSON; with False, as it is, if it begins no arguments."""
    if (yield from reader.skip_space()) == ")":
        reader.at += 1
        return True, _NO_ARGUMENTS
    key = yield from reader.read_run(_IDENTIFIER)
    if not key or (yield from reader.skip_space()) != "=":
        return False, key
    reader.at += 1
    return True, f"{{{quote(key)}: "


def _copy_rest(reader: Reader, write: Write) -> Steps[bool]:
    """Write the value of the argument whose name has been written, and all that follow it, up to the closing parenthesis."""
    while True:
        yield from reader.skip_space()
        if not (yield from copy_python(reader, write, DEPTH_MAX)):
            return False
        if (following := (yield from reader.skip_space())) == ",":
            reader.at += 1
            following = yield from reader.skip_space()
        if following == ")":
            reader.at += 1
            write("}")
            return True
        key = yield from reader.read_run(_IDENTIFIER)
        if not key or (yield from reader.skip_space()) != "=":
            return False
        reader.at += 1
        write(f", {quote(key)}: ")


def copy_python(reader: Reader, write: Write, depth: int) -> Steps[bool]:
    """Write the Python literal that follows as JSON; return whether it is one, nested no deeper than `depth`."""
    if (opening := (yield from _read_opening(reader))) is not None:
        write('"')
        # Adjacent strings are one.
        while opening is not None:
            if not (yield from _copy_string(reader, write, opening)):
                return False
            yield from reader.skip_space()
            opening = yield from _read_opening(reader)
        write('"')
        return True
    first = yield from reader.peek()
    if first == "{":
        return (yield from _copy_items(reader, write, depth, "}", keys=True))
    if first in ("[", "("):
        return (yield from _copy_items(reader, write, depth, "]" if first == "[" else ")", keys=False))
    word = yield from reader.read_run(_WORD)
    value = JSON_WORDS.get(word) or _number(word)
    write(value or word)
    return bool(value)


class _Opening(NamedTuple):
    """How a string begins: its quotes, and whether backslashes stand for themselves."""

    quotes: str
    raw: bool


def _read_opening(reader: Reader) -> Steps[_Opening | None]:
    """Read the prefix and the opening quotes of a string; None, and nothing is read, if none follows."""
    if (yield from reader.peek()) not in _STRING_BEGINS:
        return None
    while True:
        match = _OPENING.match(reader.text, reader.at, partial=not reader.ended)
        if match is None:
            return None
        # One quote may be three.
        rest = "" if match.partial else reader.text[match.start("quotes") :]
        if reader.ended or (rest and (len(rest) > 2 or rest.strip(rest[0]))):
            break
        yield
    quotes = match["quotes"]
    reader.at = match.end()
    return _Opening(quotes, "r" in match["prefix"].lower())


def _copy_items(reader: Reader, write: Write, depth: int, end: str, *, keys: bool) -> Steps[bool]:
    """Write a dict, list or tuple, whose opening bracket follows."""
    if not depth:
        return False
    reader.at += 1
    write("{" if keys else "[")
    first = True
    while (following := (yield from reader.skip_space())) != end:
        if not first:
            write(", ")
        first = False
        if keys:
            if not (yield from _copy_key(reader, write)) or (yield from reader.skip_space()) != ":":
                return False
            reader.at += 1
            write(": ")
            yield from reader.skip_space()
        if not (yield from copy_python(reader, write, depth - 1)):
            return False
        following = yield from reader.skip_space()
        if following == ",":
            reader.at += 1
        elif following != end:
            return False
    reader.at += 1
    write("}" if keys else "]")
    return True


def _copy_key(reader: Reader, write: Write) -> Steps[bool]:
    """Write a key as a JSON string: a number or a word becomes what JSON's encoder makes of it."""
    pieces: list[str] = []
    if not (yield from copy_python(reader, pieces.append, 0)):
        return False
    key = "".join(pieces)
    write(key if key.startswith('"') else quote(key))
    return True


def _copy_string(reader: Reader, write: Write, opening: _Opening) -> Steps[bool]:
    """Write what is inside a string, up to its end, escaped as JSON wants it."""
    mark = opening.quotes[0]
    plain, end = _PLAIN[mark], markers(opening.quotes)
    while True:
        match = plain.match(reader.text, reader.at)
        assert match is not None
        if match.group():
            write(escape(match.group()))
        reader.at = match.end()
        char = yield from reader.peek()
        if not char:
            return False
        if char == "\\":
            reader.at += 1
            if opening.raw:
                following = yield from reader.peek()
                write(escape("\\" + (following if following == mark else "")))
                reader.at += following == mark
            elif not (yield from _copy_escape(reader, write)):
                return False
        elif (yield from reader.accept(end)):
            return True
        else:
            write(escape(char))
            reader.at += 1


def _copy_escape(reader: Reader, write: Write) -> Steps[bool]:
    """Write the character that an escape stands for; its backslash has been read."""
    char = yield from reader.peek()
    if not char:
        return False
    reader.at += 1
    digits = _HEX_DIGITS.get(char, 0)
    if not digits:
        write(escape(_ESCAPES.get(char, "\\" + char)))
        return True
    code = ""
    while (
        len(code) < digits
        and (following := (yield from reader.peek()))
        and following in "0123456789abcdefABCDEF"
    ):
        code += following
        reader.at += 1
    number = int(code, 16) if len(code) == digits else -1
    if 0 <= number <= 0x10FFFF and number not in _SURROGATES:
        write(escape(chr(number)))
    elif number in _SURROGATES:
        # JSON's way to write one character, which models mean; half of such a pair is none.
        while not reader.ended and len(reader.text) - reader.at < 6:
            yield
        low = _LOW.match(reader.text, reader.at) if number < _LOW_BEGINS else None
        write(f"\\u{number:04x}{low.group()}" if low is not None else r"\ufffd")
        reader.at += len(low.group()) if low is not None else 0
    else:
        write(escape("\\" + char + code))
    return True


def _number(word: str) -> str:
    """Return a Python number as JSON has it; "" if it is none."""
    if JSON_NUMBER.fullmatch(word):
        return word
    try:
        return str(int(word, 0))
    except ValueError:
        pass
    try:
        value = float(word)
    except ValueError:
        return ""
    return repr(value) if value - value == 0 else ""


_HEADER: Final = Header(ends=("{", "("), pattern=r"\s*call:(?P<name>[^\s{(]+)\s*")
_COLON: Final = markers(":")


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
        header_match, end, cut = yield from _HEADER.read(context)
        if header_match is None or not (yield from reader.skip_space()):
            context.abandon(cut=cut or header_match is not None)
            return
        close = markers(*self.close)
        reader.take_record()
        out.start_call(header_match["name"])
        if end == "(":
            has_begun, begun = yield from _begin_arguments(reader)
            out.write_arguments(begun)
            is_complete = begun == _NO_ARGUMENTS or (
                has_begun and (yield from _copy_rest(reader, out.write_arguments))
            )
        else:
            value = _Value(reader, out.write_arguments, self.quote, self.close)
            is_complete = yield from value.copy_object(
                context.offered.get(header_match["name"], {}), DEPTH_MAX
            )
        if is_complete:
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
            match = pattern.match(reader.text, pos=reader.at, partial=True)
            if match is None:
                return False
            if match.partial and reader.ended:
                return True
            # A bracket is one of a value's end by what is behind it, which may be still to come.
            if reader.ended or not (match.partial or match.end() == len(reader.text)):
                return in_list or not keys or match["bare"] is None or match["bare"].strip() in keys
            yield


def _bare(text: str, types: frozenset[str]) -> str:
    """A bare value as JSON."""
    if types:
        return cast(text, types)
    return JSON_WORDS.get(text) or (text if JSON_NUMBER.fullmatch(text) else quote(text))
