"""What a request leaves in the request log: its life in order, of its payload what was asked for, its trace."""

from collections.abc import Iterator
from hashlib import sha256
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from headwater.actors.edge.saga.record import CHECKPOINT_TOKENS
from headwater.engines.model_files import byte_tokenizer
from headwater.events.ports import Record
from headwater.schemas.events import (
    Event,
    KvGap,
    PayloadKind,
    RequestAccepted,
    RequestCheckpoint,
    RequestEnded,
    RequestRouted,
    RequestsOpen,
    RequestStarted,
)
from headwater.schemas.hashing import unpack_tokens
from headwater.schemas.names import NO_TRACE, TraceContext
from tests.support.worlds.edge import ANSWER, EdgeWorld, Response

COMPLETIONS = "/v1/completions"
SECRET = "the prompt is a secret river"
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"


@pytest.fixture(params=["off", "hashed", "full"])
def edge(request: pytest.FixtureRequest) -> Iterator[EdgeWorld]:
    """An edge for each kind of payload."""
    with EdgeWorld(request.param) as world:
        yield world


def ask(edge: EdgeWorld, **more: Any) -> tuple[Response, bytes]:
    """A completion, and the body that it was asked with."""
    body = msgspec.json.encode({"model": "m", "prompt": SECRET, "max_tokens": 1000, **more})
    return edge.ask(COMPLETIONS, body), body


def told(records: list[Record]) -> list[Event]:
    """Events without the marks of what is open."""
    return [e for one in records for e in one.batch.events if not isinstance(e, RequestsOpen)]


def test_a_life_is_told_from_acceptance_to_its_one_end() -> None:
    """Accepted, routed, started, a checkpoint for each 64 tokens, ended; each under the request's name."""
    with EdgeWorld(frame_tokens=1) as edge:
        edge.answer = edge.answer * 20
        wanted = 2 * CHECKPOINT_TOKENS + 10
        response, _ = ask(edge, max_tokens=wanted)
        assert response.status == 200
        accepted, routed, started, *checkpoints, ended = told(edge.recorded())
        name = response.document["id"]
        assert isinstance(accepted, RequestAccepted)
        assert (accepted.request, accepted.model, accepted.endpoint) == (name, "m", "completions")
        assert (accepted.max_tokens, accepted.choices, accepted.stream) == (wanted, 1, False)
        assert accepted.prompt_tokens == response.document["usage"]["prompt_tokens"]
        assert isinstance(routed, RequestRouted)
        assert msgspec.structs.replace(routed, after_ms=0.0) == RequestRouted(
            name, 0, edge.given[0].request, "w1", 1, 0
        )
        assert isinstance(started, RequestStarted)
        assert (started.request, started.worker, started.epoch, started.cached_tokens) == (name, "w1", 1, 0)
        assert checkpoints == [RequestCheckpoint(name, 0, tokens) for tokens in (64, 128)]
        assert isinstance(ended, RequestEnded)
        assert (ended.request, ended.reason, ended.completion_tokens) == (name, "length", wanted)
        assert (ended.migrations, ended.error) == (0, "")


def test_frames_of_any_size_give_checkpoints_at_least_64_tokens_apart() -> None:
    """A frame is never split: the checkpoint comes with the frame that completes 64."""
    with EdgeWorld("full", frame_tokens=50) as edge:
        edge.answer = edge.answer * 40
        ask(edge, max_tokens=400)
        marks = [event for event in told(edge.recorded()) if isinstance(event, RequestCheckpoint)]
        totals = [0, *(mark.emitted_tokens for mark in marks)]
        assert totals == [0, 100, 200, 300, 400]
        for (before, after), mark in zip(pairwise(totals), marks, strict=True):
            assert tuple(unpack_tokens(mark.tokens).tolist()) == edge.answer[before:after]


