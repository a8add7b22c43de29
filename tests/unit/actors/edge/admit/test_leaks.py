"""Prompts, answers, keys and tool arguments are in no log line, no error message and no request log unless enabled."""

import json
from collections.abc import Iterator
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from headwater.actors.edge.chat_template import ChatTemplate
from headwater.actors.edge.settings import AccessSettings
from headwater.actors.http.errors import ApiError
from headwater.engines.logs import failure_place
from headwater.ops.operator.keys import WantedKey
from tests.support.worlds.edge import ANSWER, EdgeWorld

CHAT: Final = "/v1/chat/completions"
SECRET: Final = "correct-horse-battery-staple"
ERROR_BYTES_MAX: Final = 2048


@pytest.fixture(scope="module")
def edge() -> Iterator[EdgeWorld]:
    with EdgeWorld(access=AccessSettings("keys")) as world:
        yield world


@pytest.fixture(scope="module")
def key(edge: EdgeWorld) -> str:
    return edge.create_key(WantedKey("acme", permissions=("tier",)))


def chat(**fields: Any) -> dict[str, Any]:
    """A sound request that has the secret in its prompt."""
    body = {"model": "m", "max_tokens": 12, "messages": [{"role": "user", "content": SECRET}]}
    return body | fields


TOOL: Final = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL: Final = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": SECRET}}

BODIES: Final[dict[str, Any]] = {
    "answered": chat(),
    "streamed": chat(stream=True),
    "cut short": json.dumps(chat()).encode()[:-9],
    "not JSON": SECRET.encode(),
    "not UTF-8": b'{"model": "m", "messages": "' + SECRET.encode() + b'\xff"}',
    "role": chat(messages=[{"role": SECRET, "content": "x"}]),
    "part of no type": chat(
        messages=[{"role": "user", "content": [{"type": "text", "text": {"a": SECRET}}]}]
    ),
    "messages as text": chat(messages=SECRET),
    "temperature": chat(temperature=SECRET),
    "format": chat(response_format={"type": SECRET}),
    "too long": chat(messages=[{"role": "user", "content": SECRET * 40_000}]),
    "tool arguments": chat(
        tools=[TOOL],
        messages=[
            {"role": "user", "content": "x"},
            {"role": "assistant", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": SECRET},
        ],
    ),
    "token ids": {"model": "m", "prompt": [1, 2, 10**9]},
}


@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
@pytest.mark.parametrize("case", BODIES)
@pytest.mark.parametrize("right", [True, False], ids=["with a key", "with a wrong key"])
def test_neither_success_nor_failure_repeats_what_was_sent(
    edge: EdgeWorld, key: str, case: str, right: bool, path: str
) -> None:
    sent = key if right else key[:-1] + ("0" if key[-1] != "0" else "1")
    with capture_logs() as logs:
        response = edge.ask(path, BODIES[case], headers=[(b"authorization", b"Bearer " + sent.encode())])
    if response.status != 200:
        assert SECRET.encode() not in response.body
        assert len(response.body) <= ERROR_BYTES_MAX
        assert response.status < 500
    else:
        assert right
    check(edge, response.body if response.status != 200 else b"", logs, sent)


def check(edge: EdgeWorld, error: bytes, logs: Any, key: str) -> None:
    """None of the secrets is in an error, in the logs or in the request log."""
    text = error.decode() + repr(logs) + repr(edge.recorded())
    for secret in (SECRET, ANSWER, key, key.rpartition("-")[2]):
        assert secret not in text
    for size in (20, 40):
        # Not a part of the key's secret either.
        assert key[-size:] not in text


def test_a_failure_of_the_edge_logs_its_place_and_no_message(
    edge: EdgeWorld, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library's exception may have the prompt in its message."""

    def fails(*_: Any, **__: Any) -> Any:
        raise KeyError(SECRET)

    monkeypatch.setattr(ChatTemplate, "render", fails)
    with capture_logs() as logs:
        response = edge.ask(CHAT, chat(), headers=[(b"x-api-key", key.encode())])
    assert response.status == 500
    # The message is there for whoever lowers the level to debug.
    logged = [entry for entry in logs if entry["log_level"] != "debug"]
    [entry] = [entry for entry in logged if entry["event"] == "request_failed"]
    assert entry["failure"].startswith("KeyError at test_leaks.py")
    check(edge, response.body, logged, key)


def test_an_engines_rejection_is_not_repeated_in_the_request_log(edge: EdgeWorld) -> None:
    from headwater.actors.http.errors import rejected

    error = rejected(f"cannot compile {SECRET}", "response_format")
    assert SECRET in str(error)
    assert SECRET not in error.logged
    assert "response_format" in error.logged


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{{ raise_exception('Roles must alternate') }}", "Roles must alternate"),
        ("{{ raise_exception('Cannot take ' + messages[0].content) }}", "refused the messages."),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ messages[messages[0].content].x }}", "refused the messages."),
    ],
)
def test_a_template_complains_in_its_own_words_only(source: str, says: str) -> None:
    with pytest.raises(ApiError) as caught:
        ChatTemplate(source, {}).render([{"role": "user", "content": SECRET}])
    assert says in str(caught.value)
    assert SECRET not in str(caught.value)


