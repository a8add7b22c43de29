"""Response shapes: bytes put together by hand are JSON, and the documents that OpenAI's clients expect."""

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.actors.edge.api import responses
from headwater.actors.edge.api.responses import ChunkWriter, Endpoint
from headwater.actors.edge.model.tokenizer import Tokenizer
from headwater.actors.http.errors import ApiError, no_model, overloaded
from headwater.engines.sim.model import tokenizer as sim_tokenizer
from headwater.schemas.messages.inference import TokenLogprob
from tests.support.data.examples import texts

TOKENIZER = Tokenizer(sim_tokenizer().to_str().encode())
any_text = texts | st.sampled_from(['"', "\\", "\n\n", "\u2028", "\x00", "</script>", "🙂"])


def read(event: bytes) -> Any:
    """The document of one server-sent event."""
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    assert event.count(b"\n") == 2, "a line end inside of an event would end it"
    return msgspec.json.decode(event.removeprefix(b"data: "))


def expected(
    endpoint: Endpoint, request: str, model: str, choice: dict[str, Any], *, usage: bool
) -> dict[str, Any]:
    """The document of a chunk."""
    return {
        "id": request,
        "object": "chat.completion.chunk" if endpoint == "chat" else "text_completion",
        "created": 123,
        "model": model,
        "choices": [{"index": 2, "logprobs": None, "finish_reason": None, **choice}],
        **({"usage": None} if usage else {}),
    }


@given(any_text, any_text, any_text, st.booleans())
def test_chat_chunks_are_the_documents_that_clients_expect(
    request: str, model: str, text: str, usage: bool
) -> None:
    """Role, text and end; whatever the id, the model's name and the text hold."""
    chunks = ChunkWriter("chat", request, 123, model, 2, usage)

    def chunk(choice: dict[str, Any]) -> dict[str, Any]:
        return expected("chat", request, model, choice, usage=usage)

    assert read(chunks.role()) == chunk({"delta": {"role": "assistant", "content": ""}})
    assert read(chunks.text(text)) == chunk({"delta": {"content": text}})
    logprobs = {"content": [{"token": text}]}
    assert read(chunks.text(text, logprobs)) == chunk({"delta": {"content": text}, "logprobs": logprobs})
    assert read(chunks.finish("stop")) == chunk({"delta": {}, "finish_reason": "stop"})


@given(any_text, any_text, any_text, st.booleans())
def test_completion_chunks_are_the_documents_that_clients_expect(
    request: str, model: str, text: str, usage: bool
) -> None:
    """The same for the older endpoint, which has no roles."""
    chunks = ChunkWriter("completions", request, 123, model, 2, usage)

    def chunk(choice: dict[str, Any]) -> dict[str, Any]:
        return expected("completions", request, model, choice, usage=usage)

    assert chunks.role() == b""
    assert read(chunks.text(text)) == chunk({"text": text})
    logprobs = {"tokens": [text]}
    assert read(chunks.text(text, logprobs)) == chunk({"text": text, "logprobs": logprobs})
    assert read(chunks.finish("length")) == chunk({"text": "", "finish_reason": "length"})


@pytest.mark.parametrize(
    ("endpoint", "kind"), [("chat", "chat.completion"), ("completions", "text_completion")]
)
def test_a_whole_answer_and_its_usage_have_openais_shape(endpoint: Endpoint, kind: str) -> None:
    """Counts add up; the cached part of the prompt is told, never below zero."""
    counts = responses.usage(10, 4, 8)
    document = msgspec.json.decode(responses.whole(endpoint, "id", 123, "m", [{"index": 0}], counts))
    wanted = {
        "prompt_tokens": 10,
        "completion_tokens": 4,
        "total_tokens": 14,
        "prompt_tokens_details": {"cached_tokens": 8},
    }
    assert document == {
        "id": "id",
        "object": kind,
        "created": 123,
        "model": "m",
        "choices": [{"index": 0}],
        "usage": wanted,
    }
    chunk = read(responses.usage_chunk(endpoint, "id", 123, "m", counts))
    assert (chunk["choices"], chunk["usage"]) == ([], wanted)
    assert chunk["object"] == ("chat.completion.chunk" if endpoint == "chat" else "text_completion")
    assert responses.usage(1, 1, -1).prompt_tokens_details == {"cached_tokens": 0}


def test_chat_logprobs_show_text_and_bytes_of_each_token() -> None:
    """Half characters as U+FFFD in text and as bytes beside it; minus infinity as a number that JSON has."""
    tokens = tuple(TOKENIZER.reference.encode("aé").ids)
    logprobs = tuple(TokenLogprob(value, ((tokens[0], value),)) for value in (-0.25, -math.inf, -1.0))
    document = msgspec.json.decode(msgspec.json.encode(responses.chat_logprobs(TOKENIZER, tokens, logprobs)))
    first, second, third = document["content"]
    assert first == {
        "token": "a",
        "logprob": -0.25,
        "bytes": [97],
        "top_logprobs": [{"token": "a", "logprob": -0.25, "bytes": [97]}],
    }
    assert (second["token"], second["logprob"], second["bytes"]) == ("\ufffd", -9999.0, [0xC3])
    assert third["bytes"] == [0xA9]
    assert document["refusal"] is None


def test_completion_logprobs_count_offsets_in_the_text() -> None:
    """Four lists of one length; offsets go on from what was sent before."""
    tokens = tuple(TOKENIZER.reference.encode("abc").ids)
    logprobs = tuple(TokenLogprob(-1.0, ((token, -1.0), (tokens[0], -2.0))) for token in tokens)
    document = responses.completion_logprobs(TOKENIZER, tokens, logprobs, 5)
    assert document["tokens"] == ["a", "b", "c"]
    assert document["token_logprobs"] == [-1.0] * 3
    assert document["text_offset"] == [5, 6, 7]
    assert document["top_logprobs"][2] == {"c": -1.0, "a": -2.0}


def test_errors_have_openais_shape() -> None:
    """One object with message, type, param and code; what may pass says when to come back."""
    error = ApiError(400, 'no\n"such" field', param="x", code="bad")
    assert msgspec.json.decode(error.body()) == {
        "error": {
            "message": 'no\n"such" field',
            "type": "invalid_request_error",
            "param": "x",
            "code": "bad",
        }
    }
    assert len(msgspec.json.decode(ApiError(400, "x" * 100_000).body())["error"]["message"]) < 5000
    busy = overloaded("no worker", 2.5)
    assert (busy.status, busy.retry_after_s, busy.document()["error"]["type"]) == (503, 2.5, "server_error")
    assert no_model("x", ["a", "b"]).status == 404
    assert read(responses.event(error.document()))["error"]["code"] == "bad"
