"""The types that grammars and formats of output parsers are made of: their output, their context, and the data of a format."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from headwater.actors.edge.parsing.events import (
    OutputEvent,
    ReasoningDelta,
    TextDelta,
    ToolArgumentsDelta,
    ToolCallEnd,
    ToolCallStart,
)
from headwater.actors.edge.parsing.reader import Reader, Steps


class Trimmed:
    """A run of text whose characters `trim`, next to markup, belong to the markup.

    Templates put newlines around their markers, and models write them so. Such characters are held back until it is
    known what follows them: text keeps them, markup takes them.
    """

    __slots__ = ("_held", "_holds_markup", "_lead", "_make", "_out", "_trim", "written")

    def __init__(
        self, out: list[OutputEvent], make: type[TextDelta] | type[ReasoningDelta], trim: str
    ) -> None:
        self._out = out
        self._make: Final = make
        self._trim: Final = trim
        self._held: list[str] = []
        self._holds_markup = False
        self._lead = ""
        self.written = False
        """True once anything but whitespace was written since `start`."""

    def start(self, lead: str = "") -> None:
        """Begin a run. Characters `lead` at its beginning belong to the markup before it."""
        self.drop_held()
        self._lead = lead
        self.written = False

    def write(self, piece: str) -> None:
        """Append text of the run."""
        if self._lead:
            piece = piece.lstrip(self._lead)
            if not piece:
                return
            self._lead = ""
        trim = self._trim
        if not trim and not self._held:
            if piece:
                self.written = self.written or not piece.isspace()
                self._out.append(self._make(piece))
            return
        # Behind markup that is held back whitespace decides nothing, whatever is trimmed.
        body = piece.rstrip(trim) if trim else piece if piece.strip() else ""
        if not body:
            if piece:
                self._held.append(piece)
            return
        if self._held:
            text = "".join([*self._held, body])
            self.drop_held()
        else:
            text = body
        if len(body) < len(piece):
            self._held.append(piece[len(body) :])
        self.written = True
        self._out.append(self._make(text))

    @property
    def holds_markup(self) -> bool:
        """True while a marker is held back."""
        return self._holds_markup

    def hold_markup(self, marker: str) -> None:
        """Append a marker that is text if text follows it, and nothing if markup does, or the answer's end."""
        self._held.append(marker)
        self._holds_markup = True

    def drop_held(self) -> None:
        """Markup follows: what was held back belongs to it."""
        self._held = []
        self._holds_markup = False

    def keep_held(self) -> None:
        """The answer ends: whitespace that was held back is text, but next to markup."""
        text = "" if self._holds_markup else "".join(self._held)
        self.drop_held()
        if text:
            self.written = True
            self._out.append(self._make(text))


class Output:
    """The events of an answer, as a grammar writes them."""

    __slots__ = ("_call", "_ended", "events", "reasoning", "text")

    def __init__(self, trim: str, reasoning_trim: str, *, parse_reasoning: bool) -> None:
        self.events: list[OutputEvent] = []
        self.text = Trimmed(self.events, TextDelta, trim)
        self.reasoning = (
            Trimmed(self.events, ReasoningDelta, reasoning_trim)
            if parse_reasoning
            else Trimmed(self.events, TextDelta, "")
        )
        self._call = -1
        self._ended = False

    @property
    def calls(self) -> int:
        """How many calls began."""
        return self._call + 1

    def take(self) -> list[OutputEvent]:
        """Return the events written since the last call."""
        events = self.events[:]
        self.events.clear()
        return events

    def start_call(self, name: str, call_id: str = "") -> None:
        """Begin the next call. Whitespace before it belongs to its markup."""
        self._ended = False
        self.text.drop_held()
        self.reasoning.drop_held()
        self._call += 1
        self.events.append(ToolCallStart(self._call, name, call_id))

    def write_arguments(self, text: str) -> None:
        """Append to the current call's arguments."""
        if text:
            self.events.append(ToolArgumentsDelta(self._call, text))

    def write_trailing(self, text: str) -> None:
        """Append to a call that did not end properly; behind one that did, only whitespace can be dropped."""
        if not self._ended:
            self.write_arguments(text)
        else:
            self.text.write(text)

    def end_call(self) -> None:
        """The current call ended properly."""
        self._ended = True
        self.events.append(ToolCallEnd(self._call))


# The context of a grammar, and the kinds of call.

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
        """The sink of text that only looked like a call."""
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
        """Give back what was read, as `give_back` does; but if the answer's end cut the call off, drop its markup.

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


# The data of a format, from which a parser is made.


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a model marks its reasoning.

    `open` and `close` are the markers; the characters `trim` next to them belong to them. `starts` says when an
    answer begins inside reasoning: "prompt" if the rendered prompt ends inside it, "always" if the model never writes
    the opening marker. `framing` and `ends_before` are as `framing` and `end_reasoning` of tool formats, for markers that
    are there without tools as well, and so is `whole`.
    """

    open: tuple[str, ...] = ("<think>",)
    close: tuple[str, ...] = ("</think>",)
    trim: str = "\n"
    starts: str = "prompt"
    framing: tuple[str, ...] = ()
    ends_before: tuple[str, ...] = ()
    whole: CallGrammar | None = None


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes tool calls.

    `calls` maps the markers that open calls to the grammar that reads on from there, `framing` are markers that carry
    no meaning of their own. The characters `trim` next to markers belong to them. `end_reasoning` are beginnings of
    calls that end reasoning although it was not closed.
    """

    calls: Mapping[str, CallGrammar] = field(default_factory=dict)
    framing: tuple[str, ...] = ()
    trim: str = "\n"
    end_reasoning: tuple[str, ...] = ()
    whole: CallGrammar | None = None
    """What the answer, apart from reasoning, consists of."""
