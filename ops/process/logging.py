"""Logging by structlog: readable on a terminal, JSON otherwise."""

import logging
import sys
from typing import Any, Literal

import structlog

LogFormat = Literal["auto", "text", "json"]

# Locals would put prompts and a whole engine configuration into one line.
_traceback = structlog.processors.ExceptionRenderer(
    structlog.tracebacks.ExceptionDictTransformer(show_locals=False, max_frames=12)
)


def configure(level: str = "info", fmt: LogFormat = "auto", **context: Any) -> None:
    """Send all logs, the standard library's too, to standard error. `context` stands on every line."""
    text = fmt == "text" or (fmt == "auto" and sys.stderr.isatty())
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="%H:%M:%S.%f" if text else "iso", utc=not text),
    ]
    final: list[Any] = (
        [
            structlog.dev.ConsoleRenderer(
                colors=sys.stderr.isatty(),
                pad_event_to=24,
                exception_formatter=structlog.dev.plain_traceback,
            )
        ]
        if text
        else [_traceback, structlog.processors.JSONRenderer()]
    )
    number = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(
        processors=[*shared, *final],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        # One write for each line: processes share this stream.
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(**context)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *final],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(number, logging.WARNING))
