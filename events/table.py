"""The `Table` port: keys with revisions and time to live, for leases and model cards."""

from collections.abc import AsyncIterator
from typing import NamedTuple, Protocol


class TableEntry(NamedTuple):
    """One key's state. `value` is None after deletion or expiry."""

    key: str
    value: bytes | None
    revision: int


class Table(Protocol):
    """A small map with compare-and-set. Revisions rise over the whole table."""

    async def create(self, key: str, value: bytes, *, ttl_s: int = 0) -> int | None:
        """Store if the key is absent. Returns its revision, or None where the key exists."""
        ...

    async def update(self, key: str, value: bytes, *, revision: int, ttl_s: int = 0) -> int | None:
        """Replace if the key still has `revision`. Returns the new revision, or None if it has another."""
        ...

    async def put(self, key: str, value: bytes) -> int:
        """Store unconditionally. Returns the revision."""
        ...

    async def delete(self, key: str) -> None:
        """Remove the key; watchers see an entry without value."""
        ...

    async def get(self, key: str) -> TableEntry | None:
        """The current entry, None where the key is absent, deleted or expired."""
        ...

    def watch(self) -> AsyncIterator[list[TableEntry]]:
        """Yield all current entries as one list (possibly empty), then every change."""
        ...
