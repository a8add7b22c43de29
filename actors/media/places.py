"""Places of the intake's processes: which item gets the next free one, and which waits in vain. No I/O."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, Literal

from headwater.actors.media.request.errors import MediaCode, MediaError

Line = Literal["fetch", "decode"]
"""Items to be fetched from a server, and items that their requests contain."""

_FULL: Final = "Too many requests with media at the moment. Retry."
_LATE: Final = "The media waited too long for a process. Retry."


class WaitingLine:
    """Items of one line by tenant. Tenants take turns, and each one's items keep their order."""

    def __init__(self, items_max: int) -> None:
        self._items_max = items_max
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    def __len__(self) -> int:
        """Items that wait."""
        return sum(map(len, self._waiting.values()))

    def add(self, tenant: str) -> "asyncio.Future[None]":
        """Wait: the future is done when the item has a place.

        A full line is shared: the newest item of the tenant with most of them gives way to one with fewer. Raises `MediaError` if that
        would be this tenant itself.
        """
        if len(self) >= self._items_max:
            most = max(self._waiting, key=lambda name: len(self._waiting[name]), default=tenant)
            if len(self._waiting.get(most, ())) <= len(self._waiting.get(tenant, ())) + 1:
                raise MediaError(MediaCode.BUSY, _FULL)
            self._waiting[most].pop().set_exception(MediaError(MediaCode.BUSY, _FULL))
        future = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(future)
        return future

    def pop(self) -> "asyncio.Future[None] | None":
        """The item whose turn it is, removed; its tenant is the last one then. None if none waits."""
        while self._waiting:
            tenant, items = self._waiting.popitem(last=False)
            future = items.popleft() if items else None
            if items:
                self._waiting[tenant] = items
            if future is not None and not future.done():
                return future
        return None

    def remove(self, tenant: str, future: "asyncio.Future[None]") -> None:
        """Wait no longer."""
        items = self._waiting.get(tenant)
        if items is not None and future in items:
            items.remove(future)
            if not items:
                del self._waiting[tenant]


class ProcessPlaces:
    """At most `places` items have one, of these at most `places` - 1, but at least one, are fetched.

    So a server that sends slowly keeps no place from all items that came with their requests. The lines take turns at free places. An
    item waits at most `wait_s`, and a line has at most `waiting_max` items.
    """

    def __init__(self, places: int, waiting_max: int, wait_s: float) -> None:
        self._free = places
        self._free_for_fetching = max(1, places - 1)
        self._wait_s = wait_s
        self._lines: OrderedDict[Line, WaitingLine] = OrderedDict(
            fetch=WaitingLine(waiting_max), decode=WaitingLine(waiting_max)
        )

    @asynccontextmanager
    async def place(self, line: Line, tenant: str) -> AsyncIterator[None]:
        """A place for one item. Raises `MediaError` if too many wait, or for too long."""
        if self._has_place(line) and not len(self._lines[line]):
            self._take(line)
        else:
            await self._wait(line, tenant)
        try:
            yield
        finally:
            self._give_back(line)

    async def _wait(self, line: Line, tenant: str) -> None:
        future = self._lines[line].add(tenant)
        try:
            async with asyncio.timeout(self._wait_s):
                await future
        except BaseException as error:
            self._lines[line].remove(tenant, future)
            if future.done() and not future.cancelled() and future.exception() is None:
                # It got its place at the moment at which it was cancelled.
                self._give_back(line)
            if isinstance(error, TimeoutError):
                raise MediaError(MediaCode.BUSY, _LATE) from error
            raise

    def _has_place(self, line: Line) -> bool:
        return self._free > 0 and (line == "decode" or self._free_for_fetching > 0)

    def _take(self, line: Line) -> None:
        self._free -= 1
        self._free_for_fetching -= line == "fetch"

    def _give_back(self, line: Line) -> None:
        self._free += 1
        self._free_for_fetching += line == "fetch"
        while (chosen := self._next()) is not None:
            next_line, future = chosen
            self._take(next_line)
            self._lines.move_to_end(next_line)
            future.set_result(None)

    def _next(self) -> "tuple[Line, asyncio.Future[None]] | None":
        """Whose turn it is, of those that may have a place."""
        for line, waiting in self._lines.items():
            if self._has_place(line) and (future := waiting.pop()) is not None:
                return line, future
        return None
