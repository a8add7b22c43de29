"""The folder in which an engine's processes write their Prometheus metrics, one per life of a worker.

This module imports nothing of Prometheus, which decides on its first import whether it writes to such a folder.
"""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from headwater.engines import process

VARIABLE = "PROMETHEUS_MULTIPROC_DIR"


def base() -> Path:
    """Return the parent of these folders, which belongs to this user alone."""
    folder = Path(tempfile.gettempdir()) / f"headwater-metrics-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user: remove it, or set TMPDIR")
    return folder


def take() -> Path:
    """A new folder for this process from now on, named in the environment for those that it starts."""
    process.remove_leftovers(base())
    folder = process.make(base(), f"{os.getpid()}-")
    os.environ[VARIABLE] = str(folder)
    return folder


@contextlib.contextmanager
def per_life() -> Iterator[Path]:
    """The folder of this process's life: its own if it took one already, a new one in a fork. Gone at the end."""
    present = Path(os.environ.get(VARIABLE, ""))
    folder = present if process.is_own(present) else take()
    try:
        yield folder
    finally:
        process.give_up(folder)
