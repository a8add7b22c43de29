"""Response shapes: bytes put together by hand are JSON, and the documents that OpenAI's clients expect."""

import math
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from headwater.actors.edge.apis.chat_encoder import (
    ChatEncoder,
    CompletionEncoder,
    CompletionLogprobs,
    Endpoint,
    OpenAiEncoder,
    PromptTokens,
    ShownParts,
    event,
    logprob_entries,
    usage_of,
)
from headwater.actors.edge.prompt.request import (
    ChoiceEnd,
    GenerationStart,
    TokenDetail,
    TokenUsage,
)
from headwater.actors.edge.tokenizer import Tokenizer
from headwater.actors.http.errors import ApiError, no_model, overloaded
from headwater.engines.model_files import byte_tokenizer
from headwater.schemas.inference import TokenLogprob
from tests.support.data.examples import texts

TOKENIZER = Tokenizer(byte_tokenizer().to_str().encode())
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
    return {
        "id": request,
        "object": "chat.completion.chunk" if endpoint == "chat" else "text_completion",
        "created": 123,
        "model": model,
        "choices": [{"index": 2, "logprobs": None, "finish_reason": None, **choice}],
        **({"usage": None} if usage else {}),
    }


def started(encoder: OpenAiEncoder, request: str, model: str) -> bytes:
    """What an encoder sends before the first token of choice 2."""
    parts = [encoder.start(GenerationStart(request, model, 123, TokenUsage(10, 0)))]
    parts += [encoder.start_choice(index, None) for index in range(3)]
    return parts[-1]


@given(any_text, any_text, any_text, st.booleans())
def test_chat_chunks_are_the_documents_that_clients_expect(
    request: str, model: str, text: str, usage: bool
) -> None:
    """Role, text and end; whatever the id, the model's name and the text hold."""
    encoder = ChatEncoder(TOKENIZER, ShownParts(logprobs=True, usage=usage))

    def chunk(choice: dict[str, Any]) -> dict[str, Any]:
        return expected("chat", "chatcmpl-" + request, model, choice, usage=usage)

    role = started(encoder, request, model)
    assert read(role) == chunk({"delta": {"role": "assistant", "content": ""}})
    assert read(encoder.text(2, text, None)) == chunk({"delta": {"content": text}})
    logprobs: dict[str, Any] = {"content": [], "refusal": None}
    assert read(encoder.text(2, text, TokenDetail())) == chunk(
        {"delta": {"content": text}, "logprobs": logprobs}
    )
    assert read(encoder.end_choice(2, ChoiceEnd("stop"))) == chunk({"delta": {}, "finish_reason": "stop"})


@given(any_text, any_text, any_text, st.booleans())
def test_completion_chunks_are_the_documents_that_clients_expect(
    request: str, model: str, text: str, usage: bool
) -> None:
    """The same for the older endpoint, which has no roles."""
    encoder = CompletionEncoder(TOKENIZER, ShownParts(logprobs=True, usage=usage))

    def chunk(choice: dict[str, Any]) -> dict[str, Any]:
        return expected("completions", "cmpl-" + request, model, choice, usage=usage)

    assert started(encoder, request, model) == b""
    assert read(encoder.text(2, text, None)) == chunk({"text": text})
    logprobs: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    assert read(encoder.text(2, text, TokenDetail())) == chunk({"text": text, "logprobs": logprobs})
    end = encoder.end_choice(2, ChoiceEnd("length"))
    assert read(end) == chunk({"text": "", "finish_reason": "length"})


def test_audio_tokens_are_shown_where_there_are_some() -> None:
    """Also to clients from whom cached tokens are hidden."""
    assert usage_of(TokenUsage(10, 4, None, None)).prompt_tokens_details is None
    hidden = usage_of(TokenUsage(10, 4, None, None, audio_tokens=6))
    assert msgspec.json.encode(hidden.prompt_tokens_details) == b'{"audio_tokens":6}'
    assert usage_of(TokenUsage(10, 4, 8, 0, audio_tokens=6)).prompt_tokens_details == PromptTokens(8, 0, 6)


def test_chat_logprobs_show_text_and_bytes_of_each_token() -> None:
    """Half characters as U+FFFD in text and as bytes beside it; minus infinity as a number that JSON has."""
    tokens = tuple(TOKENIZER.reference.encode("aé").ids)
    logprobs = tuple(TokenLogprob(value, ((tokens[0], value),)) for value in (-0.25, -math.inf, -1.0))
    document = msgspec.json.decode(
        msgspec.json.encode(logprob_entries(TOKENIZER, TokenDetail(tokens, logprobs)))
    )
    first, second, third = document
    assert first == {
        "token": "a",
        "logprob": -0.25,
        "bytes": [97],
        "top_logprobs": [{"token": "a", "logprob": -0.25, "bytes": [97]}],
    }
    assert (second["token"], second["logprob"], second["bytes"]) == ("\ufffd", -9999.0, [0xC3])
    assert third["bytes"] == [0xA9]


def test_tokens_may_be_named_by_their_ids() -> None:
    """As `return_tokens_as_token_ids` asks: alternatives too, and two tokens of equal text stay two."""
    one, two = TOKENIZER.reference.encode("aé").ids[1:]
    detail = TokenDetail((one,), (TokenLogprob(-1.0, ((one, -1.0), (two, -2.0))),))
    [entry] = logprob_entries(TOKENIZER, detail, as_ids=True)
    assert (entry["token"], entry["bytes"]) == (f"token_id:{one}", [0xC3])
    assert [other["token"] for other in entry["top_logprobs"]] == [f"token_id:{one}", f"token_id:{two}"]
    document = CompletionLogprobs(TOKENIZER, as_ids=True).answer(detail)
    assert document["tokens"] == [f"token_id:{one}"]
    assert document["top_logprobs"] == [{f"token_id:{one}": -1.0, f"token_id:{two}": -2.0}]


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
    assert read(event(error.document()))["error"]["code"] == "bad"
