"""One choice on its way to the client: its tokens become text, calls and events of an encoder.

A `ResponseEncoder` is what an API provides to answer a request: a pure translation of generation's events into the bytes of its responses.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Final, Protocol

from headwater.actors.edge.parsing.grammar import (
    OutputEvent,
    OutputParser,
    ReasoningDelta,
    TextDelta,
    ToolArgumentsDelta,
    ToolCallEnd,
    ToolCallStart,
    collect,
)
from headwater.actors.edge.prompt.request import (
    ChoiceEnd,
    ChoiceResult,
    GenerationResult,
    GenerationStart,
    PromptDetail,
    TokenDetail,
    TokenUsage,
    Turn,
)
from headwater.actors.edge.saga.http_call import request_headers
from headwater.actors.edge.saga.types import Saga
from headwater.actors.edge.tokenizer import Decoder
from headwater.actors.http.asgi import PING, EventStream, Headers, respond
from headwater.actors.http.errors import ApiError
from headwater.schemas.inference import TokenLogprob


class ResponseEncoder(ABC):
    """One response. Streams call `start`, then per choice `start_choice`, deltas and `end_choice`, then `end` or `fail`.

    Each method returns the bytes to send, which may be empty. A whole response is one call of `encode_result`.
    """

    wants_progress: bool = False
    """True if the client asked for continuous usage."""

    def start(self, start: GenerationStart) -> bytes:
        """Begin the stream."""
        return b""

    def start_choice(self, index: int, prompt: PromptDetail | None) -> bytes:
        """Begin a choice. `prompt`: with `echo` or prompt log probabilities."""
        return b""

    @abstractmethod
    def text(self, index: int, text: str, detail: TokenDetail | None) -> bytes:
        """Text of the answer. The only method on the fast path: requests without tools and reasoning have no others."""

    def delta(self, index: int, event: OutputEvent, detail: TokenDetail | None) -> bytes:
        """Reasoning, or a piece of a tool call. Every `ToolCallStart` has its id."""
        raise AssertionError(event)

    def progress(self, usage: TokenUsage) -> None:
        """Usage with the tokens of the next delta: called before each if `wants_progress`."""
        del usage

    @abstractmethod
    def end_choice(self, index: int, end: ChoiceEnd) -> bytes:
        """End a choice."""

    @abstractmethod
    def end(self, result: GenerationResult) -> bytes:
        """End the stream; nothing follows."""

    def fail(self, error: ApiError) -> bytes:
        """End the stream with an error, after its headers were sent; nothing follows."""
        return b"data: " + error.body() + b"\n\n"

    def ping(self) -> bytes:
        """Keep a silent connection alive."""
        return PING

    @abstractmethod
    def encode_result(self, result: GenerationResult) -> bytes:
        """The body of a whole response."""


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
    headers = request_headers(name)
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


# Stop strings.

NO_TOKENS: Final[frozenset[int]] = frozenset()


class StopStringMatcher:
    """Turns tokens into text deltas; withholds text that may be the start of a stop string.

    `keep`: the stop string, or the text of the stop token, that ends the text is part of it. A token of `stop_tokens` is
    the last one, as the engine ends with it; its text is left out, as in vLLM.
    """

    __slots__ = ("_decoder", "_held", "_keep", "_stop_tokens", "_stops", "matched", "stop_token", "stopped")

    def __init__(
        self,
        decoder: Decoder,
        stops: list[str],
        *,
        keep: bool = False,
        stop_tokens: frozenset[int] = NO_TOKENS,
    ) -> None:
        self._decoder = decoder
        self._stops = stops
        self._held = ""
        self._keep = keep
        self.stopped = False
        self.matched = ""
        """The stop string that ended the text."""
        self._stop_tokens = stop_tokens
        self.stop_token: int | None = None
        """The stop token that ended the text."""

    def push(self, tokens: tuple[int, ...]) -> str:
        """Text that can be emitted now. Sets `stopped` once a stop string is complete; no text follows."""
        if self._stop_tokens and tokens and tokens[-1] in self._stop_tokens:
            self.stop_token = tokens[-1]
            if not self._keep:
                tokens = tokens[:-1]
        text = self._decoder.push(tokens)
        return self._show(text) if self._stops else text

    def flush(self) -> str:
        """The withheld text, when the answer ended without a stop string."""
        text = self._decoder.flush()
        if not self._stops:
            return text
        shown = self._show(text)
        if self.stopped:
            return shown
        rest, self._held = self._held, ""
        return shown + rest

    def _show(self, text: str) -> str:
        if self.stopped:
            return ""
        held = self._held + text
        # The stop string that is complete first counts; of two that end together, the longer.
        ends = [(at + len(stop), at) for stop in self._stops if (at := held.find(stop)) >= 0]
        if ends:
            self.stopped = True
            self._held = ""
            end, begin = min(ends)
            self.matched = held[begin:end]
            return held[: end if self._keep else begin]
        keep = max(_overlap(held, stop) for stop in self._stops)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a prefix of `stop`."""
    for size in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0


