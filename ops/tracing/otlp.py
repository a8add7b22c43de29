"""Spans in the form of OpenTelemetry's SDK, and their way to a receiver by its exporters.

The SDK's tracers make spans as things happen, with ids of their own choice. Here both are known beforehand, so its exporters are given what
a tracer would give them.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from headwater import __version__
from headwater.ops.config.setting import ConfigError
from headwater.ops.config.trace import Receiver
from headwater.ops.history.trace_spans import GEN_AI_SCHEMA, Service, Trace, TraceSpan

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan

SCOPE: Final = "headwater"
EXTRA: Final = "otel"


def need_opentelemetry() -> None:
    """Raises `ConfigError` where OpenTelemetry's SDK and its exporters are not installed."""
    try:
        import opentelemetry.exporter.otlp.proto.grpc
        import opentelemetry.exporter.otlp.proto.http
        import opentelemetry.sdk.trace  # noqa: F401 (for its presence)
    except ImportError as error:
        raise ConfigError(
            f"sending traces needs OpenTelemetry, which is not installed ({error.name}): pip install 'headwater[{EXTRA}]'"
        ) from error


class SpanForm:
    """Makes the SDK's spans. `ns` is the namespace of the fleet."""

    def __init__(self, ns: str) -> None:
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        self._ns = ns
        self._scope = InstrumentationScope(SCOPE, __version__, GEN_AI_SCHEMA)
        self._resources: dict[tuple[Service, str], Resource] = {}

    def spans(self, trace: Trace) -> Iterator["ReadableSpan"]:
        """All spans of a trace."""
        from opentelemetry.trace import TraceState

        state = TraceState.from_header([trace.state])
        services = {span.span: span.service for span in trace.spans}
        for span in trace.spans:
            # What another process asked for is the work of a server.
            yield self._span(span, trace.trace, state, serves=services.get(span.parent) != span.service)

    def _span(self, span: TraceSpan, trace: str, state: Any, *, serves: bool) -> "ReadableSpan":
        from opentelemetry.sdk.trace import Event, ReadableSpan
        from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

        trace_id, flags = int(trace, 16), TraceFlags(TraceFlags.SAMPLED)

        def context(id_: str, *, remote: bool = False) -> SpanContext:
            return SpanContext(trace_id, int(id_, 16), remote, flags, state)

        return ReadableSpan(
            span.name,
            context(span.span),
            context(span.parent, remote=serves) if span.parent else None,
            self._resource(span.service, span.instance),
            dict(span.attributes),
            [Event(one.name, dict(one.attributes), one.time_ns) for one in span.events],
            [Link(context(id_)) for id_ in span.links],
            SpanKind.SERVER if serves else SpanKind.INTERNAL,
            status=Status(StatusCode.ERROR, span.error) if span.error else Status(),
            start_time=span.start_ns,
            end_time=span.end_ns,
            instrumentation_scope=self._scope,
        )

    def _resource(self, service: Service, instance: str) -> "Resource":
        from opentelemetry.sdk.resources import Resource

        key = service, instance
        if key not in self._resources:
            self._resources[key] = Resource.create(
                {
                    "service.name": f"headwater-{service}",
                    "service.namespace": self._ns,
                    "service.instance.id": instance,
                    "service.version": __version__,
                }
            )
        return self._resources[key]


class OtlpSender:
    """Sends traces to one receiver. Raises `ConfigError` where OpenTelemetry is not installed, or its variables are wrong."""

    def __init__(self, receiver: Receiver, ns: str) -> None:
        need_opentelemetry()
        self.receiver = receiver
        self._form = SpanForm(ns)
        self._reasons = _Reasons()
        try:
            self._exporter = _exporter(receiver)
        except ValueError as error:
            raise ConfigError(f"{receiver.endpoint}: {error}") from error

    def spans(self, traces: Iterable[Trace]) -> list["ReadableSpan"]:
        """The spans of traces, as `send` takes them."""
        return [span for trace in traces for span in self._form.spans(trace)]

    def send(self, spans: Sequence["ReadableSpan"]) -> str:
        """Send spans; returns why that failed, "" if it did not. Blocks for as long as the exporter's time limit (10 s by default)."""
        from opentelemetry.sdk.trace.export import SpanExportResult

        with self._reasons as reasons:
            if self._exporter.export(spans) is SpanExportResult.SUCCESS:
                return ""
        return reasons.first or "the receiver did not take them"

    def close(self) -> None:
        """End a `send` that waits, and all connections."""
        self._exporter.shutdown()


def _exporter(receiver: Receiver) -> Any:
    if receiver.protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return GrpcExporter(endpoint=receiver.endpoint)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

    return HttpExporter(endpoint=receiver.endpoint)


class _Reasons(logging.Handler):
    """Takes what the exporters log in place of an exception, which names the cause, and keeps it from the log of this process."""

    def __init__(self) -> None:
        super().__init__()
        self.first = ""
        self._logger = logging.getLogger("opentelemetry.exporter")

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler.emit`."""
        self.first = self.first or record.getMessage()

    def __enter__(self) -> "_Reasons":
        self.first = ""
        self._logger.propagate = False
        self._logger.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._logger.removeHandler(self)
        self._logger.propagate = True
