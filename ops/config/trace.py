"""Settings of traces: the receiver, and which requests' traces it gets."""

import os
from typing import Annotated, Literal, NamedTuple
from urllib.parse import urlsplit

from msgspec import Meta

from headwater.engines.traces import EngineTraces
from headwater.ops.config.setting import ConfigError

GRPC_PORT = 4317
"""The port that OTLP over gRPC has by its specification; that of HTTP is 4318."""

PATH = "/v1/traces"
PORTS = {"http": 80, "https": 443}
VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


class TraceSettings(NamedTuple):
    """Traces of requests."""

    otlp: Annotated[
        str,
        Meta(
            description="URL of an OpenTelemetry receiver that gets traces of requests, such as http://127.0.0.1:4318; engines send their own "
            "spans there too (default: none). gRPC for port 4317 and HTTP for others, unless OTEL_EXPORTER_OTLP_PROTOCOL says otherwise. Headers, certificates and time limits are in OTEL_EXPORTER_OTLP_…, as for any other sender"
        ),
    ] = ""
    sample: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="share of all traces that is sent, by their ids; of a client's own trace, whatever the client decided. Errors, migrations and "
            "slow requests always are",
        ),
    ] = 0.01
    slow_s: Annotated[
        float,
        Meta(
            ge=0,
            description="requests are slow that need so many seconds until their first token, or until their end if they have none; 0: none is",
        ),
    ] = 10.0


def engine_traces(settings: TraceSettings) -> EngineTraces:
    """What engines are told of the receiver. Raises `ConfigError`."""
    if not settings.otlp:
        return EngineTraces(sample=settings.sample)
    receiver = receiver_of(settings.otlp)
    return EngineTraces(receiver.endpoint, receiver.environment, settings.sample)


class Receiver(NamedTuple):
    """A receiver's endpoint of traces, and the host and port that it is reached at."""

    endpoint: str
    protocol: Literal["http", "grpc"]
    address: tuple[str, int]

    @property
    def environment(self) -> str:
        """The protocol as OpenTelemetry's variables name it."""
        return "grpc" if self.protocol == "grpc" else "http/protobuf"


def receiver_of(url: str, flag: str = "--otlp") -> Receiver:
    """The endpoint that a URL means: over HTTP without a path the one of the specification. Raises `ConfigError`."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"{flag} {url}: {error}") from error
    if parts.scheme not in ("http", "https") or not host:
        raise ConfigError(
            f"{flag} {url}: give a URL such as http://127.0.0.1:4318 (HTTP) or http://127.0.0.1:4317 (gRPC)"
        )
    wanted = next((os.environ[name] for name in VARIABLES if os.environ.get(name)), "")
    is_grpc = wanted == "grpc" if wanted else port == GRPC_PORT
    protocol: Literal["http", "grpc"] = "grpc" if is_grpc else "http"
    if protocol == "http" and parts.path in ("", "/"):
        url = url.rstrip("/") + PATH
    return Receiver(url, protocol, (host, port or PORTS[parts.scheme]))
