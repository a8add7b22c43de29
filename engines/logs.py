"""The log lines of a process: those of Headwater, of its engine and of their libraries pass one formatter, as text or as JSON.

structlog writes Headwater's own, and formats what comes by the standard library's `logging`. Each line is one write, because
processes share the stream. A process that an engine spawns has no configuration of its own: vLLM and SGLang take a file in the
form of `logging.config.dictConfig`, which leads back here.

An unexpected exception is described by its type and place (`failure_place`), without its message, which may contain what a library
failed on: a prompt, an answer, a tool argument. Logs and error responses get this description; messages are in the log at level debug.
"""

import logging
import multiprocessing
import os
import sys
import threading
import traceback
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, TextIO

import msgspec
import structlog

from headwater.schemas.names import request_of

PLACES_MAX: Final = 6


def failure_place(error: BaseException) -> str:
    """Type of an exception and where it was raised, innermost place first: `KeyError at a.py:12 f, b.py:3 g`."""
    frames = traceback.extract_tb(error.__traceback__)[-PLACES_MAX:]
    places = ", ".join(
        f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in reversed(frames)
    )
    cause = error.__cause__
    after = f"; caused by {failure_place(cause)}" if cause is not None and cause is not error else ""
    return f"{type(error).__name__} at {places or 'no place'}{after}"


LogFormat = Literal["auto", "text", "json"]

FIELDS: Final[Mapping[str, str]] = {
    "timestamp": "when, in UTC (ISO 8601)",
    "level": "debug, info, warning, error or critical",
    "logger": "who logs: `headwater.` and a part of it, the logger of an engine or a library, or `stderr` and `stdout` for text that "
    "`up` found in the output of a process",
    "event": "name of the event; of an engine or a library, its message",
    "kind": "what the process is: `edge`, `router`, `worker`, `shadow`, `admin`, `console`, `up`, `host` (imports vLLM for the workers of "
    "a machine's CPUs), `download` (of a model), or the name of the command",
    "pid": "its number; in text that `up` found, that of the process that `up` started",
    "process": "title of the process, where an engine has started it",
    "child": "name under which `up` supervises a process",
    "edge, router, worker, shadow": "name of the actor, or of one that the event is about",
    "pool": "the pool of the actor",
    "log_position": "position in the pool log: at a router that of its state, at a worker that of its newest event, at an edge that of the "
    "routing decision",
    "request": "id of the request that the event is about, as in `x-request-id`",
    "attempt": "id of one try of the request at one worker; begins with the request's",
    "trace": "trace id of the request",
    "exception": "traceback: exceptions, each with its frames",
}
"""What a line may have besides what its event has, in the order of a line. The first ones are on every line."""

FIRST: Final = tuple(FIELDS)[:6]

LATE: Final = ("pool", "log_position", "trace")
"""Fields that may be functions which return them: they change while a task runs, or take time to make."""

CONFIG: Final = "logging.json"
"""File for the processes that an engine spawns, in the engine's private folder."""

# Locals would put prompts and a whole engine configuration into one line.
_traceback = structlog.processors.ExceptionRenderer(
    structlog.tracebacks.ExceptionDictTransformer(show_locals=False, max_frames=12)
)

_log = structlog.get_logger("headwater.process")

_is_configured = False
_fields: dict[str, Any] = {}
"""Fields of this process's lines, of all its threads: a new thread has no context variables."""

_level = "warning"
_format: Literal["text", "json"] = "text"
_asked = False
"""Whether the user asked for JSON: then what is printed for people is a log line too."""


def configure(level: str = "info", fmt: LogFormat = "auto", **fields: Any) -> None:
    """Send all logs, the standard library's too, to standard error. `fields` stand on every line of this process."""
    global _is_configured, _level, _format, _asked
    _is_configured, _level, _asked = True, level, fmt == "json"
    _format = "json" if fmt == "json" or (fmt == "auto" and not sys.stderr.isatty()) else "text"
    _fields.clear()
    describe(**fields)
    root = logging.getLogger()
    root.handlers[:] = [_configured(sys.stderr)]
    root.setLevel(max(_number(level), logging.WARNING))
    if _format == "json":
        logging.captureWarnings(True)
        sys.excepthook = _on_exception
        threading.excepthook = _on_thread_exception


def describe(**fields: Any) -> None:
    """Put further fields on all lines of this process, as its actor's name."""
    _fields.update(fields)


def silence() -> None:
    """Drop all lines of Headwater in this process: what it runs is simulated or replayed, and no operator's concern."""
    structlog.configure(
        processors=[_drop],
        wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL),
        cache_logger_on_first_use=False,
    )


