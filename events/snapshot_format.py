"""What a snapshot looks like in bytes: a manifest, and arrays in chunks.

The manifest (format 2) is

    magic | SHA-256 of the rest | msgpack of `Manifest`

and names, for each array, the objects that hold it, with their sizes and SHA-256. So one small object vouches
for everything: whoever has checked it and a chunk against it has what was written. Format 1, of release 0.1,
was a single object with a header and unchecked arrays behind it; it is read, and no longer written.
"""

import hashlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

CHUNK_BYTES_MAX = 32 * 1024 * 1024
MAGIC = b"HWSNAP02"
MAGIC_1 = b"HWSNAP01"
_DIGEST_BYTES = 32


class Snapshot(NamedTuple):
    """A state at a position: small facts in `facts` (plain msgpack types), bulk in `arrays`.

    `digest` is the state's own, "" where it is not known; `made_ns` is when it was made, by the wall clock.
    """

    position: int
    facts: dict[str, Any]
    arrays: dict[str, NDArray[Any]]
    digest: str = ""
    made_ns: int = 0


class UnreadableSnapshot(ValueError):
    """Bytes that are no snapshot of ours, or not as they were written."""


class Chunk(msgspec.Struct, frozen=True):
    """One object with a piece of an array. `size` in bytes; `digest`: SHA-256 in hex."""

    name: str
    size: int
    digest: str


class ArrayEntry(msgspec.Struct, frozen=True):
    """How an array is put together from its chunks, in order."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    def allocate(self) -> NDArray[Any]:
        """An array to read the chunks into. Raises `UnreadableSnapshot` if they would not fit it."""
        try:
            kind = np.dtype(self.dtype)
        except (TypeError, ValueError, SyntaxError) as error:
            raise UnreadableSnapshot(f"array {self.name}: no such type {self.dtype!r}") from error
        if kind.hasobject or not kind.itemsize or min(self.shape, default=0) < 0:
            raise UnreadableSnapshot(f"array {self.name} has a type or shape that is none")
        count = 1
        for length in self.shape:
            count *= length
        if count * kind.itemsize != sum(chunk.size for chunk in self.chunks):
            raise UnreadableSnapshot(f"array {self.name} does not fit its chunks")
        if any(not 0 < chunk.size <= CHUNK_BYTES_MAX for chunk in self.chunks):
            raise UnreadableSnapshot(f"array {self.name} has a chunk of impossible size")
        return np.empty(self.shape, kind)


class Manifest(msgspec.Struct, frozen=True):
    """Everything of a snapshot but the arrays' bytes."""

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
        """A name for the arrays' content: equal only if every chunk is."""
        told = [
            (array.name, array.dtype, array.shape, [c.digest for c in array.chunks]) for array in self.arrays
        ]
        return hashlib.sha256(msgspec.msgpack.encode(told)).hexdigest()


def pieces(array: NDArray[Any], size: int = CHUNK_BYTES_MAX) -> Iterator[memoryview]:
    """Bytes of a contiguous array in pieces of at most `size`; nothing is copied."""
    # An empty array can not be cast, and has no pieces.
    view = array.reshape(-1).view(np.uint8).data if array.size else memoryview(b"")
    for at in range(0, len(view), size):
        yield view[at : at + size]


def rooms(manifest: Manifest, arrays: dict[str, NDArray[Any]]) -> list[memoryview]:
    """Where each of `manifest.chunks` goes in freshly allocated arrays."""
    found: list[memoryview] = []
    for entry in manifest.arrays:
        at = 0
        for chunk in entry.chunks:
            found.append(arrays[entry.name].reshape(-1).view(np.uint8).data[at : at + chunk.size])
            at += chunk.size
    return found


def encode_manifest(manifest: Manifest) -> bytes:
    """Bytes of a manifest."""
    body = msgspec.msgpack.encode(manifest)
    return MAGIC + hashlib.sha256(body).digest() + body


def decode_manifest(data: bytes) -> Manifest:
    """Read and check a manifest. Raises `UnreadableSnapshot`."""
    if data[: len(MAGIC)] != MAGIC:
        raise UnreadableSnapshot("it does not start like a snapshot that this release knows")
    start = len(MAGIC) + _DIGEST_BYTES
    body = memoryview(data)[start:]
    if hashlib.sha256(body).digest() != data[len(MAGIC) : start]:
        raise UnreadableSnapshot("its manifest does not match its digest")
    try:
        return msgspec.msgpack.decode(body, type=Manifest)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise UnreadableSnapshot(str(error)) from error


def decode_1(data: bytes) -> Snapshot:
    """Read a snapshot of format 1. Raises `UnreadableSnapshot`."""
    try:
        if data[:8] != MAGIC_1:
            raise UnreadableSnapshot("it does not start like a snapshot")
        size = int.from_bytes(data[8:16], "little")
        header = msgspec.msgpack.decode(data[16 : 16 + size])
        if header["format"] != 1:
            raise UnreadableSnapshot(f"format {header['format']} behind the mark of format 1")
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
