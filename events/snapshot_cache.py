"""The newest snapshot's arrays on the local disk, so that a restart need not fetch them.

The cache contains array data only, keyed by the manifest, which is always read from the object store. A file of another
deployment, another log or another release therefore never matches, and bytes that changed on the disk fail the
manifest's digests.
"""

import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import structlog

from headwater.events.ports import sha256
from headwater.events.snapshot_format import Chunk
from headwater.schemas.names import token

MAGIC = b"HWCACH01"
_HEAD_BYTES = len(MAGIC) + 64
THREADS = 2
UNFINISHED_S = 600.0

_log = structlog.get_logger("headwater.snapshots")


class SnapshotCache(Protocol):
    """Arrays of one snapshot per pool. Calls block: make them in a thread. A broken cache raises nothing."""

    def holds(self, pool: str, key: str) -> bool:
        """Are the arrays with this key cached? They are verified by `read` only."""
        ...

    def read(self, pool: str, key: str, chunks: Sequence[Chunk], rooms: Sequence[memoryview]) -> bool:
        """Fill `rooms` with the chunks, verified. False if anything is missing or wrong."""
        ...

    def write(self, pool: str, key: str, pieces: Sequence[memoryview]) -> None:
        """Replace the pool's arrays by these pieces."""
        ...


class FolderCache:
    """See `SnapshotCache`: a file per pool in `folder`. Processes may share it: files are replaced atomically."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, pool: str) -> Path:
        """The pool's file."""
        return self._folder / f"{token('pool', pool)}.snapshot"

    def holds(self, pool: str, key: str) -> bool:
        """See `SnapshotCache.holds`."""
        try:
            with self.path(pool).open("rb") as file:
                return file.read(_HEAD_BYTES) == _head(key)
        except OSError:
            return False

    def read(self, pool: str, key: str, chunks: Sequence[Chunk], rooms: Sequence[memoryview]) -> bool:
        """See `SnapshotCache.read`. A file with wrong bytes is removed."""
        path = self.path(pool)
        try:
            file = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            return False
        except OSError as error:
            _log.warning("snapshot_cache_unreadable", path=str(path), reason=str(error))
            return False
        try:
            if os.pread(file, _HEAD_BYTES, 0) != _head(key):
                return False
            starts = [
                _HEAD_BYTES + sum(chunk.size for chunk in chunks[:number]) for number in range(len(chunks))
            ]

            def sound(number: int) -> bool:
                return (
                    _fill(file, starts[number], rooms[number])
                    and sha256(rooms[number]) == chunks[number].digest
                )

            # Reading and hashing release the GIL, so threads run in parallel.
            with ThreadPoolExecutor(THREADS, "snapshot-cache") as threads:
                bad = [
                    number for number, good in enumerate(threads.map(sound, range(len(chunks)))) if not good
                ]
            if not bad:
                return True
            reason = f"chunk {bad[0]} of {len(chunks)} does not match its digest; the file is removed"
        except OSError as error:
            reason = str(error)
        finally:
            os.close(file)
        _log.error("snapshot_cache_broken", path=str(path), reason=reason)
        self._remove(path)
        return False

    def write(self, pool: str, key: str, pieces: Sequence[memoryview]) -> None:
        """See `SnapshotCache.write`. Synced before it is renamed; a full disk leaves the old file and a warning."""
        path = self.path(pool)
        made = ""
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            file, made = tempfile.mkstemp(prefix=f"{path.name}.", suffix=".part", dir=self._folder)
            with os.fdopen(file, "wb", buffering=0) as out:
                for piece in (memoryview(_head(key)), *pieces):
                    at = 0
                    while at < len(piece):
                        at += out.write(piece[at:]) or 0
                os.fsync(out.fileno())
                now_s = os.fstat(out.fileno()).st_mtime
            os.replace(made, path)
            self._remove_unfinished(path, now_s)
        except OSError as error:
            _log.warning("snapshot_not_cached", path=str(path), reason=str(error))
            if made:
                self._remove(Path(made))

    def _remove_unfinished(self, path: Path, now_s: float) -> None:
        """Files of processes that ended while writing; recent ones may still be written."""
        for part in self._folder.glob(f"{path.name}.*.part"):
            if now_s - part.stat().st_mtime > UNFINISHED_S:
                self._remove(part)

    def _remove(self, path: Path) -> None:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            _log.warning("snapshot_cache_not_removed", path=str(path), reason=str(error))


class MemoryCache:
    """See `SnapshotCache`: in memory, for tests and the simulator."""

    def __init__(self) -> None:
        self.files: dict[str, tuple[str, bytes]] = {}

    def holds(self, pool: str, key: str) -> bool:
        """See `SnapshotCache.holds`."""
        return pool in self.files and self.files[pool][0] == key

    def read(self, pool: str, key: str, chunks: Sequence[Chunk], rooms: Sequence[memoryview]) -> bool:
        """See `SnapshotCache.read`."""
        if not self.holds(pool, key):
            return False
        data, at = memoryview(self.files[pool][1]), 0
        for chunk, room in zip(chunks, rooms, strict=True):
            piece = data[at : at + chunk.size]
            if len(piece) != len(room) or sha256(piece) != chunk.digest:
                del self.files[pool]
                return False
            room[:] = piece
            at += chunk.size
        return True

    def write(self, pool: str, key: str, pieces: Sequence[memoryview]) -> None:
        """See `SnapshotCache.write`."""
        self.files[pool] = (key, b"".join(pieces))


def _head(key: str) -> bytes:
    return MAGIC + key.encode()


def _fill(file: int, start: int, room: memoryview) -> bool:
    """Fill `room` from offset `start`; False at the end of the file."""
    at = 0
    while at < len(room):
        got = os.preadv(file, [room[at:]], start + at)
        if not got:
            return False
        at += got
    return True
