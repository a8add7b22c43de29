"""Settings that processes of every kind have: logging and metrics."""

from typing import Annotated, Literal, NamedTuple

from msgspec import Meta

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["auto", "text", "json"]

Port = Annotated[int, Meta(ge=0, le=65535)]


class LogSettings(NamedTuple):
    """Logging."""

    level: Annotated[LogLevel, Meta(description="minimum level of log messages")] = "info"
    format: Annotated[LogFormat, Meta(description="text, json, or auto: text on a terminal, else json")] = (
        "auto"
    )


class MetricsSettings(NamedTuple):
    """Prometheus metrics, and the probes of a process."""

    host: Annotated[str, Meta(description="address that metrics are served on")] = "127.0.0.1"
    port: Annotated[
        int,
        Meta(
            ge=0,
            le=65535,
            description="port of a process's Prometheus metrics, and of /live and /health; 0: none. With `up` and `demo` the first of one port per "
            "process (default: free ones, listed in prometheus-targets.json in the data directory)",
        ),
    ] = 0
    live_timeout_s: float = 15.0
    """Seconds without a turn of the event loop after which /live fails."""