def _drop(_: Any, __: str, ___: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    raise structlog.DropEvent


def is_configured() -> bool:
    """Return whether this process is Headwater's own: a program that uses an engine's adapter logs as it likes."""
    return _is_configured


def level() -> str:
    """Return the least level of this process's lines: debug, info, warning or error."""
    return _level


def is_json() -> bool:
    """Return whether every line of this process is to be JSON: the user asked for it."""
    return _asked


def say(text: str, *, failed: bool = False) -> None:
    """Print a line for the person who gave the command, or log it. `failed`: it says why the command failed."""
    if not _asked:
        print(f"headwater: {text}", file=sys.stderr, flush=True)
    elif failed:
        _log.error("command_failed", reason=text)
    else:
        _log.info("notice", text=text)


def follow(*loggers: str) -> None:
    """Give these loggers of an engine, and those below them, the level of this process. Other libraries log warnings."""
    for name in loggers:
        logging.getLogger(name).setLevel(_number(_level))


def write_config(folder: Path, levels: Mapping[str, str]) -> Path:
    """Write the configuration of processes that do not inherit this one's; returns its path. `levels` are those of loggers."""
    handler = {
        "()": "headwater.engines.logs.engine_handler",
        "least": _level,
        "fmt": _format,
        "fields": _fields,
    }
    config = {
        "version": 1,
        "disable_existing_loggers": False,
        "handlers": {"headwater": handler},
        "root": {"handlers": ["headwater"], "level": max(_number(_level), logging.WARNING)},
        "loggers": {name: {"level": least.upper()} for name, least in levels.items()},
    }
    path = folder / CONFIG
    path.write_bytes(msgspec.json.encode(config))
    return path


def engine_handler(least: str, fmt: Literal["text", "json"], fields: Mapping[str, Any]) -> logging.Handler:
    """Configure a process that an engine spawned; returns the handler of its root logger. `dictConfig` calls it."""
    global _level, _format
    _level, _format = least, fmt
    describe(**fields)
    # Not `sys.stderr`: some releases of vLLM put a prefix before what is written to that.
    return _configured(open(2, "w", buffering=1, closefd=False, errors="backslashreplace"))


def write_text(text: str, logger: str, **fields: Any) -> None:
    """Write a line that another process did not log, such as one of a native library. It has no level: none drops it."""
    event = {"event": text, "level": "info", "logger": logger, **fields}
    line = _rendered(None, "info", _stamp(None, "info", event))
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def is_line(line: bytes) -> bool:
    """Return whether this is a whole log line in JSON."""
    try:
        return line.startswith(b'{"') and "event" in msgspec.json.decode(line, type=dict[str, Any])
    except msgspec.DecodeError:
        return False


# The chain.


class _Logger(structlog.WriteLogger):
    """A writer of whole lines that knows its name."""

    def __init__(self, stream: TextIO, name: str) -> None:
        super().__init__(stream)
        self.name = name


class _Propagating(logging.Logger):
    """The logger of a library that would print by a handler of its own, past ours."""

    @property
    def propagate(self) -> bool:
        """Always true, whatever the library sets."""
        return True

    @propagate.setter
    def propagate(self, value: bool) -> None:
        pass

    def addHandler(self, hdlr: logging.Handler) -> None:  # noqa: N802 (the standard library's)
        """Keep the handlers above it."""

    def setLevel(self, level: int | str) -> None:  # noqa: N802 (the standard library's)
        """Not below the level of this process."""
        super().setLevel(level)
        super().setLevel(max(self.level, _number(_level)))


PRINTING: Final = ("transformers", "diffusers", "huggingface_hub", "nixl", "TRT-LLM")
"""Loggers of libraries that print by themselves."""


def _configured(stream: TextIO) -> logging.Handler:
    """Configure structlog to write to `stream`; returns a handler that writes the standard library's records there too."""
    text = _format == "text"
    stamp = structlog.processors.TimeStamper(fmt="%H:%M:%S.%f", utc=False) if text else _stamp
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        _complete,
        stamp,
    ]
    final: list[Any] = [_shorten, _console(stream)] if text else [_traceback, _rendered]
    structlog.configure(
        processors=[*shared, *final],
        wrapper_class=structlog.make_filtering_bound_logger(_number(_level)),
        logger_factory=lambda *names: _Logger(stream, names[0] if names else ""),
        cache_logger_on_first_use=True,
    )
    for name in PRINTING:
        library = logging.getLogger(name)
        library.handlers.clear()
        library.__class__ = _Propagating
        if library.level:
            library.setLevel(library.level)
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *final],
        )
    )
    return handler


_stamp = structlog.processors.TimeStamper(fmt="iso", utc=True)
_encoded = structlog.processors.JSONRenderer()


def _console(stream: TextIO) -> Any:
    return structlog.dev.ConsoleRenderer(
        colors=stream.isatty(), pad_event_to=24, exception_formatter=structlog.dev.plain_traceback
    )


def _number(level: str) -> int:
    return logging.getLevelNamesMapping()[level.upper()]


def _complete(logger: Any, _: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Add what the process, the record and the name of an attempt tell."""
    record = event.get("_record")
    event["logger"] = record.name if record is not None else getattr(logger, "name", "")
    for name in LATE:
        value = event.get(name)
        if callable(value) and not (value := value()):
            del event[name]
        elif value is not None:
            event[name] = value
    attempt = event.get("attempt")
    if attempt is not None and "request" not in event:
        event["request"] = request_of(attempt)
    for name, value in _fields.items():
        event.setdefault(name, value)
    event["pid"] = os.getpid()
    if multiprocessing.parent_process() is not None:
        event["process"] = _title()
    return event


def _title() -> str:
    """The title that the engine gave this process; its name for Python where it has none but its command line."""
    import setproctitle

    title: str = setproctitle.getproctitle()
    return multiprocessing.current_process().name if title.startswith(sys.executable) else title


def _shorten(logger: Any, _: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Leave out what text for people does not need."""
    for name in ("kind", "pid", "process"):
        event.pop(name, None)
    if event["logger"].startswith("headwater."):
        del event["logger"]
    return event


def _rendered(logger: Any, method: str, event: MutableMapping[str, Any]) -> str:
    """One JSON object, with the fields of every line first."""
    ordered = {name: event.pop(name) for name in FIRST if name in event}
    return str(_encoded(logger, method, {**ordered, **event}))


def _on_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
    else:
        _log.critical("process_failed", reason=f"{kind.__name__}: {error}", exc_info=(kind, error, trace))


def _on_thread_exception(hook_args: threading.ExceptHookArgs) -> None:
    if hook_args.exc_value is not None and not isinstance(hook_args.exc_value, SystemExit):
        name = hook_args.thread.name if hook_args.thread is not None else ""
        info = (hook_args.exc_type, hook_args.exc_value, hook_args.exc_traceback)
        _log.error("thread_failed", thread=name, exc_info=info)
