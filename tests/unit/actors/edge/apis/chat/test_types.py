"""Reading requests: what is taken, and errors that name the field."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.actors.edge.apis.chat import chat_request, completion_request
from headwater.actors.edge.apis.chat_types import (
    ChatRequest,
    CompletionCommon,
    CompletionRequest,
)
from headwater.actors.edge.prompt.conversation import template_messages
from headwater.actors.edge.prompt.prepare import sampling_of
from headwater.actors.edge.prompt.request import TextPart
from headwater.actors.http.body import decode_body
from headwater.actors.http.errors import ApiError
from headwater.schemas.inference import GenerateRequest, Sampling

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION: dict[str, Any] = {"model": "m", "prompt": "hi"}


def chat(**changes: Any) -> ChatRequest:
    return decode_body(ChatRequest, json.dumps({**CHAT, **changes}).encode())


def completion(**changes: Any) -> CompletionRequest:
    return decode_body(CompletionRequest, json.dumps({**COMPLETION, **changes}).encode())


def read_all(request: CompletionCommon, limit: int = 100) -> Sampling:
    """Everything the edge checks in a request."""
    request.refuse_unsupported()
    if isinstance(request, ChatRequest):
        wanted = chat_request(request)
        assert all(isinstance(part, TextPart) for turn in wanted.messages for part in turn.parts)
    else:
        assert isinstance(request, CompletionRequest)
        wanted = completion_request(request)
    return sampling_of(wanted.sampling, limit=limit, guide=wanted.guide)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", 3),
        ("messages", []),
        ("messages", "hi"),
        ("messages[0].role", [{"role": "wizard", "content": "hi"}]),
        ("messages[0].content", [{"role": "user", "content": 3}]),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", "hot"),
        ("top_p", 1.1),
        ("min_p", -0.5),
        ("n", 0),
        ("n", 129),
        ("max_tokens", 0),
        ("max_completion_tokens", -1),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("repetition_penalty", 0),
        ("top_k", -2),
        ("seed", 2**63),
        ("seed", -(2**63) - 1),
        ("min_tokens", 101),
        ("min_tokens", -1),
        ("stop", ""),
        ("stop", ["a"] * 17),
        ("stop", "x" * 257),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {"²": 1}),
        ("logit_bias", {"9" * 5000: 1}),
        ("stop_token_ids", ["a"]),
        ("top_logprobs", 21),
        ("top_logprobs", 3),
        ("tools[0].function", [{"type": "function"}]),
        ("tools[0].type", [{"type": "telepathy"}]),
        ("prompt_logprobs", 21),
        ("bad_words", [""]),
        ("allowed_token_ids", [-1]),
        ("moderation", {"model": "m"}),
        ("prompt_cache_options.ttl", {"ttl": "1h"}),
        ("stream_options.include_usage", {"include_usage": 3}),
        ("response_format.type", {"type": "xml"}),
        ("cache_salt", ""),
        ("cache_salt", "x" * 1025),
        ("chat_template", "{{ messages }}"),
        ("chat_template_kwargs", {"chat_template": "{{ messages }}"}),
        ("echo", True),
        ("use_beam_search", True),
        ("functions", [{"name": "f"}]),
        ("modalities", ["text", "audio"]),
    ],
)
def test_a_refusal_names_the_field(field: str, value: Any) -> None:
    """`param` of the 400 is the field that has to change; its message says what is allowed."""
    name = field.partition("[")[0].partition(".")[0]
    with pytest.raises(ApiError) as caught:
        read_all(chat(**{name: value}))
    assert (caught.value.status, caught.value.kind) == (400, "invalid_request_error")
    assert (caught.value.param or "").startswith(field.partition("[")[0])
    assert caught.value.document()["error"]["param"] == caught.value.param


@pytest.mark.parametrize("missing", ["model", "messages"])
def test_a_missing_field_is_named(missing: str) -> None:
    """The message says which one is required."""
    body = {key: value for key, value in CHAT.items() if key != missing}
    with pytest.raises(ApiError, match=f"`{missing}`"):
        decode_body(ChatRequest, json.dumps(body).encode())


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b'{"model": "m', b"\xff\xfe", b'{"x": ' + b"[" * 100_000, b'{"model": "\xff"}', b"x{}"],
)
def test_what_is_no_json_is_refused_as_such(body: bytes) -> None:
    """Torn, foreign and bottomless bodies are 400s."""
    for kind in (ChatRequest, CompletionRequest):
        with pytest.raises(ApiError, match="not valid JSON") as caught:
            decode_body(kind, body)
        assert caught.value.status == 400


def test_unknown_fields_are_passed_over() -> None:
    """New clients send fields that older servers do not know."""
    assert chat(brand_new={"a": [1]}).model == "m"


def test_null_is_the_same_as_leaving_a_field_out() -> None:
    """OpenAI's own documents say "or null" for nearly every field, and clients send it."""
    nullable = (
        "stream", "n", "temperature", "top_p", "seed", "stop", "logit_bias", "logprobs", "top_logprobs", "max_tokens",
        "max_completion_tokens", "user", "response_format", "tools", "tool_choice", "stream_options", "priority",
        "cache_salt", "ignore_eos", "structured_outputs", "guided_json", "logits_processors", "functions", "audio",
    )  # fmt: skip
    assert read_all(chat(**dict.fromkeys(nullable))) == read_all(chat())
    answer = completion(echo=None, logprobs=None)
    assert read_all(answer) == Sampling(100)


