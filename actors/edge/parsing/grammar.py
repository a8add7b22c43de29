"""What output parsers are made of: the events that they give (deltas of text and reasoning, and tool calls in pieces), the tools that a request offers,
the context that grammars read, and the data of a format.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

from headwater.actors.edge.parsing.reader import Reader, Steps


class TextDelta(NamedTuple):
    """A piece of the answer's text."""

    text: str


class ReasoningDelta(NamedTuple):
    """A piece of the answer's reasoning."""

    text: str


class ToolCallStart(NamedTuple):
    """A tool call begins.

    `call` counts the answer's calls from 0. `id` is the one that the model wrote (Kimi K2, Mistral), or "": then the
    edge makes one.
    """

    call: int
    name: str
    id: str = ""


class ToolArgumentsDelta(NamedTuple):
    """A piece of a call's arguments, as JSON text.

    The pieces of a call that has a `ToolCallEnd` are, put together, a valid JSON object. Of a call that was cut off or
    is malformed they are what can be said so far, or the text as the model wrote it.
    """

    call: int
    text: str


class ToolCallEnd(NamedTuple):
    """A tool call ended properly. A call that the answer's end cut off, or that is malformed, has none."""

    call: int


OutputEvent = TextDelta | ReasoningDelta | ToolCallStart | ToolArgumentsDelta | ToolCallEnd


class ParsedCall(NamedTuple):
    """A tool call as a whole. `complete`: whether it ended properly."""

    name: str
    id: str
    arguments: str
    complete: bool


class ParsedOutput(NamedTuple):
    """An answer as a whole."""

    text: str
    reasoning: str
    calls: tuple[ParsedCall, ...]


def collect(events: Iterable[OutputEvent]) -> ParsedOutput:
    """Put the events of one answer together."""
    text: list[str] = []
    reasoning: list[str] = []
    starts: list[ToolCallStart] = []
    arguments: list[list[str]] = []
    ended: set[int] = set()
    for event in events:
        match event:
            case TextDelta(piece):
                text.append(piece)
            case ReasoningDelta(piece):
                reasoning.append(piece)
            case ToolCallStart():
                starts.append(event)
                arguments.append([])
            case ToolArgumentsDelta(call, piece):
                arguments[call].append(piece)
            case ToolCallEnd(call):
                ended.add(call)
    calls = tuple(
        ParsedCall(start.name, start.id, "".join(arguments[start.call]), start.call in ended)
        for start in starts
    )
    return ParsedOutput("".join(text), "".join(reasoning), calls)


# The tools that a request offers.


def offered_tools(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return the JSON schema of each tool's parameters, by name.

    Definitions may have the form of any API: with or without `function` around them, with `parameters` or
    `input_schema`.
    """
    offered: dict[str, Mapping[str, Any]] = {}
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            schema = function.get("parameters", function.get("input_schema"))
            offered[function["name"]] = schema if isinstance(schema, Mapping) else {}
    return offered


# The output of a grammar.


class Trimmed:
    """A run of text whose characters `trim`, next to markup, belong to the markup.

    Templates put newlines around their markers, and models write them so. Such characters are held back until it is
    known what follows them: text keeps them, markup takes them.
    """

    __slots__ = ("_held", "_lead", "_make", "_out", "_trim", "holds_markup", "written")

    def __init__(
        self, out: list[OutputEvent], make: type[TextDelta] | type[ReasoningDelta], trim: str
    ) -> None:
        self._out = out
        self._make: Final = make
        self._trim: Final = trim
        self._held: list[str] = []
        self.holds_markup = False
        """True while a marker is held back."""
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

    def hold_markup(self, marker: str) -> None:
        """Append a marker that is text if text follows it, and nothing if markup does, or the answer's end."""
        self._held.append(marker)
        self.holds_markup = True

    def drop_held(self) -> None:
        """Markup follows: what was held back belongs to it."""
        self._held = []
        self.holds_markup = False

    def keep_held(self) -> None:
        """The answer ends: whitespace that was held back is text, but next to markup."""
        text = "" if self.holds_markup else "".join(self._held)
        self.drop_held()
        if text:
            self.written = True
            self._out.append(self._make(text))


class Output:
    """The events of an answer, as a grammar writes them."""

    __slots__ = ("_call", "_ended", "events", "reasoning", "text")

    def __init__(self, trim: str, reasoning_trim: str) -> None:
        self.events: list[OutputEvent] = []
        self.text = Trimmed(self.events, TextDelta, trim)
        self.reasoning = Trimmed(self.events, ReasoningDelta, reasoning_trim)
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
        marker_length = len(self._marker)
        if self._read_again < READ_AGAIN_MAX:
            before = len(self.reader.text) - self.reader.at
            self.no_call.write(self.reader.take_record_back(marker_length))
            self._read_again += len(self.reader.text) - before
        else:
            self.no_call.write(self.reader.take_record())

    def abandon(self, *, cut: bool = True, strict: bool = False) -> None:
        """Give back what was read, as `give_back` does; but if the answer's end cut the call off, drop its markup.

        A call that was cut off before its first argument says nothing that a client could use. `cut`: all that was read may be the
        beginning of a call. `strict`: no marker opened it, so that it is text however it ends.
        """
        if strict or not (cut and self.reader.ended and self.reader.at >= len(self.reader.text)):
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


class OutputParser:
    """Turns the text of one answer into events: it resumes a grammar with each piece of text."""

    __slots__ = ("_grammar", "_out", "_reader")

    def __init__(self, context: Context, grammar: Steps[None]) -> None:
        self._reader: Final = context.reader
        self._out: Final = context.out
        self._grammar: Steps[None] | None = grammar

    def push(self, text: str) -> list[OutputEvent]:
        """Take the next piece of the answer and return the events it completes.

        The text has its special tokens spelled out, apart from the one that ends the turn. Pieces may be cut anywhere,
        also inside a marker: the events, with adjacent deltas merged, do not depend on the cuts. Never raises.
        """
        if text:
            self._reader.feed(text)
            self._resume()
        return self._out.take()

    def finish(self) -> list[OutputEvent]:
        """Return the remaining events: the answer has ended."""
        self._reader.ended = True
        self._resume()
        return self._out.take()

    def _resume(self) -> None:
        if self._grammar is not None:
            try:
                next(self._grammar)
            except StopIteration:
                self._grammar = None


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
