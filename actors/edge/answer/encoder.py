"""What an API provides to answer a request: a pure translation of generation's events into the bytes of its responses."""

from typing import Protocol

from headwater.actors.edge.parsing.events import OutputEvent
from headwater.actors.edge.prompt.request import (
    ChoiceEnd,
    GenerationResult,
    GenerationStart,
    PromptDetail,
    TokenDetail,
    TokenUsage,
)
from headwater.actors.edge.saga.types import Saga
from headwater.actors.http.asgi import EventStream, Headers, respond
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
        """True if the client asked for continuous usage."""
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


# The sink of a response's bytes: an HTTP exchange, or an API's equivalent such as a WebSocket.


class ByteSink(Protocol):
    """One response. A stream is `start`, any number of `write`, and `settle`; a whole response is one `respond`."""

    @property
    def cut(self) -> bool:
        """True if the client did not read for too long: what is written is discarded."""
        ...

    async def start(self, headers: Headers) -> None:
        """Begin the stream: headers, and what was written before."""
        ...

    def write(self, data: bytes, *, last: bool = False) -> None:
        """Send now, or as soon as the client reads. Does not block. `last` ends the stream."""
        ...

    async def settle(self) -> None:
        """Wait until everything was sent."""
        ...

    async def respond(self, body: bytes, headers: Headers) -> None:
        """Send a whole response."""
        ...


class HttpSink(EventStream):
    """Server-sent events, or one JSON document with status 200."""

    async def respond(self, body: bytes, headers: Headers) -> None:
        """See `ByteSink.respond`."""
        await respond(self._send, 200, body, headers)


def routing_headers(name: str, saga: Saga, *, hides_cached: bool = False) -> Headers:
    """The headers of the request `name`, whose first choice is `saga`.

    `hides_cached`: they do not say how much of the prompt is cached.
    """
    headers: Headers = [(b"x-request-id", name.encode())]
    decision = saga.decision
    if decision is not None:
        headers += [
            (b"x-headwater-worker", decision.worker.encode()),
            (b"x-headwater-log-position", b"%d" % decision.position),
        ]
        if not hides_cached:
            headers.append((b"x-headwater-cached-blocks", b"%d" % decision.chosen.cached_blocks))
        if decision.waited_ms:
            headers.append((b"x-headwater-waited-ms", b"%d" % decision.waited_ms))
        if decision.leg:
            # A stream's headers are sent when the prompt is placed, before its decode worker is chosen.
            headers.append((b"x-headwater-leg", decision.leg.encode()))
    if saga.prefilled_by:
        headers.append((b"x-headwater-prefill-worker", saga.prefilled_by.encode()))
    return headers
