"""A disk of its own for a test, which can be full, read-only and well again; needs the right to mount."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOM = "24g"
"""More than the streams' greatest sizes together, which nats-server wants to have free. A limit: no memory is taken."""


class Disk:
    """A tmpfs on `folder`. Full means that its size is what is in use: nothing need be written to fill it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def fill(self) -> None:
        """Leave no room. What is being written meanwhile makes a try fail, so there are several."""
        for _ in range(100):
            told = self._remount(f"size={self.used() // 1024}k")
            if not told:
                break
        else:
            raise AssertionError(f"{self.folder} could not be filled: {told}")
        seen = os.statvfs(self.folder)
        assert seen.f_bavail == 0, f"{seen.f_bavail} blocks are left"

    def leave(self, room: int) -> None:
        """Leave so many bytes."""
        told = self._remount(f"size={(self.used() + room) // 1024}k")
        assert not told, told

    def free(self) -> None:
        """Make room again."""
        told = self._remount(f"size={ROOM}")
        assert not told, told

    def read_only(self) -> None:
        """Refuse writing; no file may be open for it."""
        told = self._remount("ro")
        assert not told, told

    def used(self) -> int:
        """Bytes in use."""
        seen = os.statvfs(self.folder)
        return (seen.f_blocks - seen.f_bfree) * seen.f_frsize

    def _remount(self, options: str) -> str:
        done = subprocess.run(
            ["mount", "-o", f"remount,{options}", str(self.folder)], capture_output=True, text=True
        )
        return done.stderr if done.returncode else ""


@contextmanager
def disk(folder: Path) -> Iterator[Disk]:
    """Mount one on `folder`. Skips the test where that is not permitted."""
    if sys.platform != "linux":
        pytest.skip("mounting a tmpfs needs Linux")
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={ROOM}", "headwater-test", str(folder)],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        pytest.skip(f"mounting a tmpfs is not permitted here: {done.stderr.strip()}")
    try:
        yield Disk(folder)
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@contextmanager
def immutable(folder: Path) -> Iterator[None]:
    """Every file below `folder` refuses to be written, also through descriptors that are open.

    A mount with open files cannot be made read-only, so the files are. Skips the test where they cannot be.
    """
    done = subprocess.run(["chattr", "-R", "+i", str(folder)], capture_output=True, text=True)
    try:
        if done.returncode:
            pytest.skip(f"files cannot be made immutable here: {done.stderr.strip()[:300]}")
        yield
    finally:
        subprocess.run(["chattr", "-R", "-i", str(folder)], capture_output=True)