def test_each_choice_has_a_life_and_the_request_one_end() -> None:
    """Two choices: two placings, two starts, one acceptance and one end with an answer for each."""
    with EdgeWorld("full") as edge:
        response, _ = ask(edge, n=2)
        events = told(edge.recorded())
        assert [e.choice for e in events if isinstance(e, RequestRouted)] == [0, 1]
        assert sorted(e.choice for e in events if isinstance(e, RequestStarted)) == [0, 1]
        [accepted] = [e for e in events if isinstance(e, RequestAccepted)]
        [ended] = [e for e in events if isinstance(e, RequestEnded)]
        assert accepted.choices == 2
        assert [answer.decode() for answer in ended.answers] == [
            choice["text"] for choice in response.document["choices"]
        ]


def test_of_the_payload_is_recorded_what_was_asked_for(edge: EdgeWorld) -> None:
    """Off: no byte of prompt or answer. Hashed: their SHA-256. Full: they themselves, to the byte."""
    response, body = ask(edge)
    answer = response.document["choices"][0]["text"]
    assert answer == ANSWER
    events = told(records := edge.recorded())
    [accepted] = [e for e in events if isinstance(e, RequestAccepted)]
    [ended] = [e for e in events if isinstance(e, RequestEnded)]
    assert {accepted.payload, ended.payload} == {edge.settings.record_payloads}
    wanted: dict[PayloadKind, tuple[bytes, tuple[bytes, ...]]] = {
        "off": (b"", ()),
        "hashed": (sha256(body).digest(), (sha256(answer.encode()).digest(),)),
        "full": (body, (answer.encode(),)),
    }
    assert (accepted.body, ended.answers) == wanted[edge.settings.record_payloads]
    _bytes_hold(edge, records, [SECRET, answer])


def test_a_stop_string_and_a_stream_change_nothing_of_it(edge: EdgeWorld) -> None:
    """The answer that is recorded is what the client was shown, not what the worker went on with."""
    response, _ = ask(edge, stop=["stream"], stream=True)
    shown = "".join(
        choice["text"]
        for line in response.body.decode().split("\n\n")
        if line.startswith("data: {")
        for choice in msgspec.json.decode(line[6:])["choices"]
    )
    assert shown == ANSWER.partition("stream")[0]
    records = edge.recorded()
    [ended] = [e for e in told(records) if isinstance(e, RequestEnded)]
    assert ended.reason == "stop"
    if edge.settings.record_payloads == "full":
        assert ended.answers == (shown.encode(),)
    elif edge.settings.record_payloads == "hashed":
        assert ended.answers == (sha256(shown.encode()).digest(),)
    _bytes_hold(edge, records, [SECRET, shown])


def test_checkpoints_hold_tokens_only_where_payloads_are_full(edge: EdgeWorld) -> None:
    """Token ids are the answer by another name."""
    edge.answer = edge.answer * 20
    ask(edge, max_tokens=200)
    records = edge.recorded()
    marks = [event for event in told(records) if isinstance(event, RequestCheckpoint)]
    assert marks
    assert all(bool(mark.tokens) == (edge.settings.record_payloads == "full") for mark in marks)
    if edge.settings.record_payloads != "full":
        secret = b"".join(token.to_bytes(4, "little") for token in edge.answer[:4])
        assert all(secret not in data for data in _raw(edge, records))


def test_a_refused_request_leaves_nothing(edge: EdgeWorld) -> None:
    """Only what was accepted is owed an end."""
    assert ask(edge, temperature=9)[0].status == 400
    assert ask(edge, model="another")[0].status == 404
    assert told(edge.recorded()) == []


def _raw(edge: EdgeWorld, records: list[Record]) -> list[bytes]:
    return [edge.world.requests.raw(record.position).data for record in records]  # type: ignore[attr-defined]


def _bytes_hold(edge: EdgeWorld, records: list[Record], texts: list[str]) -> None:
    data = b"".join(_raw(edge, records))
    assert len(data) > 100
    for text in texts:
        assert (text.encode() in data) == (edge.settings.record_payloads == "full")
        ids = byte_tokenizer().encode(text).ids
        assert (
            edge.settings.record_payloads == "full"
            or b"".join(i.to_bytes(4, "little") for i in ids) not in data
        )


