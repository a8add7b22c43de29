"""What a parser finds in the text of a choice, in order, and the protocol of parsers."""

from typing import NamedTuple, Protocol


class TextDelta(NamedTuple):
    """Text of the answer."""

    text: str


class ReasoningDelta(NamedTuple):
    """Text that the model thought before its answer."""

    text: str


class ToolCallStart(NamedTuple):
    """A tool call begins. `call` counts from 0; `id` is empty unless the model writes ids of its own."""

    call: int
    name: str
    id: str = ""


class ToolArgumentsDelta(NamedTuple):
    """A piece of a call's arguments as JSON text. The pieces of a whole call concatenate to a JSON object."""

    call: int
    text: str


class ToolCallEnd(NamedTuple):
    """The call has all its arguments."""

    call: int


OutputEvent = TextDelta | ReasoningDelta | ToolCallStart | ToolArgumentsDelta | ToolCallEnd


class OutputParser(Protocol):
    """Finds events in the text of one choice. The events, with neighbouring deltas joined, do not depend on its pieces."""

    def push(self, text: str) -> list[OutputEvent]:
        """Events that are certain after this text, which spells out special tokens."""
        ...

    def finish(self) -> list[OutputEvent]:
        """The rest, at the end of the choice."""
        ...
