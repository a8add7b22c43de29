"""Bookmarks: names for snapshots that are kept for ever."""

import msgspec

from headwater.events.blobs import Blobs
from headwater.events.errors import LogRefused
from headwater.schemas import subjects


class _Bookmark(msgspec.Struct, frozen=True):
    position: int


class Bookmarks:
    """The bookmarks of one pool: an object each, so that two people naming at once do not undo each other."""

    def __init__(self, blobs: Blobs, pool: str) -> None:
        self._blobs = blobs
        self._pool = pool

    async def all(self) -> dict[str, int]:
        """Position by name. Raises `LogError`: who can not read them all must not delete."""
        found: dict[str, int] = {}
        for name in await self._blobs.names(subjects.bookmark_prefix(self._pool)):
            data = await self._blobs.get(name)
            try:
                if data is not None:
                    found[name.rsplit("/", 1)[1]] = msgspec.json.decode(data, type=_Bookmark).position
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise LogRefused(
                    f"object {name} is no bookmark: {error}; delete it or name it anew"
                ) from error
        return found

    async def put(self, name: str, position: int) -> None:
        """Name a position. Raises `InvalidName`."""
        data = msgspec.json.encode(_Bookmark(position))
        await self._blobs.put(subjects.bookmark_name(self._pool, name), data)

    async def drop(self, name: str) -> bool:
        """Forget a name; False if there was none. The snapshot goes when the next one is saved."""
        known = await self._blobs.get(subjects.bookmark_name(self._pool, name)) is not None
        await self._blobs.delete(subjects.bookmark_name(self._pool, name))
        return known
