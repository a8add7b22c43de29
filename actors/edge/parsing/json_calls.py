"""Calls as JSON objects: with a name and arguments (Hermes, Qwen, Llama 3, many others), or with the name as the only key."""

import json
from dataclasses import dataclass
from typing import Final

from headwater.actors.edge.parsing.context import Context
from headwater.actors.edge.parsing.json_value import BracketCount, copy_value, read_string
from headwater.actors.edge.parsing.reader import Steps, markers


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
            self._reject(context)
            return
        yield from reader.accept_end(markers(*self.close))

    def _reject(self, context: Context) -> None:
        if self.strict:
            context.give_back()
        else:
            context.abandon()

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
            self._reject(context)


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
        whole = yield from self._read_members()
        if whole and self._name and not self._started:
            self._start()
            out.write_arguments("{}" if self._early is None else "".join(self._early))
        if not self._started:
            if self._grammar.strict and self._has_key:
                yield from _pass_over(self._context)
            elif self._grammar.strict:
                self._context.give_back()
            else:
                self._context.abandon(cut=not whole)
            return False
        # Models forget the object's own brace, but a marker after whole arguments leaves no doubt.
        if whole or (
            self._arguments_whole and (yield from reader.accept_after_space(markers(*self._grammar.close)))
        ):
            out.end_call()
        return whole

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
