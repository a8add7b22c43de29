"""A request's events as generation produces them, of every type: what each API's encoder translates in its golden transcripts."""

from headwater.actors.edge.answer.choice import ResponseEncoder
from headwater.actors.edge.parsing.grammar import (
    OutputEvent,
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
)

START = GenerationStart("r1", "tiny", 1_700_000_000, TokenUsage(48, 0, 0, 0))
USAGE = TokenUsage(48, 21, 32, 12, 5)

AGENT: tuple[OutputEvent, ...] = (
    ReasoningDelta("Two cities,"),
    ReasoningDelta(" two calls."),
    TextDelta("I look it up."),
    ToolCallStart(0, "get_weather", "call_a"),
    ToolArgumentsDelta(0, '{"city":'),
    ToolArgumentsDelta(0, ' "Zürich"}'),
    ToolCallEnd(0),
    ToolCallStart(1, "get_weather", "call_b"),
    ToolArgumentsDelta(1, '{"city": "Paris"}'),
    ToolCallEnd(1),
)
"""Reasoning, text and two parallel calls."""

TEXT: tuple[OutputEvent, ...] = (TextDelta('A "quoted" word'), TextDelta(" and a\nline."))


def stream(encoder: ResponseEncoder, events: tuple[OutputEvent, ...], end: ChoiceEnd) -> bytes:
    """Everything that a stream of one choice sends, with a ping where the client waits for the first token."""
    sent = [encoder.start(START), encoder.start_choice(0, None), encoder.ping()]
    for event in events:
        if isinstance(event, TextDelta):
            sent.append(encoder.text(0, event.text, None))
        else:
            sent.append(encoder.delta(0, event, None))
    sent += [encoder.end_choice(0, end), encoder.end(result(events, end))]
    return b"".join(sent)


def result(events: tuple[OutputEvent, ...], end: ChoiceEnd) -> GenerationResult:
    """The same as a whole answer."""
    whole = collect(events)
    choice = ChoiceResult(
        number=0,
        prompt_index=0,
        text=whole.text,
        reasoning=whole.reasoning,
        calls=whole.calls,
        end=end,
        detail=TokenDetail(),
        prompt=PromptDetail(),
    )
    return GenerationResult(START, (choice,), USAGE)
