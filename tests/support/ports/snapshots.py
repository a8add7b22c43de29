"""Snapshots in tests: saved and read back through the real store, and stores that stop or fail at a chosen call."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from headwater.events.memory import MemoryBlobs
from headwater.events.ports import Blobs
from headwater.events.snapshot_store import Snapshot, SnapshotStore

T = TypeVar("T")


def saved_and_read(snapshot: Snapshot) -> Snapshot:
    """What comes back, for tests without a running loop."""

    async def through() -> Snapshot:
        store = SnapshotStore(MemoryBlobs(), "p")
        await store.save(snapshot)
        return await store.at(snapshot.position)

    # A factory of its own: a plain `asyncio.run` would unset the loop of pytest-asyncio.
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        return runner.run(through())


class StoppingBlobs:
    """Blobs whose call number `stop_at` (from 0) raises `error`: before it happens, or after with `late`.

    With CancelledError that is what a cancelled task, and nearly what a killed process, leaves behind. `calls`
    counts; a number beyond the last call stops nothing.
    """

    def __init__(self, blobs: Blobs, stop_at: int, error: BaseException, *, late: bool = False) -> None:
        self._blobs = blobs
        self._stop_at = stop_at
        self._error = error
        self._late = late
        self.calls = 0

    async def _call(self, work: Callable[[], Awaitable[T]]) -> T:
        stop = self.calls == self._stop_at
        self.calls += 1
        if stop and not self._late:
            raise self._error
        result = await work()
        if stop:
            raise self._error
        return result

    async def put(self, name: str, data: bytes | memoryview) -> str:
        """See `Blobs.put`."""
        return await self._call(lambda: self._blobs.put(name, data))

    async def get(self, name: str) -> bytes | None:
        """See `Blobs.get`."""
        return await self._call(lambda: self._blobs.get(name))

    async def has(self, name: str) -> bool:
        """See `Blobs.has`."""
        return await self._call(lambda: self._blobs.has(name))

    async def read_into(self, name: str, into: memoryview, digest: str) -> bool:
        """See `Blobs.read_into`."""
        return await self._call(lambda: self._blobs.read_into(name, into, digest))

    async def names(self, prefix: str) -> list[str]:
        """See `Blobs.names`."""
        return await self._call(lambda: self._blobs.names(prefix))

    async def delete(self, name: str) -> None:
        """See `Blobs.delete`."""
        await self._call(lambda: self._blobs.delete(name))
