"""No field of a client reaches an engine unless it is listed: what only the fleet may set is taken out and counted."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.actors import metrics
from headwater.actors.edge.apis.chat_types import ChatRequest, CompletionRequest
from headwater.actors.edge.saga.fields import (
    NAMES,
    FieldChecker,
    ReservedFields,
    UnsupportedFields,
    is_reserved,
    without_reserved,
)
from headwater.actors.http.errors import ApiError
from headwater.schemas.inference import GenerateRequest
from tests.support.worlds.edge import EdgeWorld

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SOUND: dict[str, dict[str, Any]] = {
    CHAT: {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
    COMPLETIONS: {"model": "m", "prompt": "hi"},
}
MARK = "from-the-client"
MARK_NUMBER = 7_318_008_711

names = st.sampled_from(
    [*sorted(NAMES), "bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key", "disagg_x"]
)
marks = st.just(MARK) | st.just(MARK_NUMBER)
marked = st.recursive(
    marks,
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3) | st.dictionaries(names | st.just("x"), inner, min_size=1)
    ),
    max_leaves=6,
)
smuggled = st.dictionaries(names, marked, min_size=1, max_size=4)


@pytest.fixture(scope="module")
def edge() -> Iterator[EdgeWorld]:
    """One edge for all requests of this file."""
    with EdgeWorld() as world:
        yield world


def given_to_engine(edge: EdgeWorld, path: str, body: dict[str, Any]) -> GenerateRequest:
    """What the engine got for a request."""
    edge.given.clear()
    response = edge.ask(path, body)
    assert response.status == 200, response.body
    [request] = edge.given
    return request


def plain(request: GenerateRequest) -> GenerateRequest:
    """Without what the edge makes anew for each request."""
    return msgspec.structs.replace(request, request="", handle=0)


@pytest.mark.parametrize("path", SOUND)
@given(data=st.data())
def test_no_field_of_ours_reaches_an_engine_from_a_client(
    edge: EdgeWorld, path: str, data: st.DataObject
) -> None:
    """Wherever such a field stands in a request, the engine gets the same bytes as without it."""
    sound = SOUND[path]
    expected = given_to_engine(edge, path, {**sound, "logits_processors": {"shout": {"louder": {"by": 2}}}})
    fields = data.draw(smuggled)
    body: dict[str, Any] = {
        **fields,
        "extra_body": fields,
        "nvext": fields,
        "sampling_params": fields,
        "metadata": fields,
        "stream_options": fields,
        **sound,
        "logits_processors": {"shout": {**fields, "louder": {**fields, "by": 2}}},
    }
    if path == CHAT:
        body["messages"] = [{**fields, **sound["messages"][0]}]
        body["chat_template_kwargs"] = fields
    request = given_to_engine(edge, path, body)
    assert plain(request) == plain(expected)
    sent = msgspec.msgpack.encode(request)
    assert MARK.encode() not in sent
    assert msgspec.msgpack.encode(MARK_NUMBER) not in sent


json_names = st.text(max_size=8) | names


@given(unknown=st.dictionaries(st.text(st.characters(categories=["Ll"]), min_size=12, max_size=16), marked))
def test_no_field_that_nobody_knows_reaches_an_engine(edge: EdgeWorld, unknown: dict[str, Any]) -> None:
    """It is an allow-list: the names above are for counting, not for safety."""
    known = {*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__}
    unknown = {name: value for name, value in unknown.items() if name not in known}
    for path, sound in SOUND.items():
        assert plain(given_to_engine(edge, path, {**unknown, **sound})) == plain(
            given_to_engine(edge, path, sound)
        )


@given(value=st.recursive(st.none() | st.integers(), lambda i: st.lists(i) | st.dictionaries(json_names, i)))
def test_what_is_passed_on_as_it_is_holds_none_of_ours(value: Any) -> None:
    """At any depth; everything else stays."""

    def expect(one: Any) -> Any:
        if isinstance(one, dict):
            return {name: expect(inner) for name, inner in one.items() if not is_reserved(name)}
        return [expect(inner) for inner in one] if isinstance(one, list) else one

    assert without_reserved(value) == expect(value)


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        (b'"kv_transfer_params": {"a": 1}', {"kv_transfer_params"}),
        (b'"rid": null, "lora_path": [{"x": 1}]', {"rid", "lora_path"}),
        (b'"extra_body": [{"rid": 1}], "bootstrap_host": "x"', {"rid", "bootstrap_host"}),
        (b'"extra_body": {"bootstrap_of_my_own": 1, "bootstrap_too": 2}', {"bootstrap_*"}),
        (b'"\\u0072id": 1', {"rid"}),
        (b'"kv_\\u0074ransfer_params": 1', {"kv_transfer_params"}),
        (b'"logits_processors": {"shout": {"by": [{"kv_transfer_params": 1}]}}', {"kv_transfer_params"}),
        (b'"metadata": {"rid": 1}, "tools": null', set()),
        (b'"extra_body": ' + b'{"x":' * 500 + b'{"rid": 1}' + b"}" * 500, set()),
        (b'"user": "u"', set()),
    ],
)
def test_attempts_are_counted_by_name(edge: EdgeWorld, fields: bytes, found: set[str]) -> None:
    """Also behind JSON's escapes; a client's own names never become labels of a metric."""
    names = {*NAMES, "bootstrap_*"}

    def counts() -> dict[str, float]:
        return {name: metrics.STRIPPED.labels(name)._value.get() for name in names}

    before = counts()
    body = b'{"model": "m", "messages": [{"role": "user", "content": "{\\"rid\\": 1}"}], ' + fields + b"}"
    assert edge.ask(CHAT, body).status == 200
    assert {name for name, value in counts().items() if value > before[name]} == found


def test_an_attempt_is_logged_once_for_each_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that always sends it does not fill the log."""
    logged: list[str] = []

    class Log:
        def warning(self, _event: str, **facts: Any) -> None:
            logged.append(str(facts))

    # Not what is printed: how much of it is, is up to whoever configured logging before.
    monkeypatch.setattr("headwater.actors.edge.saga.fields._log", Log())
    checker = FieldChecker()
    for _ in range(3):
        checker.count(ReservedFields(extra_body={"lora_path": 1}))
    checker.count(ReservedFields(), {"lora_path": 1, "session_id": 1})
    for name in ("lora_path", "session_id"):
        assert sum(name in line for line in logged) == 1


@pytest.mark.parametrize(
    ("field", "value", "hint"),
    [
        ("custom_logit_processor", "gASV", "name one of the model's own in logits_processors"),
        ("session_params", {"id": "s"}, "send the whole conversation"),
    ],
)
def test_what_only_sglang_has_is_refused_with_what_to_do(field: str, value: Any, hint: str) -> None:
    """A pickled class would be run, and a conversation that one engine keeps is part of the prompt nowhere else."""
    with pytest.raises(ApiError, match=f"{field} is not supported by this release; {hint}"):
        FieldChecker().check(msgspec.convert({field: value}, UnsupportedFields))
    FieldChecker().check(msgspec.convert({field: None}, UnsupportedFields))
