"""What a grammar works with, and what a kind of call is."""

from collections.abc import Mapping
from typing import Any, Protocol

from headwater.actors.edge.parsing.grammar.output import Output
from headwater.actors.edge.parsing.grammar.reader import Reader, Steps


class Context:
    """The state of one answer's parser that its grammar shares."""

    __slots__ = ("offered", "out", "parse_tools", "reader")

    def __init__(
        self, reader: Reader, out: Output, offered: Mapping[str, Mapping[str, Any]], *, parse_tools: bool
    ) -> None:
        self.reader = reader
        self.out = out
        self.parse_tools = parse_tools
        self.offered = offered
        """The parameters' schemas of each tool that the request offers, by name."""

    def give_back(self) -> None:
        """Write what was read since `reader.record` as text: it is no call after all."""
        self.out.text.write(self.reader.take_record())

    def abandon(self) -> None:
        """As `give_back`, but if the answer's end cut the call off, its markup is dropped.

        A call that was cut off before its first argument says nothing that a client could use.
        """
        text = self.reader.take_record()
        if not (self.reader.ended and self.reader.at >= len(self.reader.text)) or text.isspace():
            self.out.text.write(text)


class CallGrammar(Protocol):
    """Reads the call, or calls, that a marker opens.

    It is resumed with the marker read and `reader.record` begun before it. It must end the record: with
    `take_record` once it is sure of a call, or by giving it back.
    """

    def read(self, context: Context, marker: str) -> Steps[None]:
        """Read the calls that `marker` opens, up to the end of the last."""
        ...
