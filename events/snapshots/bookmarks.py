"""Bookmarks: names of snapshots that are never pruned."""

import msgspec

from headwater.events.blobs import Blobs
from headwater.events.errors import LogRefused
from headwater.schemas import subjects


class _Bookmark(msgspec.Struct, frozen=True):
    position: int


class Bookmarks:
    """The bookmarks of one pool: one object each, so that concurrent changes do not overwrite each other."""

    def __init__(self, blobs: Blobs, pool: str) -> None:
        self._blobs = blobs
        self._pool = pool

    async def all(self) -> dict[str, int]:
        """Position by name. Raises `LogError`: without all of them, no snapshot may be deleted."""
        found: dict[str, int] = {}
        for name in await self._blobs.names(subjects.bookmark_prefix(self._pool)):
            data = await self._blobs.get(name)
            try:
                if data is not None:
                    found[name.rsplit("/", 1)[1]] = msgspec.json.decode(data, type=_Bookmark).position
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise LogRefused(
                    f"object {name} is not a bookmark: {error}; delete it or set it again"
                ) from error
        return found

    async def put(self, name: str, position: int) -> None:
        """Name a position. Raises `InvalidName`."""
        data = msgspec.json.encode(_Bookmark(position))
        await self._blobs.put(subjects.bookmark_name(self._pool, name), data)

    async def drop(self, name: str) -> bool:
        """Remove a name; False if there was none. The snapshot is pruned when the next one is saved."""
        known = await self._blobs.get(subjects.bookmark_name(self._pool, name)) is not None
        await self._blobs.delete(subjects.bookmark_name(self._pool, name))
        return known
