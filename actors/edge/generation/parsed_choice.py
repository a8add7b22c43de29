"""A choice whose text a parser reads: reasoning and tool calls on their way to the client."""

from collections.abc import Iterable

from headwater.actors.edge.generation.call_ids import CallIds
from headwater.actors.edge.generation.choice import ChoiceWriter
from headwater.actors.edge.generation.encoder import ResponseEncoder
from headwater.actors.edge.generation.events import (
    ChoiceEnd,
    ChoiceResult,
    FinishedCall,
    TokenDetail,
)
from headwater.actors.edge.model.stop_strings import StopStringMatcher
from headwater.actors.edge.parsing.events import (
    OutputEvent,
    OutputParser,
    ReasoningDelta,
    TextDelta,
    ToolArgumentsDelta,
    ToolCallEnd,
    ToolCallStart,
    collect,
)
from headwater.schemas.messages.inference import TokenLogprob


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
            found = self._parser.push(text) if text else []
            for event in found:
                self._reasons = isinstance(event, ReasoningDelta)
            self.reasoning_tokens += self._reasons
            events += found
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
        calls = tuple(FinishedCall(call.id, call.name, call.arguments) for call in output.calls)
        whole = super().result(number, prompt_index, end)
        return whole._replace(text=output.text, reasoning=output.reasoning, calls=calls)

    def _encode_events(self, events: Iterable[OutputEvent]) -> bytes:
        found = [self._with_id(event) for event in merged(events) if self._counts(event)]
        self._events += found
        if self._encoder is None:
            return b""
        parts: list[bytes] = []
        for event in found:
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
    found: list[OutputEvent] = []
    for event in events:
        last = found[-1] if found else None
        if isinstance(event, TextDelta) and isinstance(last, TextDelta):
            found[-1] = TextDelta(last.text + event.text)
        elif isinstance(event, ReasoningDelta) and isinstance(last, ReasoningDelta):
            found[-1] = ReasoningDelta(last.text + event.text)
        elif (
            isinstance(event, ToolArgumentsDelta)
            and isinstance(last, ToolArgumentsDelta)
            and last.call == event.call
        ):
            found[-1] = last._replace(text=last.text + event.text)
        else:
            found.append(event)
    return found
