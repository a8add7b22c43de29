"""Snapshots: a fold's state with its log position, kept in the object store.

A snapshot is a msgpack header (position, format, sizes) and raw arrays behind it, so that loading is reading.
The newest few are kept; a snapshot that fails its check is passed over for the next older one, and without
any the fold starts from the beginning of the log.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import numpy as np
import structlog
from numpy.typing import NDArray

from headwater.events.blobs import Blobs
from headwater.events.errors import LogError
from headwater.schemas import subjects

KEEP = 2
FORMAT = 1
_MAGIC = b"HWSNAP01"

_log = structlog.get_logger("headwater.snapshots")


class Snapshot(NamedTuple):
    """A state at a position: small facts in `facts` (plain msgpack types), bulk in `arrays`."""

    position: int
    facts: dict[str, Any]
    arrays: dict[str, NDArray[Any]]


class UnreadableSnapshot(ValueError):
    """Bytes that are no snapshot of ours."""


def encode(snapshot: Snapshot) -> bytes:
    """Bytes of a snapshot."""
    header = {
        "format": FORMAT,
        "position": snapshot.position,
        "facts": snapshot.facts,
        "arrays": [
            (name, array.dtype.str, array.shape, array.nbytes) for name, array in snapshot.arrays.items()
        ],
    }
    head = msgspec.msgpack.encode(header)
    parts = [_MAGIC, len(head).to_bytes(8, "little"), head]
    parts += [np.ascontiguousarray(array).tobytes() for array in snapshot.arrays.values()]
    return b"".join(parts)


def decode(data: bytes) -> Snapshot:
    """Read a snapshot. Raises `UnreadableSnapshot`."""
    try:
        if data[:8] != _MAGIC:
            raise UnreadableSnapshot("it does not start like a snapshot")
        size = int.from_bytes(data[8:16], "little")
        header = msgspec.msgpack.decode(data[16 : 16 + size])
        if header["format"] != FORMAT:
            raise UnreadableSnapshot(f"format {header['format']}, this release reads {FORMAT}")
        at = 16 + size
        arrays: dict[str, NDArray[Any]] = {}
        for name, dtype, shape, nbytes in header["arrays"]:
            kind = np.dtype(dtype)
            if kind.hasobject or not kind.itemsize or at + nbytes > len(data):
                raise UnreadableSnapshot(f"array {name} does not fit its bytes")
            flat = np.frombuffer(data, kind, count=nbytes // kind.itemsize, offset=at)
            arrays[name] = flat.reshape(shape).copy()
            at += nbytes
        position, facts = header["position"], header["facts"]
        if not isinstance(position, int) or not isinstance(facts, dict):
            raise UnreadableSnapshot("its header has fields of the wrong type")
        return Snapshot(position, facts, arrays)
    except (
        msgspec.DecodeError,
        LookupError,
        ValueError,
        TypeError,
        ArithmeticError,
        RecursionError,
    ) as error:
        raise UnreadableSnapshot(str(error)) from error


class SnapshotStore:
    """Writes and finds the snapshots of one pool in the object store."""

    def __init__(self, blobs: Blobs, pool: str) -> None:
        self._blobs = blobs
        self._pool = pool

    async def save(self, snapshot: Snapshot) -> None:
        """Write the snapshot, then drop all but the newest `KEEP`."""
        await self._blobs.put(subjects.snapshot_name(self._pool, snapshot.position), encode(snapshot))
        for old in (await self._blobs.names(subjects.snapshot_prefix(self._pool)))[:-KEEP]:
            await self._blobs.delete(old)

    async def newest(self, accept: Callable[[int], bool]) -> Snapshot | None:
        """The newest readable snapshot whose position passes `accept`, None if there is none."""
        for name in reversed(await self._blobs.names(subjects.snapshot_prefix(self._pool))):
            if not accept(int(name.rsplit("/", 1)[1])):
                continue
            try:
                data = await self._blobs.get(name)
                if data is not None:
                    return decode(data)
            except (UnreadableSnapshot, LogError) as error:
                _log.error("snapshot_unreadable", name=name, reason=str(error))
        return None