def test_what_openai_knows_and_does_not_change_the_answer_here_is_passed_over() -> None:
    """Hints, labels and switches of features that are not used."""
    hints = {
        "service_tier": "auto", "store": True, "metadata": {"a": "b"}, "user": "u", "safety_identifier": "s",
        "prompt_cache_key": "k", "parallel_tool_calls": True, "prediction": {"type": "content", "content": "x"},
        "reasoning_effort": "low", "verbosity": "low", "modalities": ["text"], "length_penalty": 1.0,
        "skip_special_tokens": True, "function_call": "none", "use_beam_search": False, "bad_words": [],
    }  # fmt: skip
    assert read_all(chat(**hints)) == read_all(chat())


def test_a_request_becomes_what_an_engine_understands() -> None:
    """Names and meanings go over one by one; what is not set has OpenAI's default."""
    assert read_all(chat()) == Sampling(max_tokens=100)
    set_all = chat(
        temperature=0.5, top_p=0.9, top_k=40, min_p=0.1, presence_penalty=1, frequency_penalty=-1,
        repetition_penalty=1.1, seed=7, min_tokens=2, ignore_eos=True, stop_token_ids=[3, 4],
        logit_bias={"5": -100, "6": 2.5}, logprobs=True, top_logprobs=4,
    )  # fmt: skip
    assert read_all(set_all) == Sampling(
        100, 0.5, 0.9, 40, 0.1, 1.0, -1.0, 1.1, 7, 2, True, (3, 4), 4, {5: -100.0, 6: 2.5}
    )
    assert read_all(chat(temperature=0, top_k=-1, logprobs=True)) == Sampling(
        100, temperature=0.0, top_k=0, logprobs=0
    )


def test_the_newer_name_of_the_limit_wins() -> None:
    """`max_completion_tokens` replaced `max_tokens`."""
    assert chat_request(chat(max_tokens=5)).max_tokens == 5
    assert chat_request(chat(max_tokens=5, max_completion_tokens=7)).max_tokens == 7
    assert chat_request(chat()).max_tokens is None


def test_content_parts_are_joined_and_nothing_else_of_a_message_is_changed() -> None:
    """Templates get plain JSON types; text parts become one text."""
    function = {"name": "f", "arguments": '{"a": 1}'}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": function}],
        },
        {"role": "tool", "content": "3", "tool_call_id": "1"},
    ]
    called = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    turns = chat_request(chat(messages=messages)).messages
    assert template_messages(turns) == [
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "content": "3", "tool_call_id": "1", "name": "f"},
    ]


@pytest.mark.parametrize(
    ("prompt", "entries"),
    [
        ("hi", ["hi"]),
        ("", [""]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_a_prompt_is_a_text_or_ids_or_several_of_either(prompt: Any, entries: list[Any]) -> None:
    request = completion(prompt=prompt)
    assert request.prompts() == entries


@pytest.mark.parametrize("prompt", [[], [1, "a"], [None], [[1], "a"], [["a"]], [1.5], [True], {"a": 1}, 3])
def test_any_other_prompt_is_refused(prompt: Any) -> None:
    """Mixed and empty lists, and what is neither text nor ids."""
    with pytest.raises(ApiError) as caught:
        read_all(completion(prompt=prompt))
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("field", [{"best_of": 2, "n": 3}, {"best_of": 3, "stream": True}, {"max_tokens": 0}])
def test_what_contradicts_itself_is_refused_by_name(field: dict[str, Any]) -> None:
    """Fewer candidates than choices, a stream of what is chosen at its end, an answer of nothing."""
    with pytest.raises(ApiError) as caught:
        read_all(completion(**field))
    assert caught.value.param == next(iter(field))


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "stop_token_ids": st.lists(st.integers(), max_size=3),
            "top_k": st.integers(-1),
            "seed": st.integers(),
            "priority": st.integers(),
            "logit_bias": st.dictionaries(st.integers(0).map(str), st.integers(-100, 100), max_size=3),
            "min_tokens": st.integers(),
        },
    )
)
def test_what_is_taken_can_be_sent_to_an_engine(fields: dict[str, Any]) -> None:
    """Numbers that no message can carry are refused when they are read, not when they are sent."""
    try:
        request = chat(**fields)
        sampling = read_all(request)
    except ApiError:
        return
    message = GenerateRequest("r", "e", 1, b"", sampling, priority=request.priority or 0)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=GenerateRequest) == message
