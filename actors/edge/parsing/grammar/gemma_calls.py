"""Gemma's calls: `call:name{key:<|"|>text<|"|>,other:[1,true]}`, rewritten as JSON while they arrive."""

import re
from dataclasses import dataclass
from typing import Final

from headwater.actors.edge.parsing.casting import escape, quote
from headwater.actors.edge.parsing.grammar.context import Context
from headwater.actors.edge.parsing.grammar.headed_calls import Header
from headwater.actors.edge.parsing.grammar.pythonic_calls import DEPTH_MAX
from headwater.actors.edge.parsing.grammar.reader import Markers, Reader, Steps, Write, markers

_HEADER: Final = Header(ends=("{",), pattern=r"\s*call:(?P<name>[^\s{]+)\s*")
_COLON: Final = markers(":")
_WORD_ENDS: Final = markers(",", "}", "]")
_WORD: Final = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")


@dataclass(frozen=True, slots=True)
class GemmaCalls:
    """One call. Strings stand between markers `quote`, keys are bare; a bare value that is no JSON word is a string."""

    close: tuple[str, ...]
    quote: str = '<|"|>'

    def read(self, context: Context, _marker: str) -> Steps[None]:
        """Read one call."""
        reader, out = context.reader, context.out
        found, _end = yield from _HEADER.read(context)
        if found is None or not (yield from reader.skip_space()):
            context.abandon()
            return
        reader.take_record()
        out.start_call(found["name"])
        close = markers(*self.close)
        if (yield from _copy_object(reader, out.write_arguments, markers(self.quote), DEPTH_MAX)):
            out.end_call()
            yield from reader.accept_after_space(close)
        else:
            yield from reader.copy_until(close, out.write_arguments)


def _copy_object(reader: Reader, write: Write, quotes: Markers, depth: int) -> Steps[bool]:
    """Write an object whose opening brace has been read; return whether it is well-formed."""
    if not depth:
        return False
    write("{")
    first = True
    while (yield from reader.skip_space()) != "}":
        if (yield from reader.accept(quotes)):
            key, _end = yield from reader.read_until(quotes)
            _rest, end = yield from reader.read_until(_COLON)
        else:
            key, end = yield from reader.read_until(_COLON)
            key = key.strip()
        if not end:
            write(key)
            return False
        write(("" if first else ", ") + quote(key) + ": ")
        first = False
        if not (yield from _copy_value(reader, write, quotes, depth - 1)):
            return False
        if (yield from reader.skip_space()) == ",":
            reader.at += 1
    reader.at += 1
    write("}")
    return True


def _copy_array(reader: Reader, write: Write, quotes: Markers, depth: int) -> Steps[bool]:
    if not depth:
        return False
    write("[")
    first = True
    while (yield from reader.skip_space()) != "]":
        if not first:
            write(", ")
        first = False
        if not (yield from _copy_value(reader, write, quotes, depth - 1)):
            return False
        if (yield from reader.skip_space()) == ",":
            reader.at += 1
    reader.at += 1
    write("]")
    return True


def _copy_value(reader: Reader, write: Write, quotes: Markers, depth: int) -> Steps[bool]:
    following = yield from reader.skip_space()
    if (yield from reader.accept(quotes)):
        write('"')
        if not (yield from reader.copy_until(quotes, lambda text: write(escape(text)))):
            return False
        write('"')
        return True
    if following in ("{", "["):
        reader.at += 1
        copy = _copy_object if following == "{" else _copy_array
        return (yield from copy(reader, write, quotes, depth))
    word, end = yield from reader.read_until(_WORD_ENDS)
    reader.at -= len(end)
    word = word.strip()
    if not end or not word:
        write(word)
        return False
    write(word if _WORD.fullmatch(word) else quote(word))
    return True
