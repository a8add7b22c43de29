"""The picker protocol, message by message: modes, pieces, trailers, metadata, errors, and streams that end early."""

from typing import Any

import pytest

from headwater.actors.edge.saga.http_call import Picked
from headwater.actors.http.body import Bodies
from headwater.actors.http.errors import overloaded
from headwater.actors.limits import BodyLimits
from headwater.actors.picker import messages as ext_proc
from headwater.actors.picker.exchange import CHUNK_BYTES, Exchange, served_by, subset_of
from headwater.actors.picker.pick import Asked, Pick
from headwater.schemas.routing import NO_CONSTRAINTS, NO_PREFERENCES, Decision, Weights
from tests.support.worlds.clock import ManualClock

MADE = (1, 0, 0, 0, "x-0-1", 4, 6, 0, 0, 0, 0, NO_CONSTRAINTS, NO_PREFERENCES, Weights(), 0, "w", 1, ())
PICK = Pick(("10.0.0.1:80", "10.0.0.2:80"), b"sealed", Picked("x", "p", Decision(*MADE)))
HEADERS = (":method", "POST"), (":path", "/v1/chat/completions?a=b"), ("accept", "*/*")
FULL, BUFFERED, NONE = (ext_proc.FULL_DUPLEX_STREAMED, ext_proc.BUFFERED, ext_proc.NONE)


class Decided:
    """A picker that knows its answer, and what it was asked."""

    def __init__(self, error: Exception | None = None) -> None:
        self.sees_responses = False
        self.clock = ManualClock()
        self.asked: list[Asked] = []
        self.withdrawn: list[Pick] = []
        self._error = error

    async def pick(self, asked: Asked) -> Pick:
        """See `Picker`."""
        self.asked.append(asked)
        if self._error is not None:
            raise self._error
        return PICK

    def next_in_turn(self, subset: object) -> Pick:
        """See `Picker`."""
        return Pick(("10.0.0.3:80",))

    def withdraw(self, pick: Pick) -> None:
        """See `Picker`."""
        self.withdrawn.append(pick)


def exchange(picker: Decided, *, bytes_max: int = 1 << 20) -> tuple[Exchange, Bodies]:
    """A stream, and the account of bodies."""
    bodies = Bodies(BodyLimits(bytes_max=bytes_max))
    return Exchange(picker, bodies), bodies  # type: ignore[arg-type]


def first(mode: int, *, end: bool = False) -> Any:
    """The message with the request's headers."""
    message = ext_proc.ProcessingRequest()
    message.protocol_config.request_body_mode = mode
    message.protocol_config.response_body_mode = mode
    message.request_headers.end_of_stream = end
    for key, value in HEADERS:
        message.request_headers.headers.headers.add(key=key, raw_value=value.encode())
    return message


def body(data: bytes, *, end: bool) -> Any:
    """A piece of the request's body."""
    return ext_proc.ProcessingRequest(request_body=ext_proc.HttpBody(body=data, end_of_stream=end))


def headers_of(common: Any) -> dict[str, bytes]:
    """The headers that an answer sets."""
    return {one.header.key: one.header.raw_value for one in common.header_mutation.set_headers}


def sent_back(answers: list[Any]) -> tuple[bytes, list[bool]]:
    """The body in these answers, and which pieces end it."""
    pieces = [one.request_body.response.body_mutation.streamed_response for one in answers]
    assert all(len(piece.body) <= CHUNK_BYTES for piece in pieces)
    return b"".join(piece.body for piece in pieces), [piece.end_of_stream for piece in pieces]


async def test_full_duplex_answers_with_the_whole_body_after_the_headers() -> None:
    """Nothing before the body is whole; the endpoints as a header and as metadata, equal."""
    picker = Decided()
    one, bodies = exchange(picker)
    parts = [b"a" * 100_000, b"b" * 50_000, b""]
    assert await one.take(first(FULL)) == []
    assert await one.take(body(parts[0], end=False)) == []
    assert bodies.in_flight_bytes == 100_000
    assert await one.take(body(parts[1], end=False)) == []
    answers = await one.take(body(parts[2], end=True))
    assert picker.asked == [
        Asked("POST", "/v1/chat/completions", [(b"accept", b"*/*")], b"".join(parts), None)
    ]
    common = answers[0].request_headers.response
    assert headers_of(common) == {
        "x-gateway-destination-endpoint": b"10.0.0.1:80,10.0.0.2:80",
        "x-headwater-decision": b"sealed",
    }
    lb = answers[0].dynamic_metadata.fields["envoy.lb"].struct_value
    assert lb.fields["x-gateway-destination-endpoint"].string_value == "10.0.0.1:80,10.0.0.2:80"
    assert sent_back(answers[1:]) == (b"".join(parts), [False, False, True])
    assert bodies.in_flight_bytes == 0


async def test_a_body_that_ends_with_trailers() -> None:
    """They are the end of the body: it has no last piece."""
    one, _ = exchange(Decided())
    await one.take(first(FULL))
    await one.take(body(b"{}", end=False))
    message = ext_proc.ProcessingRequest(request_trailers=ext_proc.HttpTrailers())
    answers = await one.take(message)
    kinds = [answer.WhichOneof("response") for answer in answers]
    assert kinds == ["request_headers", "request_body", "request_trailers"]
    assert sent_back(answers[1:2]) == (b"{}", [False])


