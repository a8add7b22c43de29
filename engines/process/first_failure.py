"""The first cause of the death of an engine's processes.

To its client an engine says only that one of its processes died, and that the cause is in the log above. Here the process that
fails writes the cause into a file of the engine's own folder, and one that was killed is known by its exit code.
"""

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

VARIABLE: Final = "HEADWATER_FIRST_FAILURE"
"""Environment variable with the path of the file, for the engine's processes."""

TEXT_MAX: Final = 1_000


class _Keeper(logging.Handler):
    """Writes the first fatal exception that is logged; later ones are its consequences."""

    def __init__(self, path: str, fatal: Sequence[str]) -> None:
        super().__init__(logging.ERROR)
        self._path = path
        self._fatal = fatal

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`. The exception is the record's, or the one that is handled while it is logged."""
        error = record.exc_info[1] if record.exc_info else sys.exc_info()[1]
        if error is None or not any(text in record.getMessage() for text in self._fatal):
            return
        # Another process was first, or the folder is gone.
        with contextlib.suppress(OSError), open(self._path, "x") as file:
            file.write(f"{type(error).__name__}: {error}"[:TEXT_MAX])


def prepare(folder: Path) -> str:
    """The path of the file, which the engine's processes find in their environment."""
    path = os.environ[VARIABLE] = str(folder / "first-failure")
    return path


def keep(logger: str, fatal: Sequence[str]) -> None:
    """In one of the engine's processes: write the cause of its death.

    `fatal` are parts of what `logger` says, with the exception, before a process ends. Other logged exceptions are answers to calls.
    """
    path = os.environ.get(VARIABLE)
    if path:
        logging.getLogger(logger).addHandler(_Keeper(path, fatal))


def read(path: str, processes: Iterable[Any]) -> str:
    """The first cause of the death of an engine with these child processes (`multiprocessing`), "" if it is not known."""
    try:
        return Path(path).read_text()
    except OSError:
        pass
    for process in processes:
        code = process.exitcode
        if code is not None and code < 0:
            return f"its process {process.pid} was ended by {signal.Signals(-code).name}"
        if code:
            return f"its process {process.pid} ended with code {code}"
    return ""
