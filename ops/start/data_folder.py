"""The data folder of a fleet's processes on one machine: one fleet uses it at a time.

<data-dir>/lock      held by the `up` or `launch` that uses the folder; says who that is
<data-dir>/format    the version of what lies here
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from headwater.ops.config.setting import ConfigError

FORMAT: Final = 1
_LOCK, _FORMAT = "lock", "format"


@contextlib.contextmanager
def held(folder: Path, started_by: str = "up") -> Iterator[None]:
    """Use the directory, made where it is missing, until the block ends; `started_by` is the command that does.

    The kernel frees it when the process dies.

    Raises `ConfigError` where another process uses it, it cannot be written, or a newer release has written it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise _unusable(folder, error) from error
    try:
        _lock(handle, folder, started_by)
        _check_format(folder)
        yield
    finally:
        os.close(handle)


def _lock(handle: int, folder: Path, started_by: str) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(handle, 200, 0).decode(errors="replace").strip() or "another process"
        raise ConfigError(
            f"--data-dir {folder} is used by {holder}: stop that fleet, or choose another --data-dir"
        ) from None
    except OSError as error:
        raise _unusable(folder, error) from error
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    try:
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"`headwater {started_by}` with pid {os.getpid()} since {since}\n".encode(), 0)
    except OSError as error:
        raise _unusable(folder, error) from error


def _check_format(folder: Path) -> None:
    path = folder / _FORMAT
    try:
        text = path.read_bytes().decode("ascii", "replace").strip()
    except FileNotFoundError:
        text = ""
    except OSError as error:
        raise _unusable(folder, error) from error
    if text and not (text.isdigit() and len(text) < 10):
        raise ConfigError(f"{path} says {text[:40]!r}, which is no format version: it is not Headwater's")
    if text and int(text) > FORMAT:
        raise ConfigError(
            f"--data-dir {folder} has format {text}, written by a newer release; this one knows format {FORMAT}: "
            "use that release, or another --data-dir"
        )
    if not text:
        try:
            path.write_text(f"{FORMAT}\n")
        except OSError as error:
            raise _unusable(folder, error) from error


def _unusable(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"--data-dir {folder} cannot be used: {(error.strerror or str(error)).lower()}; choose another one"
    )
