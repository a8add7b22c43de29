"""The folder in which an engine's processes write their Prometheus metrics, one per life of a worker.

Imports nothing of Prometheus: that decides on its first import whether it writes to such a folder.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

ENGINES = frozenset({"vllm", "sglang"})
"""Those whose own processes write metrics."""

VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
LOCK = "lock"

_held: dict[str, int] = {}


def base() -> Path:
    """Where these folders lie: this user's alone."""
    folder = Path(tempfile.gettempdir()) / f"headwater-metrics-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user: remove it, or set TMPDIR")
    return folder


def remove_leftovers(folder: Path) -> list[str]:
    """Remove the folders of processes that are gone; returns their names.

    A process holds its folder's lock until it ends, however it ends.
    """
    removed = []
    for entry in folder.iterdir():
        try:
            handle = os.open(entry / LOCK, os.O_RDWR)
        except OSError:
            # One that is being made, or no folder of ours.
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue
        else:
            shutil.rmtree(entry, ignore_errors=True)
            removed.append(entry.name)
        finally:
            os.close(handle)
    return removed


def take() -> Path:
    """A new folder for this process from now on, named in the environment for those that it starts."""
    remove_leftovers(base())
    folder = Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=base()))
    # Locked before it has its name: between the two another process would take this folder for a leftover.
    unnamed = folder / f"{LOCK}.new"
    handle = os.open(unnamed, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(handle, fcntl.LOCK_EX)
    unnamed.rename(folder / LOCK)
    _held[str(folder)] = handle
    os.environ[VARIABLE] = str(folder)
    return folder


@contextlib.contextmanager
def per_life() -> Iterator[Path]:
    """The folder of this process's life: its own if it took one already, a new one in a fork. Gone at the end."""
    present = os.environ.get(VARIABLE, "")
    mine = present in _held and Path(present).name.startswith(f"{os.getpid()}-")
    folder = Path(present) if mine else take()
    try:
        yield folder
    finally:
        give_up(folder)


def give_up_own() -> None:
    """Remove all that this process took; those of the process that it was forked from stay."""
    for name in list(_held):
        if Path(name).name.startswith(f"{os.getpid()}-"):
            give_up(Path(name))


def give_up(folder: Path) -> None:
    """Remove it."""
    handle = _held.pop(str(folder), None)
    shutil.rmtree(folder, ignore_errors=True)
    if handle is not None:
        os.close(handle)
