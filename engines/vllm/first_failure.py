"""The first cause of the death of vLLM's processes.

To its client vLLM says only that its engine core died, and that the cause is in the log above. Here the process that fails
writes the cause into a file of the engine's own folder, and one that was killed is known by its exit code.
"""

import logging
import os
import signal
from pathlib import Path
from typing import Any, Final

VARIABLE: Final = "HEADWATER_VLLM_FAILURE"
"""Environment variable with the path of the file, for vLLM's processes."""

FATAL: Final = ("fatal error", "failed to start", "hit an exception")
"""What vLLM logs, with the exception, before a process ends. Other logged exceptions are answers to calls."""

TEXT_MAX: Final = 1_000


class _Keeper(logging.Handler):
    """Writes the first fatal exception that is logged; later ones are its consequences."""

    def __init__(self, path: str) -> None:
        super().__init__(logging.ERROR)
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        error = record.exc_info[1] if record.exc_info else None
        if error is None or not any(text in record.getMessage() for text in FATAL):
            return
        try:
            with open(self._path, "x") as file:
                file.write(f"{type(error).__name__}: {error}"[:TEXT_MAX])
        except OSError:
            # Another process was first, or the folder is gone.
            return


def prepare(folder: str) -> str:
    """The path of the file, which vLLM's processes find in their environment."""
    path = os.environ[VARIABLE] = str(Path(folder) / "first-failure")
    return path


def keep() -> None:
    """In one of vLLM's processes: write the cause of its death."""
    path = os.environ.get(VARIABLE)
    if path:
        logging.getLogger("vllm").addHandler(_Keeper(path))


def read(path: str, engine: Any) -> str:
    """The first cause of the death of an AsyncLLM, "" if it is not known."""
    try:
        return Path(path).read_text()
    except OSError:
        pass
    resources = getattr(getattr(engine, "engine_core", None), "resources", None)
    manager = getattr(resources, "engine_manager", None)
    for process in getattr(manager, "processes", ()):
        code = process.exitcode
        if code is not None and code < 0:
            return f"its process {process.pid} was ended by {signal.Signals(-code).name}"
        if code:
            return f"its process {process.pid} ended with code {code}"
    return ""
