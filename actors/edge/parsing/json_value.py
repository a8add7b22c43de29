r"""Copying one JSON value out of a stream: it is checked as it passes, and its end is found without reading it twice.

Two mistakes that models make are repaired, since nothing else can be meant: control characters inside a string (a raw
newline) and escapes that JSON does not have (`\d`) are escaped, and Python's `True`, `False` and `None` become JSON's.
Anything else that is not JSON ends the copy.
"""

import json
import re
from typing import Final

import regex

from headwater.actors.edge.parsing.reader import Reader, Steps, Write

JSON_NUMBER: Final = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
"""Does not match the words that Python's decoder accepts too (NaN, Infinity)."""


_SPACE: Final = re.compile(r"[ \t\r\n]*")
_STRING: Final = re.compile(r'[^"\\\x00-\x1f]*')
_WORD: Final = re.compile(r"[-+.0-9A-Za-z]*")
_SURROGATE: Final = re.compile(r"\\u[dD][89a-fA-F]")
_PAIR: Final = regex.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_HEX: Final = re.compile(r"[0-9a-fA-F]{4}")

_LITERALS: Final = {
    "true": "true",
    "false": "false",
    "null": "null",
    "True": "true",
    "False": "false",
    "None": "null",
}

WORD_MAX: Final = 400
"""Characters of a number; no more are held back to see its end."""

_VALUE, _FIRST_VALUE, _KEY, _FIRST_KEY, _COLON, _NEXT = range(6)
"""What is expected; in this order, so that a comparison tells values, keys and punctuation apart."""

_ENDS: Final = frozenset((_FIRST_VALUE, _FIRST_KEY, _NEXT))
"""Where an object or an array may end."""

_OPENING: Final = {"}": "{", "]": "["}


def copy_value(reader: Reader, write: Write) -> Steps[bool]:
    """Copy the JSON value that follows, and return whether it is one.

    If it is not, everything up to the first wrong character has been written and read. The answer's end inside a
    value is such a place too.
    """
    open_brackets: list[str] = []
    expected = _VALUE
    while True:
        # Whatever needs no change is written as it is, in as few pieces as possible.
        start = at = reader.at
        text = reader.text
        while True:
            found = _SPACE.match(text, at)
            assert found is not None
            at = found.end()
            if at >= len(text):
                break
            char = text[at]
            if expected == _COLON and char == ":":
                at += 1
                expected = _VALUE
            elif expected == _NEXT and char == ",":
                at += 1
                expected = _KEY if open_brackets[-1] == "{" else _VALUE
            elif char in "}]" and expected in _ENDS and open_brackets[-1] == _OPENING[char]:
                at += 1
                open_brackets.pop()
                if not open_brackets:
                    _advance(reader, start, at, write)
                    return True
                expected = _NEXT
            elif expected >= _COLON or (expected >= _KEY and char != '"'):
                _advance(reader, start, at, write)
                return False
            elif char in "{[":
                at += 1
                open_brackets.append(char)
                expected = _FIRST_KEY if char == "{" else _FIRST_VALUE
            else:
                _advance(reader, start, at, write)
                copy = copy_string if char == '"' else _copy_word
                if not (yield from copy(reader, write)):
                    return False
                if not open_brackets:
                    return True
                expected = _COLON if expected >= _KEY else _NEXT
                start = at = reader.at
                text = reader.text
        _advance(reader, start, at, write)
        if reader.ended:
            return False
        yield


def _advance(reader: Reader, start: int, at: int, write: Write) -> None:
    """Write what was passed over, and count it as read."""
    if at > start:
        write(reader.text[start:at])
    reader.at = at


