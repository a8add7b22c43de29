"""Engines' own spans: what an engine is started with, and below which span of ours those of a request are."""

import os

import pytest

from headwater.engines import traits
from headwater.engines.sglang import SglangOptions
from headwater.engines.sglang.config import keyword_arguments as sglang_arguments
from headwater.engines.tensorrt_llm import TensorRtOptions
from headwater.engines.tensorrt_llm.config import arguments as tensorrt_llm_arguments
from headwater.engines.traits import EngineTraces
from headwater.ops.config.sections import TraceSettings, engine_traces, receiver_of
from headwater.ops.config.setting import ConfigError
from headwater.schemas.names import NO_TRACE, TraceContext, span_id
from tests.support.engines.settings import engine_settings

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
URL = "http://collector:4318"
SENT = EngineTraces(f"{URL}/v1/traces", "http/protobuf", 1.0)
VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES")


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without variables of OpenTelemetry's; what a test sets is gone after it."""
    for name in (*VARIABLES, "OTEL_EXPORTER_OTLP_PROTOCOL"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("attempt", "request_"),
    [("chatcmpl-0a-0-1", "chatcmpl-0a"), ("chatcmpl-edge-0-6-12-3", "chatcmpl-edge-0-6")],
)
def test_spans_of_an_engine_are_below_the_leg_of_its_attempt(attempt: str, request_: str) -> None:
    """Of the request that the attempt is of, whatever its id looks like; also where the client sent no trace."""
    sent = TraceContext(TRACE, "00f067aa0ba902b7", False)
    assert SENT.headers(attempt, sent) == {
        "traceparent": f"00-{TRACE}-{span_id(TRACE, request_, attempt)}-00"
    }
    own = NO_TRACE.trace_of(request_)
    assert SENT.headers(attempt, NO_TRACE) == {
        "traceparent": f"00-{own}-{span_id(own, request_, attempt)}-01"
    }


def test_engines_are_started_with_the_receiver() -> None:
    """In their own arguments, and with what they read from the environment only; what an operator has set stays."""
    os.environ["OTEL_SERVICE_NAME"] = "mine"
    sglang = sglang_arguments(engine_settings(SglangOptions(), name="w1", traces=SENT), {}, "", "", cpu=True)
    assert (sglang["enable_trace"], sglang["otlp_traces_endpoint"]) == (True, SENT.endpoint)
    tensorrt_llm = tensorrt_llm_arguments(engine_settings(TensorRtOptions(), name="w1", traces=SENT))
    assert tensorrt_llm["otlp_traces_endpoint"] == SENT.endpoint
    assert [os.environ[name] for name in VARIABLES] == ["http/protobuf", "mine", "service.instance.id=w1"]
    plain = sglang_arguments(
        engine_settings(SglangOptions(), name="w1", traces=EngineTraces(sample=1.0)), {}, "", "", cpu=True
    )
    assert "enable_trace" not in plain


def test_an_environment_without_opentelemetry_costs_the_engines_spans_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would not start with them."""
    monkeypatch.setattr(traits, "find_spec", lambda name: None if name.endswith("exporter") else object())
    assert SENT.announced("sglang", "w1") == SENT._replace(endpoint="")
    assert "OTEL_SERVICE_NAME" not in os.environ


@pytest.mark.parametrize(
    ("url", "variable", "endpoint", "found"),
    [
        (URL, "", f"{URL}/v1/traces", "http/protobuf"),
        (f"{URL}/", "http/protobuf", f"{URL}/v1/traces", "http/protobuf"),
        ("https://c/otlp/v1/traces", "", "https://c/otlp/v1/traces", "http/protobuf"),
        ("http://c:4317", "", "http://c:4317", "grpc"),
        ("http://c:4317", "http/protobuf", "http://c:4317/v1/traces", "http/protobuf"),
        (URL, "grpc", URL, "grpc"),
    ],
)
def test_a_receiver_is_found_by_its_url(
    url: str, variable: str, endpoint: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As OpenTelemetry's own variables would have it."""
    if variable:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", variable)
    assert engine_traces(TraceSettings(url, 0.5)) == EngineTraces(endpoint, found, 0.5)


@pytest.mark.parametrize("url", ["collector:4318", "ftp://c", "http://", "http://c:port", "grpc://c:4317"])
def test_what_is_no_url_is_rejected(url: str) -> None:
    """By name."""
    with pytest.raises(ConfigError, match="--otlp"):
        receiver_of(url)
