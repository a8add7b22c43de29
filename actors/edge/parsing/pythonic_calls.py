"""Calls as Python: `[f(a=1), g(b='x')]`. Llama 4, OLMo 3. Arguments are rewritten as JSON while they arrive."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

import regex

from headwater.actors.edge.parsing.context import Context
from headwater.actors.edge.parsing.json_value import JSON_NUMBER, escape, quote
from headwater.actors.edge.parsing.reader import Reader, Steps, Write, markers

DEPTH_MAX: Final = 64
"""Nesting of a value; with more it is malformed."""

_NAME: Final = re.compile(r"[\w.\-]+")
_IDENTIFIER: Final = re.compile(r"\w+")
_WORD: Final = re.compile(r"[-+.\w]+")
_STRING_BEGINS: Final = frozenset("\"'rRuUbB")
_OPENING: Final = regex.compile(r"(?P<prefix>[rRuUbB]{0,2})(?P<quotes>\"\"\"|'''|\"|')")
_PLAIN: Final = {quote_mark: re.compile(rf"[^\\{quote_mark}]*") for quote_mark in "'\""}

_WORDS: Final[Mapping[str, str]] = {
    "True": "true",
    "False": "false",
    "None": "null",
    "true": "true",
    "false": "false",
    "null": "null",
}

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
        known = bool(name) and not (self.strict and name not in context.offered)
        if not known or (yield from reader.skip_space()) != "(":
            self._reject(context)
            return False
        reader.at += 1
        if (yield from reader.skip_space()) != ")":
            key = yield from reader.read_run(_IDENTIFIER)
            if not key or (yield from reader.skip_space()) != "=":
                self._reject(context)
                return False
            reader.at += 1
            reader.take_record()
            out.start_call(name)
            out.write_arguments(f"{{{quote(key)}: ")
            whole = yield from _copy_rest(reader, out.write_arguments)
        else:
            reader.at += 1
            reader.take_record()
            out.start_call(name)
            out.write_arguments("{}")
            whole = True
        if whole:
            out.end_call()
        else:
            yield from reader.copy_value_until(markers(*self.close), out.write_arguments)
        return whole

    def _reject(self, context: Context) -> None:
        if self.strict:
            context.give_back()
        else:
            context.abandon()


def copy_arguments(reader: Reader, write: Write) -> Steps[bool]:
    """Write the arguments behind an opening parenthesis as an object; return whether they are whole."""
    if (yield from reader.skip_space()) == ")":
        reader.at += 1
        write("{}")
        return True
    key = yield from reader.read_run(_IDENTIFIER)
    if not key or (yield from reader.skip_space()) != "=":
        write(key)
        return False
    reader.at += 1
    write(f"{{{quote(key)}: ")
    return (yield from _copy_rest(reader, write))


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
    value = _WORDS.get(word) or _number(word)
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
        found = _OPENING.match(reader.text, reader.at, partial=not reader.ended)
        if found is None:
            return None
        # One quote may be three.
        rest = "" if found.partial else reader.text[found.start("quotes") :]
        if reader.ended or (rest and (len(rest) > 2 or rest.strip(rest[0]))):
            break
        yield
    quotes = found["quotes"]
    reader.at = found.end()
    return _Opening(quotes, "r" in found["prefix"].lower())


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
        found = plain.match(reader.text, reader.at)
        assert found is not None
        if found.group():
            write(escape(found.group()))
        reader.at = found.end()
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
