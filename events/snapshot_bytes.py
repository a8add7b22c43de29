"""The bytes of a snapshot: their format, a manifest and arrays in chunks, and the newest snapshot's arrays on the local disk.

The manifest is

    magic | SHA-256 of the rest | msgpack of `Manifest`

and names, for each array, the objects with its chunks, with their sizes and SHA-256. Verifying the manifest and each
chunk against it therefore verifies the whole snapshot.

The cache on the disk is there so that a restart need not fetch the arrays. It contains array data only, keyed by the manifest, which
is always read from the object store. A file of another deployment, another log or another release therefore never matches, and bytes
that changed on the disk fail the manifest's digests.
"""

import hashlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import structlog
from numpy.typing import NDArray

from headwater.events.ports import sha256
from headwater.schemas.names import token

CHUNK_BYTES_MAX = 32 * 1024 * 1024
MAGIC = b"HWSNAP01"
_DIGEST_BYTES = 32


class Snapshot(NamedTuple):
    """A state at a position: small values in `facts` (plain msgpack types), bulk data in `arrays`.

    `digest` is the state's own, "" where unknown; `made_ns` is the wall clock when it was taken.
    """

    position: int
    facts: dict[str, Any]
    arrays: dict[str, NDArray[Any]]
    digest: str = ""
    made_ns: int = 0


class UnreadableSnapshot(ValueError):
    """Bytes that are not a snapshot of this format, or that are corrupt."""


class Chunk(msgspec.Struct, frozen=True):
    """One object with a part of an array. `size` in bytes; `digest`: SHA-256 in hex."""

    name: str
    size: int
    digest: str


class ArrayEntry(msgspec.Struct, frozen=True):
    """An array as its chunks, in order."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    def allocate(self) -> NDArray[Any]:
        """Allocate an array for the chunks. Raises `UnreadableSnapshot` if they do not fit it."""
        try:
            kind = np.dtype(self.dtype)
        except (TypeError, ValueError, SyntaxError) as error:
            raise UnreadableSnapshot(f"array {self.name}: no such type {self.dtype!r}") from error
        if kind.hasobject or not kind.itemsize or min(self.shape, default=0) < 0:
            raise UnreadableSnapshot(f"array {self.name} has an impossible type or shape")
        count = 1
        for length in self.shape:
            count *= length
        if count * kind.itemsize != sum(chunk.size for chunk in self.chunks):
            raise UnreadableSnapshot(f"array {self.name} does not fit its chunks")
        if any(not 0 < chunk.size <= CHUNK_BYTES_MAX for chunk in self.chunks):
            raise UnreadableSnapshot(f"array {self.name} has a chunk of impossible size")
        return np.empty(self.shape, kind)


class Manifest(msgspec.Struct, frozen=True):
    """Everything of a snapshot except the arrays' bytes."""

    position: int
    facts: dict[str, Any]
    arrays: tuple[ArrayEntry, ...]
    digest: str = ""
    made_ns: int = 0

    @property
    def chunks(self) -> list[Chunk]:
        """All chunks, in order."""
        return [chunk for array in self.arrays for chunk in array.chunks]

    @property
    def key(self) -> str:
        """A key of the arrays' content: equal only if all chunks are equal."""
        content = [
            (array.name, array.dtype, array.shape, [c.digest for c in array.chunks]) for array in self.arrays
        ]
        return hashlib.sha256(msgspec.msgpack.encode(content)).hexdigest()


def pieces(array: NDArray[Any], size: int = CHUNK_BYTES_MAX) -> Iterator[memoryview]:
    """Bytes of a contiguous array in pieces of at most `size`; nothing is copied."""
    # An empty array cannot be cast, and has no pieces.
    view = array.reshape(-1).view(np.uint8).data if array.size else memoryview(b"")
    for at in range(0, len(view), size):
        yield view[at : at + size]


def rooms(manifest: Manifest, arrays: dict[str, NDArray[Any]]) -> list[memoryview]:
    """Newly allocated arrays, and the part of them that each of `manifest.chunks` fills."""
    views: list[memoryview] = []
    for entry in manifest.arrays:
        at = 0
        for chunk in entry.chunks:
            views.append(arrays[entry.name].reshape(-1).view(np.uint8).data[at : at + chunk.size])
            at += chunk.size
    return views


def encode_manifest(manifest: Manifest) -> bytes:
    """Bytes of a manifest."""
    body = msgspec.msgpack.encode(manifest)
    return MAGIC + hashlib.sha256(body).digest() + body


def decode_manifest(data: bytes) -> Manifest:
    """Read and check a manifest. Raises `UnreadableSnapshot`."""
    if data[: len(MAGIC)] != MAGIC:
        raise UnreadableSnapshot("it does not start with the magic bytes of a known snapshot format")
    start = len(MAGIC) + _DIGEST_BYTES
    body = memoryview(data)[start:]
    if hashlib.sha256(body).digest() != data[len(MAGIC) : start]:
        raise UnreadableSnapshot("its manifest does not match its digest")
    try:
        return msgspec.msgpack.decode(body, type=Manifest)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise UnreadableSnapshot(str(error)) from error


CACHE_MAGIC = b"HWCACH01"
_HEAD_BYTES = len(CACHE_MAGIC) + 64
THREADS = 2
UNFINISHED_S = 600.0

_log = structlog.get_logger("headwater.snapshots")


class SnapshotCache:
    """Arrays of one snapshot per pool, in a file of `folder`. Processes may share it: files are replaced atomically.

    Calls block: make them in a thread. A broken cache raises nothing.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, pool: str) -> Path:
        """The pool's file."""
        return self._folder / f"{token('pool', pool)}.snapshot"

    def holds(self, pool: str, key: str) -> bool:
        """Are the arrays with this key cached? They are verified by `read` only."""
        try:
            with self.path(pool).open("rb") as file:
                return file.read(_HEAD_BYTES) == _head(key)
        except OSError:
            return False

    def read(self, pool: str, key: str, chunks: Sequence[Chunk], rooms: Sequence[memoryview]) -> bool:
        """Fill `rooms` with the chunks, verified. False if anything is missing or wrong; a file with wrong bytes is removed."""
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
        """Replace the pool's arrays by these pieces. Synced before it is renamed; a full disk leaves the old file and a warning."""
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


def _head(key: str) -> bytes:
    return CACHE_MAGIC + key.encode()


def _fill(file: int, start: int, room: memoryview) -> bool:
    """Fill `room` from offset `start`; False at the end of the file."""
    at = 0
    while at < len(room):
        got = os.preadv(file, [room[at:]], start + at)
        if not got:
            return False
        at += got
    return True
