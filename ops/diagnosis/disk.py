"""Room on the disks of folders, before a log or a cache fills them."""

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from headwater.ops.diagnosis.finding import Finding, finding

ROOM_BYTES: Final = 512 * 1024 * 1024
"""Below, a fleet has minutes: its logs write some MiB a second under load."""


def free_bytes(folder: Path) -> int | None:
    """Bytes that are free where a folder is, or will be; None where that cannot be said."""
    try:
        whole = folder.absolute()
    except FileNotFoundError:
        # The folder that a relative one is in was deleted.
        return None
    for place in (whole, *whole.parents):
        try:
            return shutil.disk_usage(place).free
        except FileNotFoundError:
            continue
        except OSError:
            return None
    return None


def check_room(folders: Iterable[tuple[str, int | None]]) -> list[Finding]:
    """The folders whose disk is nearly full, by their names and free bytes."""
    return [
        finding("disk-full", folder, f"{free >> 20} MiB are free on its disk; {ROOM_BYTES >> 20} are needed")
        for folder, free in folders
        if free is not None and free < ROOM_BYTES
    ]
