"""Engines' own spans: children of the legs that they computed, in the trace of the client, and none in traces that are not recorded."""

from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from headwater.schemas.names import span_id
from tests.engines.cases import VLLM, Case, only
from tests.support.clients.pictures import picture_url
from tests.support.engines.multimodal import tiny_vision_model
from tests.support.processes.fleet import FleetProcess
from tests.support.servers.otlp import Received, otlp_receiver

pytestmark = [pytest.mark.timeout(400)]

CLIENT = "00f067aa0ba902b7"
RECORDED, OTHER = "a" * 32, "b" * 32
ENGINE_SPAN = "llm_request"


async def ask(up: FleetProcess, trace: str, flags: str) -> str:
    """An image and a question, handed over from one worker to the other; returns the request's id."""
    image = {"type": "image_url", "image_url": {"url": picture_url(7)}}
    message = {"role": "user", "content": [image, {"type": "text", "text": f"{trace} What is it? " * 4}]}
    body: dict[str, Any] = {"model": "tiny", "messages": [message], "max_tokens": 8, "ignore_eos": True}
    async with up.client() as client:
        headers = {"traceparent": f"00-{trace}-{CLIENT}-{flags}"}
        answer = await client.post("/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    request: str = answer.headers["x-request-id"]
    return request


def is_whole(received: Received) -> bool:
    """Both legs of the recorded request, and both of the engines' spans, have arrived."""
    names = [span.name for span in received.of(RECORDED)]
    return names.count(ENGINE_SPAN) == 2 and "chat tiny" in names


@only(VLLM, pytest.mark.soak)
async def test_spans_of_the_engine_are_below_those_of_its_legs(case: Case, tmp_path: Path) -> None:
    """With the times and counts that the engine has of them."""
    flags = (
        "--prefill-workers",
        "1",
        "--decode-workers",
        "1",
        "--disaggregate",
        "always",
        "--local-prefill-tokens",
        "0",
        "--native=--kv-cache-memory-bytes=67108864",
    )
    model = (
        "--model",
        str(tiny_vision_model.ensure()),
        "--served-model-name",
        "tiny",
        "--max-model-len",
        "1024",
    )
    async with (
        otlp_receiver() as received,
        case.fleet(tmp_path, *flags, *model, "--otlp", received.url, "--trace-slow", "0") as up,
    ):
        await ask(up, OTHER, "00")
        request = await ask(up, RECORDED, "01")
        await received.until(is_whole)
    spans = {span.span_id.hex(): span for span in received.of(RECORDED)}
    engines = [span for span in spans.values() if span.name == ENGINE_SPAN]
    legs = [span_id(RECORDED, request, f"{request}-0-{number}") for number in (1, 2)]
    assert sorted(span.parent_span_id.hex() for span in engines) == sorted(legs)
    assert [spans[leg].name for leg in legs] == ["prefill", "decode"]
    for span in engines:
        leg = spans[span.parent_span_id.hex()]
        assert leg.start_time_unix_nano <= span.start_time_unix_nano < span.end_time_unix_nano
    assert [_text(spans[leg], "headwater.worker") for leg in legs] == ["prefill-0", "decode-0"]
    assert received.of(OTHER) == []


def _text(span: Span, name: str) -> str:
    found: str = next(one.value.string_value for one in span.attributes if one.key == name)
    return found