@given(st.text(max_size=4000), st.text(max_size=600), st.sampled_from(["invalid_value", None]))
def test_errors_have_at_most_2_kb(message: str, param: str, code: str | None) -> None:
    """Characters that JSON escapes have up to six bytes."""
    error = ApiError(400, message, param=param or None, code=code)
    assert len(error.body()) <= ERROR_BYTES_MAX
    if len(message) <= 200:
        assert str(error) == message


def test_the_place_of_a_failure_names_causes_and_no_messages() -> None:
    def inner() -> None:
        raise ValueError(SECRET)

    try:
        try:
            inner()
        except ValueError as error:
            raise RuntimeError(SECRET) from error
    except RuntimeError as error:
        text = failure_place(error)
    assert "RuntimeError at test_leaks.py" in text
    assert "caused by ValueError at test_leaks.py" in text
    assert "inner" in text
    assert SECRET not in text


NAMES: Final = [
    b"authorization", b"x-api-key", b"x-headwater-tenant", b"x-headwater-tier", b"x-headwater-worker",
    b"x-headwater-session", b"x-session-id", b"x-headwater-policy", b"x-headwater-tolerates",
    b"x-headwater-router-temperature", b"x-headwater-deadline-ms", b"traceparent", b"content-length", b"x-other",
]  # fmt: skip
VALUES: Final = st.one_of(
    st.binary(max_size=80),
    st.sampled_from(
        [b"", b" ", b"Bearer", b"Bearer ", b"bearer x", b"Basic eDp5", b"Bearer a.b.c", b"gold", b"-1"]
    ),
    st.binary(max_size=40).map(lambda value: b"Bearer " + value),
    st.sampled_from([b"hw-", b"hw-0123456789ab-" + b"0" * 64, b"Bearer hw-0123456789ab-" + b"0" * 64]),
)


@pytest.mark.parametrize("credential", [True, False], ids=["with a key", "without"])
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(headers=st.lists(st.tuples(st.sampled_from(NAMES), VALUES), max_size=6), data=st.data())
def test_no_headers_lead_to_a_5xx(
    edge: EdgeWorld, key: str, credential: bool, headers: list[tuple[bytes, bytes]], data: Any
) -> None:
    own = [(b"x-api-key", key.encode())] if credential else []
    path = data.draw(st.sampled_from([CHAT, "/v1/models", "/v1/models/m", "/metrics", "/v1/embeddings"]))
    method = "POST" if path in (CHAT, "/v1/embeddings") else "GET"
    response = edge.ask(path, chat(), method=method, headers=[*own, *headers])
    assert response.status < 500, response.body
    if not credential:
        assert response.status in (400, 401)
    if response.status >= 400:
        assert len(response.body) <= ERROR_BYTES_MAX
        assert key[-64:].encode() not in response.body
