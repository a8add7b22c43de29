"""What a grammar works with, and what a kind of call is."""

from collections.abc import Mapping
from typing import Any, Final, Protocol

from headwater.actors.edge.parsing.grammar.output import Output
from headwater.actors.edge.parsing.grammar.reader import Reader, Steps

READ_AGAIN_MAX: Final = 1 << 18
"""Characters of an answer that are read again behind markers that open no call: an answer full of markers costs no more."""


class Context:
    """The state of one answer's parser that its grammar shares."""

    __slots__ = ("_marker", "_read_again", "no_call", "offered", "out", "parse_tools", "reader")

    def __init__(
        self, reader: Reader, out: Output, offered: Mapping[str, Mapping[str, Any]], *, parse_tools: bool
    ) -> None:
        self.reader = reader
        self.out = out
        self.parse_tools = parse_tools
        self.offered = offered
        """The parameters' schemas of each tool that the request offers, by name."""
        self.no_call = out.text
        """Where the text goes that only looked like a call."""
        self._marker = ""
        self._read_again = 0

    def begin(self, marker: str) -> None:
        """Record from here on what may be a call; `marker` opens it and follows, "" if it is one more behind another."""
        self._marker = marker
        self.reader.record()
        self.reader.at += len(marker)

    def give_back(self) -> None:
        """What was read since `begin` is no call after all: its marker is text, and what is behind the marker is read again."""
        kept = len(self._marker)
        if self._read_again < READ_AGAIN_MAX:
            before = len(self.reader.text) - self.reader.at
            self.no_call.write(self.reader.take_record_back(kept))
            self._read_again += len(self.reader.text) - before
        else:
            self.no_call.write(self.reader.take_record())

    def abandon(self, *, cut: bool = True) -> None:
        """As `give_back`, but if the answer's end cut the call off, its markup is dropped.

        A call that was cut off before its first argument says nothing that a client could use. `cut`: all that was read may be the
        beginning of a call.
        """
        if not (cut and self.reader.ended and self.reader.at >= len(self.reader.text)):
            self.give_back()
        elif (text := self.reader.take_record()).isspace():
            self.no_call.write(text)


class CallGrammar(Protocol):
    """Reads the call, or calls, that a marker opens.

    It is resumed with the marker read and a record begun before it (`Context.begin`). It must end the record: with
    `reader.take_record` once it is sure of a call, or by giving it back.
    """

    def read(self, context: Context, marker: str) -> Steps[None]:
        """Read the calls that `marker` opens, up to the end of the last."""
        ...
