r"""Copying one JSON value out of a stream: it is checked as it passes, and its end is found without reading it twice.

Two mistakes that models make are repaired, since nothing else can be meant: control characters inside a string (a raw
newline) and escapes that JSON does not have (`\d`) are escaped, and Python's `True`, `False` and `None` become JSON's.
Anything else that is not JSON ends the copy.
"""

import ast
import json
import math
import re
from collections.abc import Mapping
from typing import Any, Final, NoReturn

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

JSON_WORDS: Final = {
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
            match = _SPACE.match(text, at)
            assert match is not None
            at = match.end()
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
        match = _STRING.match(text, at)
        assert match is not None
        at = match.end()
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
        match = _WORD.match(reader.text, reader.at)
        assert match is not None
        if match.end() - reader.at > WORD_MAX:
            return False
        if match.end() < len(reader.text) or reader.ended:
            break
        yield
    word = match.group()
    if word in JSON_WORDS:
        write(JSON_WORDS[word])
    elif JSON_NUMBER.fullmatch(word):
        write(word)
    else:
        return False
    reader.at = match.end()
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
        for match in _STRUCTURE.finditer(text):
            at, char = match.start(), match.group()
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


# Values written as plain text, made JSON by the tool's schema: the XML formats have no types of their own.

_encode: Final = json.JSONEncoder(ensure_ascii=False).encode

_REFERENCES_MAX: Final = 16
"""Nested references that are followed in a schema."""

_LITERAL_MAX: Final = 100_000
"""Characters of a value that is tried as a Python literal."""

_NAMES: Final[Mapping[type, str]] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    type(None): "null",
    list: "array",
    dict: "object",
}


def quote(text: str) -> str:
    """Return `text` as a JSON string."""
    return _encode(text)


def escape(text: str) -> str:
    """Return `text` as it stands inside a JSON string."""
    return _encode(text)[1:-1]


def types_of_parameter(schema: Mapping[str, Any], name: str) -> frozenset[str]:
    """Return the JSON types that a tool's schema allows for a parameter; none if it does not say."""
    properties = schema.get("properties")
    declared = properties.get(name) if isinstance(properties, Mapping) else None
    if declared is None:
        declared = schema.get("additionalProperties")
    return frozenset(_types(declared, schema, 0))


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> set[str]:
    if not isinstance(schema, Mapping) or depth > _REFERENCES_MAX:
        return set()
    reference = schema.get("$ref")
    if isinstance(reference, str):
        return _types(_resolve(reference, root), root, depth + 1)
    declared = schema.get("type")
    types = {declared} if isinstance(declared, str) else set()
    if isinstance(declared, list):
        types.update(name for name in declared if isinstance(name, str))
    for key in ("anyOf", "oneOf", "allOf"):
        for choice in schema.get(key) or ():
            types |= _types(choice, root, depth + 1)
    if not types:
        values = schema.get("enum") or ([schema["const"]] if "const" in schema else [])
        types = {_NAMES[type(value)] for value in values if type(value) in _NAMES}
    if types and schema.get("nullable") is True:
        types.add("null")
    return types


def _resolve(reference: str, root: Mapping[str, Any]) -> Any:
    target: Any = root
    for part in reference.removeprefix("#").strip("/").split("/"):
        target = target.get(part) if isinstance(target, Mapping) else None
    return target


def cast(raw: str, types: frozenset[str]) -> str:
    """Return the JSON text of a value that a model wrote as `raw`.

    The value becomes the first of the declared types that it can be read as, text last. Without declared types it is
    JSON if it can be read as such. A value that is none of its types is not lost: it becomes JSON or else text.
    """
    text = raw.strip()
    if "null" in types and text in ("null", "None"):
        return "null"
    if "boolean" in types and text.lower() in ("true", "false"):
        return text.lower()
    # What JSON would not write as a number is text where that is allowed: a postal code, a telephone number.
    numeric = ("integer" in types or "number" in types) and (
        "string" not in types or JSON_NUMBER.fullmatch(text)
    )
    if numeric and (number := _number(text, "number" in types)):
        return number
    kinds = tuple(kind for name, kind in (("object", dict), ("array", list)) if name in types)
    if kinds and (structure := _structure(text, kinds)):
        return structure
    if "string" in types:
        return quote(raw)
    return _any(text) or quote(raw)


def _number(text: str, fractions: bool) -> str:
    if JSON_NUMBER.fullmatch(text) and (fractions or text.lstrip("-").isdigit()):
        return text
    try:
        value = float(text)
    except ValueError:
        return ""
    if not math.isfinite(value) or "_" in text:
        return ""
    if value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return repr(value) if fractions else ""


def _structure(text: str, kinds: tuple[type, ...]) -> str:
    """Return an object or array as JSON; "" if `text` is neither. Python's notation is read as well."""
    try:
        return text if isinstance(_loads(text), kinds) else ""
    except (ValueError, RecursionError):
        pass
    if len(text) > _LITERAL_MAX:
        return ""
    try:
        value = ast.literal_eval(text)
        return json.dumps(value, ensure_ascii=False, allow_nan=False) if isinstance(value, kinds) else ""
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return ""


def _any(text: str) -> str:
    try:
        _loads(text)
    except (ValueError, RecursionError):
        return ""
    return text


def _loads(text: str) -> Any:
    return json.loads(text, parse_constant=_refuse)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