# A choice whose answer is text only.


class ChoiceWriter:
    """Collects one choice that is nothing but text. With an encoder, of a stream, each piece is translated at once.

    `detailed`: the client asked for tokens or log probabilities.
    """

    __slots__ = (
        "_detailed", "_encoder", "_index", "_logprobs", "_matcher", "_parts", "_tokens", "first_token_s",
        "prompt", "reasoning_tokens",
    )  # fmt: skip

    def __init__(
        self,
        index: int,
        matcher: StopStringMatcher,
        encoder: ResponseEncoder | None,
        *,
        detailed: bool = False,
    ) -> None:
        self.first_token_s = 0.0
        self.reasoning_tokens = 0
        """Tokens of reasoning so far, with the marker that ends it."""
        self.prompt: PromptDetail | None = None
        self._index = index
        self._matcher = matcher
        self._encoder = encoder
        self._detailed = detailed
        self._parts: list[str] = []
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []

    @property
    def stopped(self) -> bool:
        """True once the text contains a stop string."""
        return self._matcher.stopped

    def push(self, tokens: tuple[int, ...], logprobs: tuple[TokenLogprob, ...]) -> tuple[str, bytes]:
        """The text of new tokens, and what to send for it."""
        text = self._matcher.push(tokens)
        if self._detailed:
            self._tokens += tokens
            self._logprobs += logprobs
            self._parts.append(text)
            return text, self._encode(text, TokenDetail(tokens, logprobs))
        if not text:
            return "", b""
        self._parts.append(text)
        return text, self._encoder.text(self._index, text, None) if self._encoder is not None else b""

    def finish(self) -> tuple[str, bytes]:
        """The text that was withheld until the choice ended, and what to send for it."""
        rest = "" if self._matcher.stopped else self._matcher.flush()
        if not rest:
            return "", b""
        self._parts.append(rest)
        return rest, self._encode(rest, None)

    def end(self, reason: str) -> ChoiceEnd:
        """Return how the choice ended. `reason` is the saga's: stop or length."""
        matcher = self._matcher
        return ChoiceEnd("length" if reason == "length" else "stop", matcher.matched, matcher.stop_token)

    def result(self, number: int, prompt_index: int, end: ChoiceEnd) -> ChoiceResult:
        """The whole choice."""
        return ChoiceResult(
            number=number,
            prompt_index=prompt_index,
            text="".join(self._parts),
            reasoning="",
            calls=(),
            end=end,
            detail=TokenDetail(tuple(self._tokens), tuple(self._logprobs)),
            prompt=self.prompt or PromptDetail(),
        )

    def mean_logprob(self) -> float:
        """The mean log probability of its tokens; 0 without any."""
        return sum(item.logprob for item in self._logprobs) / max(1, len(self._logprobs))

    def _encode(self, text: str, detail: TokenDetail | None) -> bytes:
        return self._encoder.text(self._index, text, detail) if self._encoder is not None else b""


# Ids of tool calls: the model's own where it writes usable ones, else new ones.

PREFIX: Final = "call_"

MESSAGES_ID: Final = re.compile(r"[a-zA-Z0-9_-]+\Z")
"""What Anthropic's API demands of an id, also of one that it gave itself: its clients send it back."""


class CallIds:
    """The ids of one answer's calls. Models count their calls from zero in each answer: an id of the conversation is not given again."""

    def __init__(self, make: Callable[[], str], turns: Iterable[Turn], endpoint: str) -> None:
        self._make = make
        self._taken = {call.id for turn in turns for call in turn.calls}
        self._is_strict = endpoint == "messages"

    def choose(self, written: str) -> str:
        """The id of a call for which the model wrote this one, "" for none."""
        usable = written not in self._taken and (not self._is_strict or MESSAGES_ID.match(written))
        chosen = written if written and usable else PREFIX + self._make()
        self._taken.add(chosen)
        return chosen


# A choice whose text a parser reads for reasoning and tool calls.


