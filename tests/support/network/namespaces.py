"""Entering the namespaces of another process: those of its network, host name, mounts and System V objects."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

KINDS = ("net", "uts", "ipc", "mnt")
"""Those that a host has of its own. Processes are in one table, so that a test can signal them."""

_libc = ctypes.CDLL(None, use_errno=True)


def _join(path: Path | str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        # `os.setns` is in Python 3.12 and newer.
        if _libc.setns(descriptor, 0):
            raise OSError(ctypes.get_errno(), f"cannot enter {path}")
    finally:
        os.close(descriptor)


def enter(pid: int) -> None:
    """Move this process, which has one thread, for good to the host whose process `pid` is."""
    folder = Path.cwd()
    for kind in KINDS:
        _join(f"/proc/{pid}/ns/{kind}")
    # The working directory of a mount namespace is its root.
    os.chdir(folder)


@contextmanager
def network_of(pid: int) -> Iterator[None]:
    """The calling thread is in the network of the process `pid` until the block ends."""
    own = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        _join(f"/proc/{pid}/ns/net")
        try:
            yield
        finally:
            if _libc.setns(own, 0):
                raise OSError(ctypes.get_errno(), "cannot return to the own network")
    finally:
        os.close(own)
