"""Trace contexts and ids: the same ones whoever computes them, and shares of traces as OpenTelemetry's own sampler has them."""

import pytest

from headwater.schemas.names import NO_TRACE, TraceContext, span_id

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SENT = TraceContext(TRACE, "00f067aa0ba902b7", True, "vendor=1")
NAMES = [f"chatcmpl-{number:024x}" for number in range(2_000)]


def test_ids_are_functions_of_names() -> None:
    """Pinned: a worker of another release must find the span that a leg's engine joins."""
    assert SENT.trace_of("r") == TRACE
    assert NO_TRACE.trace_of("chatcmpl-1") == "859cb54fff01853ebe5290c3db17ced7"
    assert span_id(TRACE, "chatcmpl-1") == "e4d6944e7b98c80d"
    assert span_id(TRACE, "chatcmpl-1", "chatcmpl-1-0-1") == "1f2249773d948ff0"
    assert len({span_id(TRACE, name, leg) for name in NAMES for leg in ("a", "b")}) == 2 * len(NAMES)


@pytest.mark.parametrize("ratio", [0.0, 0.01, 0.5, 1.0])
def test_a_share_of_traces_is_recorded_as_opentelemetry_would(ratio: float) -> None:
    """By the trace id alone, so every process decides alike; and everything in a smaller share is in the greater one."""
    from opentelemetry.sdk.trace.sampling import Decision, TraceIdRatioBased

    sampler = TraceIdRatioBased(ratio)
    taken = [name for name in NAMES if NO_TRACE.is_sampled(name, ratio)]
    assert taken == [
        name
        for name in NAMES
        if sampler.should_sample(None, int(NO_TRACE.trace_of(name), 16), "").decision
        is Decision.RECORD_AND_SAMPLE
    ]
    assert abs(len(taken) - ratio * len(NAMES)) < 0.03 * len(NAMES)


@pytest.mark.parametrize("sampled", [True, False])
def test_a_client_decides_for_its_own_trace(sampled: bool) -> None:
    """Whatever share is recorded of those without a client's trace."""
    context = TraceContext(TRACE, SENT.span, sampled)
    assert [context.is_sampled("r", ratio) for ratio in (0.0, 1.0)] == [sampled, sampled]


def test_an_engine_is_told_the_span_of_its_leg() -> None:
    """And whether to record it, so that it records nothing of traces that nobody does."""
    span = span_id(TRACE, "r", "r-0-1")
    assert SENT.headers_below("r", "r-0-1", 0.0) == {
        "traceparent": f"00-{TRACE}-{span}-01",
        "tracestate": "vendor=1",
    }
    trace = NO_TRACE.trace_of("r")
    own = f"00-{trace}-{span_id(trace, 'r', 'r-0-1')}"
    assert NO_TRACE.headers_below("r", "r-0-1", 0.0) == {"traceparent": f"{own}-00"}
    assert NO_TRACE.headers_below("r", "r-0-1", 1.0) == {"traceparent": f"{own}-01"}
