"""What an API provides to answer a request: a pure translation of generation's events into the bytes of its responses."""

from typing import Protocol

from headwater.actors.edge.generation.events import (
    ChoiceEnd,
    GenerationResult,
    GenerationStart,
    PromptDetail,
    TokenDetail,
    TokenUsage,
)
from headwater.actors.edge.parsing.events import OutputEvent
from headwater.actors.http.errors import ApiError


class ResponseEncoder(Protocol):
    """One response. Streams call `start`, then per choice `start_choice`, deltas and `end_choice`, then `end` or `fail`.

    Each method returns the bytes to send, which may be empty. A whole response is one call of `encode_result`.
    """

    def start(self, start: GenerationStart) -> bytes:
        """Begin the stream."""
        ...

    def start_choice(self, index: int, prompt: PromptDetail | None) -> bytes:
        """Begin a choice. `prompt`: with `echo` or prompt log probabilities."""
        ...

    def text(self, index: int, text: str, detail: TokenDetail | None) -> bytes:
        """Text of the answer. The only method on the fast path: requests without tools and reasoning have no others."""
        ...

    def delta(self, index: int, event: OutputEvent, detail: TokenDetail | None) -> bytes:
        """Reasoning, or a piece of a tool call. Every `ToolCallStart` has its id."""
        ...

    def progress(self, usage: TokenUsage) -> None:
        """Usage with the tokens of the next delta: called before each if `wants_progress`."""
        ...

    @property
    def wants_progress(self) -> bool:
        """Whether the client asked for continuous usage."""
        ...

    def end_choice(self, index: int, end: ChoiceEnd) -> bytes:
        """End a choice."""
        ...

    def end(self, result: GenerationResult) -> bytes:
        """End the stream; nothing follows."""
        ...

    def fail(self, error: ApiError) -> bytes:
        """End the stream with an error, after its headers were sent; nothing follows."""
        ...

    def ping(self) -> bytes:
        """Keep a silent connection alive."""
        ...

    def encode_result(self, result: GenerationResult) -> bytes:
        """The body of a whole response."""
        ...