SOUND = [
    f"00-{TRACE}-{PARENT}-01",
    f"00-{TRACE}-{PARENT}-00",
    # A later version may say more behind what this one knows.
    f"01-{TRACE}-{PARENT}-01-more",
]
MALFORMED = [
    "",
    "nonsense",
    TRACE,
    f"00-{TRACE}",
    f"00-{TRACE[:-1]}-{PARENT}-01",
    f"00-{TRACE}0-{PARENT}-01",
    f"00-{'0' * 32}-{PARENT}-01",
    f"00-{TRACE}-{'0' * 16}-01",
    f"00-{'z' * 32}-{PARENT}-01",
    f"00-{TRACE.upper()}-{PARENT}-01",
    f"00-{TRACE}-{PARENT[:-1]}-01",
    f"00-{TRACE}-{PARENT}-0x",
    f"00-{TRACE}-{PARENT}-01-more",
    f"ff-{TRACE}-{PARENT}-01",
    f"0-{TRACE}-{PARENT}-01",
    f"00_{TRACE}_{PARENT}_01",
    f"00-{'é' * 32}-{PARENT}-01",
    f"00-{TRACE}-{PARENT}-01\n",
]


def accepted_with(edge: EdgeWorld, *headers: tuple[bytes, bytes]) -> RequestAccepted:
    """The acceptance of a completion with these headers."""
    body = {"model": "m", "prompt": SECRET, "max_tokens": 5}
    assert edge.ask(COMPLETIONS, body, headers=list(headers)).status == 200
    return [event for event in told(edge.recorded()) if isinstance(event, RequestAccepted)][-1]


@pytest.mark.parametrize("value", SOUND + MALFORMED)
def test_the_trace_context_of_the_client_is_recorded_and_sent_to_the_worker(value: str) -> None:
    """From `traceparent`, as W3C Trace Context spells it; whatever else stands there is ignored."""
    with EdgeWorld() as edge:
        accepted = accepted_with(edge, (b"traceparent", value.encode("latin-1")))
        wanted = TraceContext(TRACE, PARENT, value != SOUND[1]) if value in SOUND else NO_TRACE
        assert accepted.context == wanted
        assert [request.trace for request in edge.given] == [wanted]


def test_vendors_state_is_passed_on() -> None:
    """Several headers are one list; what is too long or not text is left out, and so is a state without a parent."""
    parent = (b"traceparent", SOUND[0].encode())
    with EdgeWorld() as edge:
        accepted = accepted_with(edge, (b"tracestate", b"a=1"), parent, (b"tracestate", b"b=2"))
        assert accepted.context == TraceContext(TRACE, PARENT, True, "a=1,b=2")
        for state in (b"a=" + b"1" * 511, b"a=\xe9"):
            assert accepted_with(edge, parent, (b"tracestate", state)).trace_state == ""
        assert accepted_with(edge, (b"tracestate", b"a=1")).context == NO_TRACE


def test_requests_that_share_a_message_keep_their_traces() -> None:
    """Each request has its own."""
    with EdgeWorld() as edge:
        for trace in ("a" * 32, "b" * 32, ""):
            headers = [(b"traceparent", f"00-{trace}-{PARENT}-01".encode())] if trace else []
            body = {"model": "m", "prompt": SECRET, "max_tokens": 5}
            assert edge.ask(COMPLETIONS, body, headers=headers).status == 200
        events = [event for record in edge.recorded() for event in record.batch.events]
        traces = [event.trace for event in events if isinstance(event, RequestAccepted)]
        assert traces == ["a" * 32, "b" * 32, ""]


def test_requests_are_refused_while_the_log_is_too_far_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """503 with Retry-After before anything is accepted; the rest of the queue is for the ends of what runs."""
    bound = 500
    monkeypatch.setattr("headwater.actors.edge.saga.record.ACCEPT_PENDING_MAX", bound)
    with EdgeWorld() as edge:
        for number in range(bound - 1):
            edge.ledger.write(KvGap(number))
        assert ask(edge)[0].status == 200, "one below the bound"
        pending = edge.ledger.writer.pending
        response, _ = ask(edge)
        assert response.status == 503
        assert response.headers[b"retry-after"] == b"1"
        assert response.document["error"]["code"] == "overloaded"
        assert edge.ledger.writer.pending == pending
        edge.recorded()
        assert ask(edge)[0].status == 200, "and again once the log is back"
