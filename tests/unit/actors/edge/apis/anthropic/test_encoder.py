"""Generation's events as Anthropic's messages: golden transcripts, and the official client as the reader of them."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from headwater.actors.edge.apis.anthropic import MessageEncoder, usage_of
from headwater.actors.edge.parsing.grammar import (
    OutputEvent,
    ReasoningDelta,
    TextDelta,
    ToolArgumentsDelta,
    ToolCallStart,
)
from headwater.actors.edge.prompt.request import ChoiceEnd, GenerationResult, TokenUsage
from headwater.actors.http.errors import bad_request
from tests.support.data.generation_events import AGENT, START, TEXT, USAGE, result, stream
from tests.support.marks import OFFICIAL_CLIENT

GOLDEN = Path(__file__).parent / "golden"
STOPPED = ChoiceEnd("stop")

STREAMS: dict[str, tuple[tuple[OutputEvent, ...], ChoiceEnd]] = {
    "agent": (AGENT, ChoiceEnd("tool_calls")),
    "text": (TEXT, STOPPED),
    "stop_sequence": (TEXT, ChoiceEnd("stop", "END")),
    "length": (TEXT[:1], ChoiceEnd("length")),
    "stop_token": (TEXT[:1], ChoiceEnd("stop", "", 7)),
    "nothing": ((), STOPPED),
}


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_is_the_golden_transcript(name: str) -> None:
    events, end = STREAMS[name]
    sent = stream(MessageEncoder(), events, end)
    assert sent.decode() == (GOLDEN / f"{name}.stream.txt").read_text()


@pytest.mark.parametrize("name", STREAMS)
def test_a_whole_message_is_the_golden_transcript(name: str) -> None:
    events, end = STREAMS[name]
    body = MessageEncoder().encode_result(result(events, end))
    assert msgspec.json.format(body).decode() + "\n" == (GOLDEN / f"{name}.json").read_text()


def test_a_stream_without_the_text_of_thinking_has_its_signature() -> None:
    sent = stream(MessageEncoder(omit_thinking=True), AGENT, ChoiceEnd("tool_calls")).decode()
    assert sent == (GOLDEN / "thinking_omitted.stream.txt").read_text()
    whole = msgspec.json.decode(
        MessageEncoder(omit_thinking=True).encode_result(result(AGENT, ChoiceEnd("tool_calls")))
    )
    assert whole["content"][0]["thinking"] == ""
    assert whole["content"][0]["signature"] in sent


def test_a_failed_stream_ends_with_an_error_event() -> None:
    encoder = MessageEncoder()
    sent = encoder.start(START) + encoder.text(0, "a", None) + encoder.fail(bad_request("Why."))
    assert sent.decode() == (GOLDEN / "failed.stream.txt").read_text()


@OFFICIAL_CLIENT
@pytest.mark.parametrize("name", STREAMS)
def test_the_official_client_assembles_the_whole_message_from_the_stream(name: str) -> None:
    from anthropic.types import Message

    events, end = STREAMS[name]
    whole = Message.model_validate_json(MessageEncoder().encode_result(result(events, end)), strict=True)
    assembled = assemble(stream(MessageEncoder(), events, end))
    assert assembled == whole.model_dump()


def assemble(sent: bytes) -> dict[str, Any]:
    """The message of a stream, each of whose events the official client's types accept."""
    from anthropic.types import RawMessageStreamEvent
    from pydantic import TypeAdapter

    adapter: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
    message: dict[str, Any] = {}
    partial = ""
    for text in sent.decode().split("\n\n")[:-1]:
        name, data = text.split("\n")
        kind = msgspec.json.decode(data[6:])["type"]
        assert name == f"event: {kind}"
        if kind == "ping":
            continue
        event = adapter.validate_json(data[6:], strict=True).model_dump()
        if kind == "message_start":
            message = event["message"]
        elif kind == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
            partial = ""
        elif kind == "content_block_delta":
            block, delta = message["content"][-1], event["delta"]
            if delta["type"] == "input_json_delta":
                partial += delta["partial_json"]
            for field in ("text", "thinking", "signature"):
                block[field] = block[field] + delta[field] if field in delta else block.get(field)
                if block[field] is None:
                    del block[field]
        elif kind == "content_block_stop" and partial:
            message["content"][-1]["input"] = msgspec.json.decode(partial)
        elif kind == "message_delta":
            message |= event["delta"]
            message["usage"] |= event["usage"]
            # Known at the end only, and not a field of message_delta.
            message["usage"]["cache_creation"]["ephemeral_5m_input_tokens"] = USAGE.cache_write_tokens
    return message


@pytest.mark.parametrize(
    ("usage", "read", "written", "rest"),
    [(TokenUsage(100, 7, 64, 32, 3), 64, 32, 4), (TokenUsage(100, 7, None, None, 3), None, None, 100)],
    ids=["disclosed", "not disclosed"],
)
def test_the_three_counts_of_input_add_up_to_the_prompt(
    usage: TokenUsage, read: int | None, written: int | None, rest: int
) -> None:
    assert usage_of(usage) == {
        "input_tokens": rest,
        "cache_creation_input_tokens": written,
        "cache_read_input_tokens": read,
        "output_tokens": 7,
        "output_tokens_details": {"thinking_tokens": 3},
        "server_tool_use": None,
    }


def test_thinking_between_texts_opens_blocks_in_order() -> None:
    events = (TextDelta("a"), ReasoningDelta("b"), TextDelta("c"), ReasoningDelta(""), TextDelta(""))
    content = assemble(stream(MessageEncoder(), events, STOPPED))["content"]
    assert [block["type"] for block in content] == ["text", "thinking", "text"]


def test_two_thinking_blocks_have_signatures_of_their_own() -> None:
    events = (ReasoningDelta("a"), TextDelta("b"), ReasoningDelta("a"))
    content = assemble(stream(MessageEncoder(), events, STOPPED))["content"]
    assert content[0]["signature"] == content[2]["signature"] != ""


@pytest.mark.parametrize("arguments", ['{"city": "Zü', "", "[1]", "1"])
def test_arguments_that_are_no_object_are_passed_on_as_text(arguments: str) -> None:
    events = (ToolCallStart(0, "f", "c"), ToolArgumentsDelta(0, arguments))
    message = whole(result(events, ChoiceEnd("length")))
    assert message["content"][0]["input"] == {"INVALID_JSON": arguments}


def test_large_numbers_in_arguments_keep_their_digits() -> None:
    events = (ToolCallStart(0, "f", "c"), ToolArgumentsDelta(0, '{"n": 123456789012345678901234567890.0}'))
    body = MessageEncoder().encode_result(result(events, ChoiceEnd("tool_calls")))
    assert b'"input":{"n": 123456789012345678901234567890.0}' in body


def whole(answer: GenerationResult) -> dict[str, Any]:
    decoded: dict[str, Any] = msgspec.json.decode(MessageEncoder().encode_result(answer))
    return decoded


def test_an_answer_that_ends_before_the_requested_tokens_has_filled_the_context() -> None:
    answer = result(TEXT, ChoiceEnd("length"))
    for limit, reason in ((USAGE.completion_tokens, "max_tokens"), (99, "model_context_window_exceeded")):
        encoder = MessageEncoder(limit)
        assert msgspec.json.decode(encoder.encode_result(answer))["stop_reason"] == reason
        assert f'"stop_reason":"{reason}"' in encoder.end(answer).decode()
