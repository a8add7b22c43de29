"""Anthropic's endpoints through the edge's application: statuses, headers, errors in their format."""

from typing import Any

import pytest

from headwater.actors.edge.apis.anthropic import error_document, status_of
from headwater.actors.http.errors import ApiError, overloaded
from tests.support.worlds.edge import ANSWER, CONTEXT, EdgeWorld, Response

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
BODY: dict[str, Any] = {"model": "m", "max_tokens": 99, "messages": [{"role": "user", "content": "hi"}]}


def prompt_tokens(reply: Response) -> int:
    usage = reply.document["usage"]
    read, written = usage["cache_read_input_tokens"] or 0, usage["cache_creation_input_tokens"] or 0
    return int(usage["input_tokens"] + read + written)


def test_a_message_is_answered_with_its_request_id(edge: EdgeWorld) -> None:
    reply = edge.ask(MESSAGES, BODY)
    assert reply.status == 200, reply.body
    assert reply.document["content"] == [{"type": "text", "text": ANSWER, "citations": None}]
    assert reply.document["stop_reason"] == "end_turn"
    name = reply.document["id"].removeprefix("msg_")
    assert reply.headers[b"request-id"] == f"req_{name}".encode()
    assert reply.headers[b"x-request-id"] == f"msg_{name}".encode()


def test_a_stream_has_its_request_id(edge: EdgeWorld) -> None:
    reply = edge.ask(MESSAGES, {**BODY, "stream": True})
    assert reply.headers[b"content-type"].startswith(b"text/event-stream")
    assert reply.headers[b"request-id"].startswith(b"req_")
    names = [line[7:] for line in reply.body.decode().splitlines() if line.startswith("event: ")]
    assert names[:2] == ["message_start", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_counting_equals_what_an_answer_reports(edge: EdgeWorld) -> None:
    fields = {
        "system": "Be kind.",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a" * 40}]}],
    }
    count = edge.ask(COUNT, {"model": "m", **fields})
    assert count.status == 200, count.body
    assert count.document == {"input_tokens": prompt_tokens(edge.ask(MESSAGES, {**BODY, **fields}))}
    assert count.headers[b"request-id"].startswith(b"req_")


def test_more_tokens_than_the_context_has_room_for_are_reduced(edge: EdgeWorld) -> None:
    reply = edge.ask(MESSAGES, {**BODY, "max_tokens": CONTEXT * 10})
    assert reply.status == 200, reply.body


def test_a_prompt_that_fills_the_context_is_refused(edge: EdgeWorld) -> None:
    reply = edge.ask(MESSAGES, {**BODY, "messages": [{"role": "user", "content": "a" * CONTEXT}]})
    assert reply.status == 400
    assert "context" in reply.document["error"]["message"]


def test_errors_have_the_format_of_the_api(edge: EdgeWorld) -> None:
    for fields, status, kind in (
        ({"model": "none"}, 404, "not_found_error"),
        ({"max_tokens": None}, 400, "invalid_request_error"),
        ({"messages": "a"}, 400, "invalid_request_error"),
    ):
        reply = edge.ask(MESSAGES, {**BODY, **fields})
        assert reply.status == status
        assert reply.document["type"] == "error"
        assert reply.document["error"]["type"] == kind
        assert reply.headers[b"request-id"] == reply.document["request_id"].encode()
    assert "type" not in edge.ask("/v1/chat/completions", {"model": "none", "messages": []}).document


@pytest.mark.parametrize("block", [{"text": "a"}, {"type": "image", "text": "a"}, {"type": "text"}])
def test_a_system_prompt_is_text_and_says_so(edge: EdgeWorld, block: dict[str, Any]) -> None:
    """As the document demands; msgspec by itself would take a block of the only kind without its type."""
    for path in (MESSAGES, f"{MESSAGES}/count_tokens"):
        body = {name: value for name, value in BODY.items() if path == MESSAGES or name != "max_tokens"}
        assert edge.ask(path, {**body, "system": [{"type": "text", "text": "a"}]}).status == 200
        assert edge.ask(path, {**body, "system": [block]}).status == 400


def test_every_version_gets_the_same_format(edge: EdgeWorld) -> None:
    for version, status in (
        (b"2023-06-01", 200),
        (b"2026-10-21", 200),
        (b"2031-01-01", 200),
        (b"latest", 400),
    ):
        reply = edge.ask(MESSAGES, BODY, headers=[(b"anthropic-version", version)])
        assert reply.status == status
    assert "anthropic-version" in reply.document["error"]["message"]


@pytest.mark.parametrize(
    ("status", "answered", "kind"),
    [
        (400, 400, "invalid_request_error"),
        (401, 401, "authentication_error"),
        (403, 403, "permission_error"),
        (404, 404, "not_found_error"),
        (405, 405, "invalid_request_error"),
        (413, 413, "request_too_large"),
        (429, 429, "rate_limit_error"),
        (500, 500, "api_error"),
        (502, 502, "api_error"),
        (503, 529, "overloaded_error"),
        (504, 504, "timeout_error"),
    ],
)
def test_each_status_has_its_kind(status: int, answered: int, kind: str) -> None:
    error = ApiError(status, "Why.")
    assert status_of(error) == answered
    assert error_document(error, "req_1") == {
        "type": "error",
        "error": {"type": kind, "message": "Why."},
        "request_id": "req_1",
    }


def test_a_long_message_is_cut() -> None:
    assert len(str(error_document(overloaded("a" * 9_000)))) < 2_048
