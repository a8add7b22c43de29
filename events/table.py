"""The `Table` port: keys with revisions and time to live, for leases and model cards."""

from collections.abc import AsyncIterator
from typing import Annotated, Final, NamedTuple, Protocol

from msgspec import Meta

MIB: Final = 1024**2
STORED_BYTES_MAX: Final = 512 * MIB
REQUEST_BYTES_MAX: Final = 2 * 1024**3
POOL_BYTES_MAX: Final = 8 * 1024**3


class StreamSizes(NamedTuple):
    """What the streams that have a bound may hold, in bytes, which their server reserves: stored responses, the request log, and the log
    of each pool."""

    stored: Annotated[
        int,
        Meta(
            ge=MIB,
            description="all stored responses and conversations; beyond it the oldest are discarded; a stream that has more keeps it",
        ),
    ] = STORED_BYTES_MAX
    requests: Annotated[
        int, Meta(ge=MIB, description="the request log; beyond it the oldest events are discarded")
    ] = REQUEST_BYTES_MAX
    pool: Annotated[
        int, Meta(ge=MIB, description="the log of each pool; beyond it the oldest events are discarded")
    ] = POOL_BYTES_MAX


STREAM_SIZES: Final = StreamSizes()
"""The defaults."""


KEY_BYTES: Final = 512
"""What a key costs besides its value: the server holds it in memory."""


class KeySize(NamedTuple):
    """The size of one key's value in bytes, and its revision."""

    key: str
    bytes: int
    revision: int


class TableEntry(NamedTuple):
    """One key's state. `value` is None after deletion or expiry, or, `lost`, where the whole table was deleted and made again."""

    key: str
    value: bytes | None
    revision: int
    lost: bool = False


class Table(Protocol):
    """A small map with compare-and-set. Revisions rise over the whole table."""

    async def create(self, key: str, value: bytes, *, ttl_s: int = 0) -> int | None:
        """Store if the key is absent. Returns its revision, or None where the key exists."""
        ...

    async def update(self, key: str, value: bytes, *, revision: int, ttl_s: int = 0) -> int | None:
        """Replace if the key still has `revision`. Returns the new revision, or None if it has another."""
        ...

    async def put(self, key: str, value: bytes, *, ttl_s: int = 0) -> int:
        """Store unconditionally. Returns the revision."""
        ...

    async def delete(self, key: str, *, marker_s: int = 0) -> None:
        """Remove the key; watchers see an entry without value.

        `marker_s`: seconds after which nothing is left of the key; with 0 a marker stays.
        """
        ...

    async def get(self, key: str) -> TableEntry | None:
        """The current entry, None where the key is absent, deleted or expired."""
        ...

    async def sizes(self, prefix: str) -> list[KeySize]:
        """The present keys that begin with the tokens `prefix`, in the order of their revisions. No value is sent."""
        ...

    def watch(self) -> AsyncIterator[list[TableEntry]]:
        """Yield all current entries as one list (possibly empty), then every change."""
        ...
