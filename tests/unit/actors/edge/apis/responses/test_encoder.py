"""Events of streams, of every type that occurs: golden transcripts, checked by the official client's types."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from headwater.actors.edge.apis.responses_encoder import ResponsesEncoder, json_line, new_resource
from headwater.actors.edge.apis.responses_requests import generation_request
from headwater.actors.edge.apis.responses_types import CreateFields
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
from headwater.actors.http.errors import overloaded
from headwater.schemas.inference import TokenLogprob
from tests.support.marks import OFFICIAL_CLIENT
from tests.unit.actors.edge.apis.responses.official import check_event, check_response, events_of

pytestmark = OFFICIAL_CLIENT

GOLDEN = Path(__file__).parent / "golden"
START = GenerationStart("0123abcd", "model-1", 1_700_000_000, TokenUsage(12, 0))
USAGE = TokenUsage(12, 7, 8, 4, 3)
TOOLS = [
    {"type": "function", "name": "get_weather", "parameters": {"type": "object"}, "description": "Weather."},
    {"type": "custom", "name": "run", "description": "Runs code."},
]
LOGPROBS = TokenDetail(
    (1, 2), (TokenLogprob(-0.5, ((1, -0.5), (9, -2.0))), TokenLogprob(-0.25, ((2, -0.25),)))
)


class Detailed(NamedTuple):
    text: str
    detail: TokenDetail


Piece = str | Detailed | OutputEvent


class Names:
    def text_of(self, token: int) -> str:
        return f"t{token}"

    def bytes_of(self, token: int) -> bytes:
        return b"t%d" % token


def encoder_of(**more: Any) -> ResponsesEncoder:
    """An encoder of a request with these further fields."""
    fields = msgspec.convert({"model": "m", "input": "Hello.", "tools": TOOLS, **more}, CreateFields)
    _, tools = generation_request(fields, (), fields.items(), START.id, stream=True)
    resource = new_resource(fields, START.id, tools.echo, {"temperature": 0.6}, stored=True)
    encrypted = fields.includes("reasoning.encrypted_content")
    return ResponsesEncoder(resource, Names(), lambda: 1_700_000_005, tools, encrypted_reasoning=encrypted)


def streamed(encoder: ResponsesEncoder, pieces: list[Piece], end: ChoiceEnd) -> bytes:
    parts = [encoder.start(START), encoder.start_choice(0, None)]
    for piece in pieces:
        if isinstance(piece, str):
            parts.append(encoder.text(0, piece, None))
        elif isinstance(piece, Detailed):
            parts.append(encoder.text(0, piece.text, piece.detail))
        else:
            parts.append(encoder.delta(0, piece, None))
    parts += [encoder.end_choice(0, end), encoder.end(result_of(pieces, end))]
    return b"".join(parts)


def result_of(pieces: list[Piece], end: ChoiceEnd) -> GenerationResult:
    """The whole answer that consists of these pieces."""
    detail = next((piece.detail for piece in pieces if isinstance(piece, Detailed)), TokenDetail())
    whole = collect(
        TextDelta(piece if isinstance(piece, str) else piece.text)
        if isinstance(piece, str | Detailed)
        else piece
        for piece in pieces
    )
    choice = ChoiceResult(0, 0, whole.text, whole.reasoning, whole.calls, end, detail, PromptDetail())
    return GenerationResult(START, (choice,), USAGE)


STOP, LENGTH, CALLS = ChoiceEnd("stop"), ChoiceEnd("length"), ChoiceEnd("tool_calls")
SCRIPTS: dict[str, tuple[list[Piece], ChoiceEnd, dict[str, Any]]] = {
    "text": (["Hel", "lo, \u201cyou\u201d\n", "\U0001f30d"], STOP, {}),
    "empty": ([], STOP, {}),
    "cut_off": (["Hel"], LENGTH, {"max_output_tokens": 16}),
    "logprobs": (
        [Detailed("ab", LOGPROBS)],
        STOP,
        {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
    ),
    "reasoning": (
        [ReasoningDelta("Let me "), ReasoningDelta("think."), "Done."],
        STOP,
        {"include": ["reasoning.encrypted_content"], "reasoning": {"effort": "low"}},
    ),
    "reasoning_cut_off": ([ReasoningDelta("Let me ")], LENGTH, {}),
    "function_calls": (
        [
            "I look it up.",
            ToolCallStart(0, "get_weather", "call_a"),
            ToolArgumentsDelta(0, '{"city":'),
            ToolArgumentsDelta(0, '"Berlin"}'),
            ToolCallEnd(0),
            ToolCallStart(1, "get_weather", "call_b"),
            ToolArgumentsDelta(1, "{}"),
            ToolCallEnd(1),
        ],
        CALLS,
        {"tool_choice": {"type": "function", "name": "get_weather"}},
    ),
    "interleaved_calls": (
        [
            ToolCallStart(0, "get_weather", "call_a"),
            ToolCallStart(1, "get_weather", "call_b"),
            ToolArgumentsDelta(1, "{}"),
            ToolArgumentsDelta(0, "{}"),
            ToolCallEnd(1),
            ToolCallEnd(0),
        ],
        CALLS,
        {"tool_choice": "required"},
    ),
    "custom_call": (
        [
            ToolCallStart(0, "run", "call_a"),
            ToolArgumentsDelta(0, '{"input": "print('),
            ToolArgumentsDelta(0, '1)"}'),
            ToolCallEnd(0),
        ],
        CALLS,
        {"parallel_tool_calls": False},
    ),
}


def check_golden(name: str, data: bytes) -> None:
    """Compare with the transcript; GOLDEN=write renews it."""
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("GOLDEN") == "write":
        path.write_bytes(data)
    assert data == path.read_bytes()


@pytest.mark.parametrize("name", SCRIPTS)
def test_stream_is_as_recorded_and_official(name: str) -> None:
    pieces, end, more = SCRIPTS[name]
    stream = streamed(encoder_of(**more), pieces, end)
    check_golden(name, stream)
    events = events_of(stream)
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    last = events[-1]
    assert last.type == ("response.incomplete" if end is LENGTH else "response.completed")
    assert last.response.usage.input_tokens_details.cached_tokens == 8
    assert last.response.usage.input_tokens_details.cache_write_tokens == 4


@pytest.mark.parametrize("name", SCRIPTS)
def test_whole_response_equals_the_streams_last(name: str) -> None:
    pieces, end, more = SCRIPTS[name]
    stream = streamed(encoder_of(**more), pieces, end)
    last = msgspec.json.decode(stream.rstrip().rpartition(b"data: ")[2])
    body = encoder_of(**more).encode_result(result_of(pieces, end))
    assert msgspec.json.decode(body) == last["response"]
    assert check_response(body).id == "resp_0123abcd"


@pytest.mark.parametrize("name", SCRIPTS)
def test_deltas_add_up_to_what_is_done(name: str) -> None:
    pieces, end, more = SCRIPTS[name]
    events = events_of(streamed(encoder_of(**more), pieces, end))
    done: dict[str, Callable[[Any], str]] = {
        "response.output_text": lambda event: event.text,
        "response.reasoning_text": lambda event: event.text,
        "response.function_call_arguments": lambda event: event.arguments,
        "response.custom_tool_call_input": lambda event: event.input,
    }
    for kind, value in done.items():
        for event in events:
            if event.type == f"{kind}.done":
                deltas = [e.delta for e in events if e.type == f"{kind}.delta" and e.item_id == event.item_id]
                assert "".join(deltas) == value(event)
    output = events[-1].response.output
    items = {e.output_index: e.item for e in events if e.type == "response.output_item.done"}
    assert [items[index] for index in range(len(items))] == output


def test_failure_after_the_start_is_an_error_and_a_failed_response() -> None:
    encoder = encoder_of()
    stream = encoder.start(START) + encoder.text(0, "Hel", None) + encoder.fail(overloaded("No workers."))
    check_golden("failed", stream)
    error, failed = events_of(stream)[-2:]
    assert (error.type, error.message) == ("error", "No workers.")
    assert (failed.type, failed.response.status, failed.response.error.code) == (
        "response.failed",
        "failed",
        "server_error",
    )


def test_a_websocket_gets_one_line_per_event_and_one_end() -> None:
    fields = msgspec.convert({"model": "m", "input": "Hello."}, CreateFields)
    resource = new_resource(fields, START.id, [], {}, stored=False)
    encoder = ResponsesEncoder(resource, Names(), lambda: 5, framing=json_line)
    lines = (encoder.start(START) + encoder.text(0, "a\nb", None) + encoder.fail(overloaded("No."))).split(
        b"\n"
    )
    assert lines.pop() == b""
    kinds = [check_event(line).type for line in lines]
    assert kinds[-1] == "response.failed"
    assert "error" not in kinds
    assert encoder.ping() == b""


def test_input_that_is_only_taken_has_an_empty_response() -> None:
    encoder = encoder_of()
    events = events_of(encoder.start_empty() + encoder.end(None))
    assert [event.type for event in events] == [
        "response.created",
        "response.in_progress",
        "response.completed",
    ]
    assert events[-1].response.output == []


def test_undisclosed_counts_are_integers() -> None:
    encoder = encoder_of()
    choice = result_of(["a"], STOP).choices[0]
    body = encoder.encode_result(GenerationResult(START, (choice,), TokenUsage(1, 1, None, None)))
    usage = check_response(body).usage
    assert usage is not None
    assert usage.input_tokens_details.cached_tokens == 0
    assert usage.input_tokens_details.cache_write_tokens == 0
