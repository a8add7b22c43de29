"""Whatever a client sends, it gets an answer or is told what is wrong with it; never a 5xx."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.actors.edge.apis.chat_types import ChatRequest, CompletionRequest
from tests.support.data.examples import texts
from tests.support.worlds.edge import ANSWER, CONTEXT, EdgeWorld

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SOUND: dict[str, dict[str, Any]] = {
    CHAT: {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
    COMPLETIONS: {"model": "m", "prompt": "hi"},
}
FIELDS = {CHAT: ChatRequest.__struct_fields__, COMPLETIONS: CompletionRequest.__struct_fields__}

numbers = st.integers(-3, 40) | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
odd_numbers = st.sampled_from(
    [0, -1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64, -(2**63), -(2**64), 1e308, 10**400]
)
odd_texts = st.sampled_from(
    ["", "²", "١", "9" * 5000, "\u0000", "\x04", "\U0010ffff", "\U00040000", "<|im_end|>"]
)
leaves = st.none() | st.booleans() | numbers | odd_numbers | texts | odd_texts
anything = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            texts | odd_texts | st.sampled_from(["type", "text", "role", "content", "messages", "self"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)


def test_the_sound_request_is_answered(edge: EdgeWorld) -> None:
    """Otherwise the tests below would not get past the first check."""
    chat = edge.ask(CHAT, SOUND[CHAT])
    assert chat.status == 200
    assert chat.document["choices"][0]["message"]["content"] == ANSWER
    completion = edge.ask(COMPLETIONS, SOUND[COMPLETIONS])
    assert completion.document["choices"][0]["text"] == ANSWER[:16]


@pytest.mark.parametrize("text", ["a", "<|im_end|>"], ids=["plain", "control tokens"])
def test_a_prompt_is_as_long_as_its_tokens(edge: EdgeWorld, text: str) -> None:
    """One that leaves room for a token is answered, and one more is refused, however many bytes its tokens have."""
    for length, status in ((CONTEXT - 1, 200), (CONTEXT, 400)):
        reply = edge.ask(COMPLETIONS, {"model": "m", "prompt": text * length, "max_tokens": 1})
        assert reply.status == status, reply.body
        if status == 200:
            assert reply.document["usage"]["prompt_tokens"] == length
        else:
            assert reply.document["error"]["code"] == "context_length_exceeded"


def test_a_message_is_as_long_as_its_tokens(edge: EdgeWorld) -> None:
    """With those that the template puts around it."""
    template = edge.ask(CHAT, {"model": "m", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1})
    around = template.document["usage"]["prompt_tokens"] - 1
    for length, status in ((CONTEXT - 1 - around, 200), (CONTEXT - around, 400)):
        messages = [{"role": "user", "content": "a" * length}]
        reply = edge.ask(CHAT, {"model": "m", "messages": messages, "max_tokens": 1})
        assert reply.status == status, reply.body


@pytest.mark.parametrize("path", SOUND)
@given(data=st.data())
def test_a_request_with_strange_fields_is_answered_or_refused(
    edge: EdgeWorld, path: str, data: st.DataObject
) -> None:
    """Any values in any known fields: 200, or a 4xx whose error object has a message; never a 5xx."""
    changes = data.draw(st.dictionaries(st.sampled_from(FIELDS[path]), anything, max_size=3))
    sent = json.dumps({**SOUND[path], **changes}).encode()
    response = edge.ask(path, sent)
    assert response.status < 500, response.body
    if response.status != 200:
        assert response.document["error"]["message"]


@given(data=st.binary(max_size=60) | anything.map(lambda value: json.dumps(value).encode()))
def test_a_body_of_any_bytes_is_refused(edge: EdgeWorld, data: bytes) -> None:
    """What is no request of ours is a 400 with an error object, JSON or not."""
    for path in SOUND:
        response = edge.ask(path, data)
        assert response.status == 400
        assert response.document["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        (CHAT, "chat_template_kwargs", {"messages": []}),
        (CHAT, "chat_template_kwargs", {"add_generation_prompt": False}),
        (CHAT, "chat_template_kwargs", {"self": 1}),
        (CHAT, "logit_bias", {"²": 1}),
        (CHAT, "logit_bias", {"9" * 5000: 1}),
        (CHAT, "logit_bias", {str(2**64): 1}),
        (CHAT, "stop_token_ids", [2**64]),
        (CHAT, "stop_token_ids", [-(2**64)]),
        (CHAT, "top_k", 2**64),
        (CHAT, "priority", 2**64),
        (CHAT, "priority", -(2**63) - 1),
        (CHAT, "max_tokens", 2**64),
        (CHAT, "seed", -(2**63)),
        (CHAT, "seed", 2**63 - 1),
        (COMPLETIONS, "prompt", [[1], []]),
        (COMPLETIONS, "prompt", [2**32]),
        (COMPLETIONS, "prompt", [-1]),
        (COMPLETIONS, "prompt", ""),
        (COMPLETIONS, "prompt", [[]]),
        (COMPLETIONS, "prompt", [["a"]]),
        (COMPLETIONS, "n", 128),
    ],
)
def test_values_at_the_limits_are_answered_or_refused(
    edge: EdgeWorld, path: str, field: str, value: Any
) -> None:
    """The corners that a client finds by accident."""
    response = edge.ask(path, {**SOUND[path], field: value})
    assert response.status in (200, 400), response.body


def test_several_choices_with_the_largest_seed_are_answered(edge: EdgeWorld) -> None:
    """Seeds of further choices stay 64-bit integers."""
    edge.given.clear()
    response = edge.ask(CHAT, {**SOUND[CHAT], "n": 3, "seed": 2**63 - 1})
    assert response.status == 200
    seeds = [request.sampling.seed for request in edge.given]
    assert len(set(seeds)) == 3
    assert all(seed is not None and -(2**63) <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize("path", SOUND)
def test_a_stream_is_a_series_of_events_that_add_up_to_the_answer(edge: EdgeWorld, path: str) -> None:
    """Each event is JSON; the texts joined are the answer; the last is [DONE]."""
    asked = {**SOUND[path], "stream": True, "max_tokens": 1000, "stream_options": {"include_usage": True}}
    response = edge.ask(path, asked)
    assert response.status == 200
    assert response.headers[b"content-type"].startswith(b"text/event-stream")
    *events, done, rest = response.body.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    documents = [msgspec.json.decode(event.removeprefix(b"data: ")) for event in events]
    parts = [choice.get("delta", choice) for one in documents for choice in one["choices"]]
    assert "".join(part.get("content", part.get("text", "")) for part in parts) == ANSWER
    assert documents[-1]["usage"]["completion_tokens"] == len(ANSWER)
    assert [c["finish_reason"] for one in documents for c in one["choices"]][-1] == "stop"


def test_the_root_says_that_the_server_is_there(edge: EdgeWorld) -> None:
    """Claude Code asks for it before its first request, without a key."""
    for method in ("HEAD", "GET"):
        assert edge.ask("/", {}, method=method).status == 200
    assert edge.ask("/", {}).status == 404


def test_paths_and_methods_that_are_not_served_are_told_apart(edge: EdgeWorld) -> None:
    """404 for a path, 405 for a method, 404 with the served names for a model."""
    for path in ("/v1/nothing", "/v1/responsesx", "/v1/responses/resp_1/nothing"):
        assert edge.ask(path, {}).status == 404
    for path in (CHAT, "/v1/responses", "/v1/conversations"):
        assert edge.ask(path, b"", method="GET").status == 405
    response = edge.ask(CHAT, {**SOUND[CHAT], "model": "other"})
    assert response.status == 404
    assert response.document["error"]["code"] == "model_not_found"
    assert "'other'" in response.document["error"]["message"]
    assert edge.ask("/v1/models", b"", method="GET").document["data"][0]["id"] == "m"
