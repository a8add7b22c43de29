"""Traces of a fleet, by receivers that are real: what they get is what the logs have of each request."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import pytest_asyncio
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from headwater.schemas.names import span_id
from tests.support.clients.pictures import picture_url
from tests.support.processes.fleet import FleetProcess, fleet
from tests.support.servers.otlp import Received, collector, otlp_receiver

pytestmark = [pytest.mark.processes, pytest.mark.asyncio(loop_scope="module")]

TRACE, CLIENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TEXT = "Tell me a long story about the river in this picture. " * 20


class Traced(NamedTuple):
    """A fleet, and the receiver of its traces."""

    up: FleetProcess
    received: Received


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def traced(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Traced]:
    """A prefill worker, two decode workers and an encode worker; only traces that must be are sent."""
    flags = ("--prefill-workers", "1", "--decode-workers", "2", "--encode-workers", "1")
    always = ("--disaggregate", "always", "--encode-legs", "always")
    async with (
        otlp_receiver() as received,
        fleet(
            tmp_path_factory.mktemp("traces"),
            *("--engine", "sim", *flags, *always, "--otlp", received.url, "--trace-sample", "0"),
        ) as up,
    ):
        yield Traced(up, received)


def chat(tokens: int, seed: int, **fields: Any) -> dict[str, Any]:
    """A conversation with an image, of which no worker has anything cached from one of another seed."""
    image = {"type": "image_url", "image_url": {"url": picture_url(seed)}}
    content = [{"type": "text", "text": f"{seed}. {TEXT}"}, image]
    message = {"role": "user", "content": content}
    return {
        "model": "sim",
        "messages": [message],
        "max_tokens": tokens,
        "ignore_eos": True,
        "seed": seed,
        **fields,
    }


async def in_log(up: FleetProcess, request: str) -> list[dict[str, Any]]:
    """The spans that `headwater trace` makes of the log."""
    code, output = await up.command("trace", request, "--json")
    assert code == 0, output
    spans: list[dict[str, Any]] = json.loads(output)["spans"]
    return spans


async def _lose_decoder(up: FleetProcess) -> str:
    """A stream whose decode worker is killed; returns the request's id once its answer is whole."""
    flags = {"traceparent": f"00-{TRACE}-{CLIENT}-00", "tracestate": "vendor=1"}
    chunks, request = 0, ""
    async with (
        up.client() as client,
        client.stream(
            "POST", "/v1/chat/completions", json=chat(300, 1, stream=True), headers=flags
        ) as response,
    ):
        request = response.headers["x-request-id"]
        async for line in response.aiter_lines():
            chunks += line.startswith("data: {")
            if chunks == 20:
                stats = await up.stats()
                [worker] = [one["id"] for one in stats if one["id"].startswith("decode") and one["running"]]
                await up.kill_worker(worker)
                chunks += 1
        assert line == "data: [DONE]" or chunks > 300
    return request


async def test_one_trace_joins_client_edge_router_and_workers(traced: Traced) -> None:
    """A request with an image, handed over, and moved when its worker died: what the receiver gets is what the log has."""
    request = await _lose_decoder(traced.up)
    wanted = await in_log(traced.up, request)
    await traced.received.until(lambda received: len(received.of(TRACE)) >= len(wanted))
    got = {span.span_id.hex(): span for span in traced.received.of(TRACE)}
    assert len(got) == len(traced.received.of(TRACE)) == len(wanted)
    for one in wanted:
        span = got[one["span"]]
        assert (span.name, span.parent_span_id.hex()) == (one["name"], one["parent"])
        assert (span.start_time_unix_nano, span.end_time_unix_nano) == (one["start_ns"], one["end_ns"])
        assert span.trace_state == "vendor=1"
    _check_tree(request, wanted, got)


def _check_tree(request: str, spans: list[dict[str, Any]], got: dict[str, Span]) -> None:
    root, *others = spans
    assert (root["parent"], root["instance"]) == (CLIENT, "edge-0")
    assert got[root["span"]].kind == Span.SPAN_KIND_SERVER
    assert root["attributes"]["headwater.migrations"] == 1
    assert {one["parent"] for one in others} <= {one["span"] for one in spans}
    for one in others:
        assert root["start_ns"] <= one["start_ns"] <= one["end_ns"] <= root["end_ns"], one["name"]
    instances = {one["instance"] for one in spans}
    assert {"edge-0", "router-0", "encode-0", "prefill-0", "decode-0", "decode-1"} == instances
    names = {one["name"] for one in spans}
    assert {
        "prepare",
        "media",
        "route",
        "decide",
        "encode",
        "prefill",
        "handoff",
        "decode",
        "migrate",
    } <= names
    lost = next(one for one in others if one["error"])
    assert got[lost["span"]].status.code == Status.STATUS_CODE_ERROR
    [moved] = [one for one in others if one["links"] == [lost["span"]]]
    assert moved["instance"] != lost["instance"]
    assert lost["span"] == span_id(TRACE, request, lost["attributes"]["headwater.attempt"])


async def test_a_trace_is_sent_from_the_log_over_grpc(
    traced: Traced, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a request that was not sampled, to a collector, which has each span with the process that it is of."""
    async with traced.up.client() as client:
        answer = await client.post("/v1/chat/completions", json=chat(3, 2))
    request = answer.headers["x-request-id"]
    wanted = await in_log(traced.up, request)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    async with collector(tmp_path) as there:
        code, output = await traced.up.command("trace", request, "--otlp", there.url)
        assert code == 0, output
        assert f"{len(wanted)} spans, to {there.url} (grpc)" in output
        log = await there.until_logged(one["span"] for one in wanted)
    for service in ("edge", "router", "worker"):
        assert f"headwater-{service}" in log
    assert not any(span.span_id.hex() == wanted[0]["span"] for span in traced.received.spans)


async def test_a_tracer_that_dies_is_started_again_and_goes_on(traced: Traced) -> None:
    """With the requests that ended meanwhile: none of them is lost."""
    trace = TRACE[::-1]
    await traced.up.until(
        "the tracer is ready",
        lambda stats: any(one["id"] == "tracer-0" and one["state"] == "ready" for one in stats),
    )
    traced.up.kill("--name tracer-0")
    async with traced.up.client() as client:
        headers = {"traceparent": f"00-{trace}-{CLIENT}-01"}
        answers = await asyncio.gather(
            *(client.post("/v1/chat/completions", json=chat(3, 3), headers=headers) for _ in range(3))
        )
    spans = [
        one["span"] for answer in answers for one in await in_log(traced.up, answer.headers["x-request-id"])
    ]
    await traced.received.until(
        lambda received: {one.span_id.hex() for one in received.of(trace)} >= {*spans}
    )


async def test_a_receiver_that_is_not_there_is_an_error(
    traced: Traced, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Said in a line, with the exit status."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    async with traced.up.client() as client:
        answer = await client.post("/v1/chat/completions", json=chat(3, 4))
    request = answer.headers["x-request-id"]
    code, output = await traced.up.command("trace", request, "--otlp", "http://127.0.0.1:9")
    assert code == 1
    assert "the trace was not sent to http://127.0.0.1:9/v1/traces (http)" in output
    code, output = await traced.up.command("trace", "chatcmpl-none")
    assert (code, "no events of chatcmpl-none" in output) == (1, True)
