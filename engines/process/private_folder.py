"""Folders of one process in a place for temporary files, which the next process removes if this one is killed.

A process holds the lock of its folder until it ends, however it ends: a folder whose lock is free has no owner.
"""

import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final, NamedTuple

LOCK: Final = "lock"
NAME: Final = "headwater-"


class _Lock(NamedTuple):
    """A lock that is held: by the process of this number, and not by its forks, which inherit it."""

    pid: int
    handle: int


_held: dict[Path, _Lock] = {}


def take(kind: str, parent: Path | None = None) -> Path:
    """A new folder of this process alone, `headwater-<kind>-…` in `parent` (default: the system's folder for temporary files).

    Removes those of the same kind that processes of this user have left.
    """
    where, prefix = parent or Path(tempfile.gettempdir()), f"{NAME}{kind}-"
    remove_leftovers(where, prefix)
    return make(where, prefix)


def make(parent: Path, prefix: str) -> Path:
    """A new, locked folder."""
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    # Locked before it has its name: between the two another process would take this folder for a leftover.
    unnamed = folder / f"{LOCK}.new"
    handle = os.open(unnamed, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(handle, fcntl.LOCK_EX)
    unnamed.rename(folder / LOCK)
    _held[folder] = _Lock(os.getpid(), handle)
    return folder


def give_up(folder: Path) -> None:
    """Remove it. Again is fine."""
    lock = _held.pop(folder, None)
    shutil.rmtree(folder, ignore_errors=True)
    if lock is not None:
        os.close(lock.handle)


def is_private(folder: Path) -> bool:
    """Whether this is the name of such a folder, of whatever process."""
    return folder.name.startswith(NAME)


def is_own(folder: Path) -> bool:
    """Whether this process, and not one that it was forked from, took this folder."""
    lock = _held.get(folder)
    return lock is not None and lock.pid == os.getpid()


def give_up_own() -> None:
    """Remove all that this process took; those of the process that it was forked from stay."""
    for folder in [folder for folder in _held if is_own(folder)]:
        give_up(folder)


def remove_leftovers(parent: Path, prefix: str = "") -> list[str]:
    """Remove the folders of processes that are gone whose names begin with `prefix`; returns their names."""
    removed = []
    for entry in parent.iterdir():
        if not entry.name.startswith(prefix):
            continue
        try:
            handle = os.open(entry / LOCK, os.O_RDWR)
        except OSError:
            # One that is being made, another user's, or no folder of ours.
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
