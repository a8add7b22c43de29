"""What a grammar writes to: the events, with whitespace next to markup dropped."""

from typing import Final

from headwater.actors.edge.parsing.events import (
    OutputEvent,
    ReasoningDelta,
    TextDelta,
    ToolArgumentsDelta,
    ToolCallEnd,
    ToolCallStart,
)


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
        """Whether anything but whitespace was written since `start`."""

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
        """Whether a marker is held back."""
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
