"""The W3C trace context of requests, and the ids of their traces and spans.

Ids are functions of names. So whoever describes a request, whenever, from whichever copy of the log, gives its spans the same ids, and
a worker knows the span of its leg, which is the parent of its engine's spans, before anybody has made that span.
"""

from collections.abc import Callable
from hashlib import blake2b
from typing import Final

import msgspec

from headwater.schemas.ids import request_of

TRACE_BYTES: Final = 16
SPAN_BYTES: Final = 8

RATIO_BITS: Final = 64
"""Of a trace id, its last bits decide whether a share of all traces has it, as in OpenTelemetry's `TraceIdRatioBased`."""


class TraceContext(msgspec.Struct, frozen=True, array_like=True):
    """The headers `traceparent` and `tracestate` of a client: its trace id, the id of its span (both in hexadecimal), whether it records the
    trace, and its `tracestate`. Without such headers it is empty.
    """

    trace: str = ""
    span: str = ""
    sampled: bool = False
    state: str = ""

    def trace_of(self, request: str) -> str:
        """Return the trace id of a request: the client's, or else one that the request's name gives."""
        return self.trace or blake2b(request.encode(), digest_size=TRACE_BYTES).hexdigest()

    def trace_of_attempt(self, attempt: str) -> Callable[[], str]:
        """Return what makes the trace id of an attempt's request, once a log line is written."""
        return lambda: self.trace_of(request_of(attempt))

    def is_sampled(self, request: str, ratio: float) -> bool:
        """Return whether the trace is recorded from its beginning: as the client decided, or else for this share of all trace ids."""
        if self.trace:
            return self.sampled
        low = int(self.trace_of(request), 16) & ((1 << RATIO_BITS) - 1)
        return low < round(ratio * (1 << RATIO_BITS))

    def headers_below(self, request: str, leg: str, ratio: float) -> dict[str, str]:
        """Return the headers that make the spans of an engine children of a leg's span."""
        trace = self.trace_of(request)
        flags = "01" if self.is_sampled(request, ratio) else "00"
        headers = {"traceparent": f"00-{trace}-{span_id(trace, request, leg)}-{flags}"}
        return headers | {"tracestate": self.state} if self.state else headers


NO_TRACE: Final = TraceContext()


def span_id(trace: str, request: str, *place: object) -> str:
    """Return the id of a span of a request, by its place in it: for the leg of an attempt the attempt's name, for the whole request nothing."""
    name = "\n".join((trace, request, *map(str, place)))
    return blake2b(name.encode(), digest_size=SPAN_BYTES).hexdigest()