async def test_a_body_too_large_to_keep_passes_without_a_decision() -> None:
    """The edge says what is wrong with it. A decision that a client forged does not pass."""
    picker = Decided()
    one, bodies = exchange(picker, bytes_max=100_000)
    await one.take(first(FULL))
    assert await one.take(body(b"a" * 90_000, end=False)) == []
    answers = await one.take(body(b"a" * 20_000, end=False))
    common = answers[0].request_headers.response
    assert headers_of(common) == {"x-gateway-destination-endpoint": b"10.0.0.3:80"}
    assert list(common.header_mutation.remove_headers) == ["x-headwater-decision"]
    assert sent_back(answers[1:]) == (b"a" * 110_000, [False, False])
    assert sent_back(await one.take(body(b"b", end=True))) == (b"b", [True])
    assert (picker.asked, bodies.in_flight_bytes) == ([], 0)


async def test_buffered_bodies_and_requests_without_any() -> None:
    """The mode is in the first message: headers pass, and the answer to the body has the endpoints."""
    one, _ = exchange(Decided())
    [passed] = await one.take(first(BUFFERED))
    assert not headers_of(passed.request_headers.response)
    [answer] = await one.take(body(b"{}", end=True))
    assert b"10.0.0.1:80" in headers_of(answer.request_body.response)["x-gateway-destination-endpoint"]
    assert not answer.request_body.response.HasField("body_mutation")
    assert answer.dynamic_metadata.fields["envoy.lb"]
    for mode, end in ((BUFFERED, True), (FULL, True), (NONE, False)):
        one, _ = exchange(Decided())
        [answer] = await one.take(first(mode, end=end))
        assert headers_of(answer.request_headers.response)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_a_refusal_is_an_immediate_response_in_the_form_of_the_api(path: str) -> None:
    """With the time after which to try again."""
    one, _ = exchange(Decided(overloaded("Nobody is ready.", 2.0)))
    message = first(FULL, end=True)
    message.request_headers.headers.headers[1].raw_value = path.encode()
    [answer] = await one.take(message)
    immediate = answer.immediate_response
    assert immediate.status.code == (503 if path == "/v1/chat/completions" else 529)
    assert b"Nobody is ready." in immediate.body
    headers = {one.header.key: one.header.raw_value for one in immediate.headers.set_headers}
    assert headers["retry-after"] == b"2"
    assert "content-length" not in headers


async def test_a_bug_costs_the_decision_and_not_the_request() -> None:
    """The next endpoint in turn gets it."""
    one, _ = exchange(Decided(RuntimeError("bug")))
    [answer] = await one.take(first(FULL, end=True))
    assert headers_of(answer.request_headers.response) == {"x-gateway-destination-endpoint": b"10.0.0.3:80"}


def response(*, served: str = "", upstream: str = "", status: int = 200) -> Any:
    """The message with the response's headers."""
    message = ext_proc.ProcessingRequest()
    message.response_headers.headers.headers.add(key=":status", raw_value=str(status).encode())
    if served:
        lb = message.metadata_context.filter_metadata["envoy.lb"]
        lb.fields["x-gateway-destination-endpoint-served"].string_value = served
    if upstream:
        attributes = message.attributes["envoy.filters.http.ext_proc"]
        attributes.fields["upstream.address"].string_value = upstream
    return message


async def test_responses_pass_and_say_who_served() -> None:
    """In metadata as the protocol has it, or as Envoy's attribute; pieces of a body come back as they are."""
    assert served_by(response(served="10.0.0.2:80", upstream="10.0.0.9:80")) == "10.0.0.2:80"
    assert served_by(response(upstream="10.0.0.9:80")) == "10.0.0.9:80"
    assert served_by(response()) == ""
    picker = Decided()
    one, _ = exchange(picker)
    await one.take(first(FULL, end=True))
    assert (await one.take(response(served="10.0.0.2:80")))[0].HasField("response_headers")
    piece = ext_proc.HttpBody(body=b"data", end_of_stream=True)
    [answer] = await one.take(ext_proc.ProcessingRequest(response_body=piece))
    streamed = answer.response_body.response.body_mutation.streamed_response
    assert (streamed.body, streamed.end_of_stream) == (b"data", True)
    one.end(aborted=True)
    assert picker.withdrawn == []


async def test_a_request_that_an_edge_refused_counts_no_more() -> None:
    """It reached no worker; if it did, the router knows."""
    picker = Decided()
    for status in (200, 429, 502):
        one, _ = exchange(picker)
        await one.take(first(FULL, end=True))
        await one.take(response(status=status))
        one.end(aborted=False)
    assert len(picker.withdrawn) == 2


@pytest.mark.parametrize(
    ("sees_responses", "aborted", "withdrawn"),
    [(False, False, 0), (False, True, 1), (True, False, 1), (True, True, 1)],
)
async def test_a_stream_that_ends_before_its_response(
    sees_responses: bool, aborted: bool, withdrawn: int
) -> None:
    """Its decision is withdrawn, unless the gateway may be one that never says when responses begin."""
    picker = Decided()
    picker.sees_responses = sees_responses
    one, _ = exchange(picker)
    await one.take(first(FULL, end=True))
    one.end(aborted=aborted)
    assert len(picker.withdrawn) == withdrawn


@pytest.mark.parametrize(
    ("value", "subset"),
    [
        ("10.0.0.1:80, 10.0.0.2:80", {"10.0.0.1:80", "10.0.0.2:80"}),
        (["10.0.0.1:80", "10.0.0.2:80,[::1]:80"], {"10.0.0.1:80", "10.0.0.2:80", "[::1]:80"}),
        ([], set()),
        ("", set()),
    ],
)
def test_subsets_come_as_lists_and_as_texts(value: Any, subset: set[str]) -> None:
    """Gateways make the metadata in several ways. An empty list allows nothing."""
    message = ext_proc.ProcessingRequest()
    metadata = message.metadata_context.filter_metadata
    assert subset_of(metadata) is None
    metadata["envoy.lb.subset_hint"].update({"x-gateway-destination-endpoint-subset": value})
    assert subset_of(metadata) == frozenset(subset)
