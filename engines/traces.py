"""The spans that engines make themselves: where they send them, and below which span of Headwater's."""

import os
from importlib.util import find_spec
from typing import NamedTuple

from headwater.schemas.trace import TraceContext


class EngineTraces(NamedTuple):
    """The endpoint of a receiver, "" for none; its protocol as OpenTelemetry's variables name it; and the share of traces that is recorded."""

    endpoint: str = ""
    protocol: str = ""
    sample: float = 0.0

    def headers(self, attempt: str, context: TraceContext) -> dict[str, str]:
        """Return the headers that make an engine's spans children of those of an attempt, of the request in its name."""
        return context.headers_below(attempt.rsplit("-", 2)[0], attempt, self.sample)

    def announced(self, engine: str, worker: str) -> "EngineTraces":
        """Set what an engine reads from the environment only, and return what it is to be started with: no endpoint where OpenTelemetry is not
        installed.
        """
        if not self.endpoint:
            return self
        if find_spec("opentelemetry") is None or find_spec("opentelemetry.exporter") is None:
            # Here, as the settings import this module: help is shown without it.
            import structlog

            _log = structlog.get_logger("headwater.engine")
            _log.warning(
                "engine_traces_off", engine=engine, reason="OpenTelemetry is not installed in its environment"
            )
            return self._replace(endpoint="")
        os.environ.setdefault("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", self.protocol)
        os.environ.setdefault("OTEL_SERVICE_NAME", engine)
        os.environ.setdefault("OTEL_RESOURCE_ATTRIBUTES", f"service.instance.id={worker}")
        return self
