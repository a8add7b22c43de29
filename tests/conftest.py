"""What all tests share: log lines that cost nothing."""

import structlog


def pytest_configure() -> None:
    """Log as structlog does unless told otherwise, but for tracebacks.

    With rich installed (vLLM brings it) each would be drawn with the local variables of every frame: one second.
    """
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.StackInfoRenderer(),
            structlog.dev.set_exc_info,
            structlog.processors.TimeStamper("%Y-%m-%d %H:%M:%S", utc=False),
            structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback),
        ]
    )