def copy_string(reader: Reader, write: Write) -> Steps[bool]:
    """Copy the JSON string whose opening quote follows, and return whether it ended."""
    start = reader.at
    at = start + 1
    while True:
        text = reader.text
        found = _STRING.match(text, at)
        assert found is not None
        at = found.end()
        if at >= len(text):
            _advance(reader, start, at, write)
            if reader.ended:
                return False
            yield
            start = at = reader.at
            continue
        char = text[at]
        if char == '"':
            _advance(reader, start, at + 1, write)
            return True
        _advance(reader, start, at, write)
        if char != "\\":
            write(json.dumps(char)[1:-1])
            reader.at += 1
        elif not (yield from _copy_escape(reader, write)):
            return False
        start = at = reader.at


def _copy_escape(reader: Reader, write: Write) -> Steps[bool]:
    """Copy an escape, whose backslash follows."""
    while len(reader.text) - reader.at < 2 or (
        reader.text[reader.at + 1] == "u" and len(reader.text) - reader.at < 6
    ):
        if reader.ended:
            if len(reader.text) - reader.at < 2:
                _advance(reader, reader.at, len(reader.text), write)
                return False
            break
        yield
    at = reader.at
    char = reader.text[at + 1]
    if char == "u" and _HEX.match(reader.text, at + 2):
        yield from _copy_code(reader, write)
    elif char in '"\\/bfnrt':
        _advance(reader, at, at + 2, write)
    else:
        # The backslash itself is meant; the character after it is read as any other.
        write("'" if char == "'" else "\\\\")
        reader.at = at + (2 if char == "'" else 1)
    return True


def _copy_code(reader: Reader, write: Write) -> Steps[None]:
    """Copy an escape of four digits. Half of a surrogate pair is no character, and readers of JSON refuse it: it becomes U+FFFD."""
    at = reader.at
    if not _SURROGATE.match(reader.text, at):
        _advance(reader, at, at + 6, write)
        return
    while not reader.ended and _PAIR.fullmatch(reader.text[at : at + 12], partial=True):
        if len(reader.text) - at >= 12:
            break
        yield
        at = reader.at
    if _PAIR.match(reader.text, at):
        _advance(reader, at, at + 12, write)
    else:
        write(r"\ufffd")
        reader.at = at + 6


def _copy_word(reader: Reader, write: Write) -> Steps[bool]:
    """Copy a number, or one of the words that JSON has."""
    while True:
        found = _WORD.match(reader.text, reader.at)
        assert found is not None
        if found.end() - reader.at > WORD_MAX:
            return False
        if found.end() < len(reader.text) or reader.ended:
            break
        yield
    word = found.group()
    if word in _LITERALS:
        write(_LITERALS[word])
    elif JSON_NUMBER.fullmatch(word):
        write(word)
    else:
        return False
    reader.at = found.end()
    return True


def read_string(reader: Reader) -> Steps[str | None]:
    """Read the JSON string that follows and return its value; None if none follows or it does not end."""
    if (yield from reader.skip_space()) != '"':
        return None
    pieces: list[str] = []
    if not (yield from copy_string(reader, pieces.append)):
        return None
    value: str = json.loads("".join(pieces))
    # Half a surrogate pair is no character: it could not be sent on.
    return (
        value
        if value.isascii()
        else value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    )


_STRUCTURE: Final = re.compile(r'["\\{}\[\]]')


class BracketCount:
    """Counts brackets outside strings: finds the end of a value that need not be JSON."""

    __slots__ = ("_depth", "_escaped", "_in_string")

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = -1

    def end_of(self, text: str) -> int:
        """Take the next piece; return where the value ends in it, -1 if it does not."""
        escaped, self._escaped = self._escaped, -1
        for found in _STRUCTURE.finditer(text):
            at, char = found.start(), found.group()
            if at == escaped:
                continue
            if char == "\\":
                escaped = at + 1
            elif char == '"':
                self._in_string = not self._in_string
            elif not self._in_string:
                self._depth += 1 if char in "{[" else -1
                if self._depth <= 0:
                    return at + 1
        if escaped == len(text):
            self._escaped = 0
        return -1
