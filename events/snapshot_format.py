"""The byte format of a snapshot: a manifest, and arrays in chunks.

The manifest is

    magic | SHA-256 of the rest | msgpack of `Manifest`

and names, for each array, the objects with its chunks, with their sizes and SHA-256. Verifying the manifest and each
chunk against it therefore verifies the whole snapshot.
"""

import hashlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

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
        raise UnreadableSnapshot("it does not start with the magic bytes of a known snapshot format")
    start = len(MAGIC) + _DIGEST_BYTES
    body = memoryview(data)[start:]
    if hashlib.sha256(body).digest() != data[len(MAGIC) : start]:
        raise UnreadableSnapshot("its manifest does not match its digest")
    try:
        return msgspec.msgpack.decode(body, type=Manifest)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise UnreadableSnapshot(str(error)) from error
