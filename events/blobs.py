"""The `Blobs` port: named objects too large for a message. Snapshots and tokenizer files live here."""

from typing import Protocol


class Blobs(Protocol):
    """Named byte strings. An object appears whole or not at all, and is verified on read."""

    async def put(self, name: str, data: bytes) -> None:
        """Store or replace an object."""
        ...

    async def get(self, name: str) -> bytes | None:
        """The object's bytes, None where it is absent. Raises `LogRefused` if its digest is wrong."""
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