class ParsedChoiceWriter(ChoiceWriter):
    """See `ChoiceWriter`. `ids` chooses those of calls. Without `parallel` only the first call counts."""

    __slots__ = ("_events", "_ids", "_parallel", "_parser", "_reasons", "_unsent")

    def __init__(
        self,
        index: int,
        matcher: StopStringMatcher,
        encoder: ResponseEncoder | None,
        parser: OutputParser,
        ids: CallIds,
        *,
        parallel: bool = True,
        detailed: bool = False,
        starts_in_reasoning: bool = False,
    ) -> None:
        super().__init__(index, matcher, encoder, detailed=detailed)
        self._parser = parser
        self._ids = ids
        self._parallel = parallel
        self._reasons = starts_in_reasoning
        self._events: list[OutputEvent] = []
        self._unsent = 0

    def push(self, tokens: tuple[int, ...], logprobs: tuple[TokenLogprob, ...]) -> tuple[str, bytes]:
        """See `ChoiceWriter.push`."""
        if self._detailed:
            self._tokens += tokens
            self._logprobs += logprobs
        texts: list[str] = []
        events: list[OutputEvent] = []
        for token in tokens:
            if self._matcher.stopped:
                break
            text = self._matcher.push((token,))
            texts.append(text)
            parsed = self._parser.push(text) if text else []
            for event in parsed:
                self._reasons = isinstance(event, ReasoningDelta)
            self.reasoning_tokens += self._reasons
            events += parsed
        return "".join(texts), self._encode_events(events)

    def finish(self) -> tuple[str, bytes]:
        """See `ChoiceWriter.finish`."""
        rest = "" if self._matcher.stopped else self._matcher.flush()
        events = self._parser.push(rest) if rest else []
        data = self._encode_events(events + self._parser.finish())
        if self._detailed and self._unsent < len(self._tokens):
            data += self._encode("", self._detail())
        return rest, data

    def end(self, reason: str) -> ChoiceEnd:
        """See `ChoiceWriter.end`."""
        started = sum(isinstance(event, ToolCallStart) for event in self._events)
        ended = sum(isinstance(event, ToolCallEnd) for event in self._events)
        end = super().end(reason)
        # A stop of the client's that cuts a call leaves nothing that may be run.
        cut = started > ended and (bool(end.stop) or end.stop_token is not None)
        return ChoiceEnd("tool_calls") if started and reason == "stop" and not cut else end

    def result(self, number: int, prompt_index: int, end: ChoiceEnd) -> ChoiceResult:
        """See `ChoiceWriter.result`."""
        output = collect(self._events)
        plain_result = super().result(number, prompt_index, end)
        return plain_result._replace(text=output.text, reasoning=output.reasoning, calls=output.calls)

    def _encode_events(self, events: Iterable[OutputEvent]) -> bytes:
        counted = [self._with_id(event) for event in merged(events) if self._counts(event)]
        self._events += counted
        if self._encoder is None:
            return b""
        parts: list[bytes] = []
        for event in counted:
            detail = self._detail() if self._detailed and not isinstance(event, ToolCallEnd) else None
            if isinstance(event, TextDelta):
                parts.append(self._encoder.text(self._index, event.text, detail))
            else:
                parts.append(self._encoder.delta(self._index, event, detail))
        return b"".join(parts)

    def _counts(self, event: OutputEvent) -> bool:
        return self._parallel or isinstance(event, TextDelta | ReasoningDelta) or event.call == 0

    def _with_id(self, event: OutputEvent) -> OutputEvent:
        return event._replace(id=self._ids.choose(event.id)) if isinstance(event, ToolCallStart) else event

    def _detail(self) -> TokenDetail:
        """The tokens since the delta before: a parser may withhold some, so they do not align with its deltas."""
        begin, self._unsent = self._unsent, len(self._tokens)
        return TokenDetail(tuple(self._tokens[begin:]), tuple(self._logprobs[begin:]))


def merged(events: Iterable[OutputEvent]) -> list[OutputEvent]:
    """The events with neighbouring deltas of one kind joined."""
    joined: list[OutputEvent] = []
    for event in events:
        last = joined[-1] if joined else None
        if isinstance(event, TextDelta) and isinstance(last, TextDelta):
            joined[-1] = TextDelta(last.text + event.text)
        elif isinstance(event, ReasoningDelta) and isinstance(last, ReasoningDelta):
            joined[-1] = ReasoningDelta(last.text + event.text)
        elif (
            isinstance(event, ToolArgumentsDelta)
            and isinstance(last, ToolArgumentsDelta)
            and last.call == event.call
        ):
            joined[-1] = last._replace(text=last.text + event.text)
        else:
            joined.append(event)
    return joined
