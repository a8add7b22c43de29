"""The `Blobs` port: named objects too large for a message, such as snapshots and tokenizer files."""

import hashlib
from typing import Protocol


class Blobs(Protocol):
    """Named byte strings. An object becomes visible whole or not at all, and is verified on read."""

    async def put(self, name: str, data: bytes | memoryview) -> str:
        """Store or replace an object. Returns the SHA-256 of its bytes, in hex."""
        ...

    async def get(self, name: str) -> bytes | None:
        """The object's bytes, None where it is absent. Raises `LogRefused` if its digest is wrong."""
        ...

    async def read_into(self, name: str, into: memoryview, digest: str) -> bool:
        """Read an object into a buffer: no copy is made, and its bytes are hashed once.

        `into`: bytes, writable, as long as the object. False where the object is absent. Raises `LogRefused`
        if size or SHA-256 (hex) are not as expected; the content of `into` is then undefined.
        """
        ...

    async def has(self, name: str) -> bool:
        """Is there such an object? Its bytes are neither read nor verified."""
        ...

    async def names(self, prefix: str) -> list[str]:
        """Names that start with `prefix`, sorted."""
        ...

    async def delete(self, name: str) -> None:
        """Remove an object; removing an absent one is fine."""
        ...


def sha256(data: bytes | memoryview) -> str:
    """Digest in hex. hashlib releases the GIL, so large data is hashed in a thread."""
    return hashlib.sha256(data).hexdigest()


def wrong_bytes(name: str) -> str:
    """The error message for an object whose bytes are not those that were written, with the fix."""
    return f"object {name}: its bytes do not match its digest; delete it, and it is written again"
