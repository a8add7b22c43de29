"""A save that is cut off anywhere: the old snapshots or the new one are there, whole, and never anything between."""

import asyncio
from collections.abc import Callable

import pytest

from headwater.events.memory import MemoryBlobs
from headwater.events.ports import LogUnavailable
from headwater.events.snapshot_store import KEEP, SnapshotStore
from tests.support.ports.snapshots import StoppingBlobs
from tests.unit.events.test_store import CHUNK_BYTES, everything, same, small_store, snapshot

OBJECTS = 4
"""A manifest and three chunks."""


async def calls_of_a_save() -> int:
    """Port calls of the save that the tests cut off."""
    blobs = await before()
    counting = StoppingBlobs(blobs, -1, AssertionError())
    await SnapshotStore(counting, "p", chunk_bytes=CHUNK_BYTES).save(snapshot(40))
    return counting.calls


async def before() -> MemoryBlobs:
    """Three snapshots, one of them by its bookmark only."""
    blobs = MemoryBlobs()
    store = small_store(blobs)
    await store.save(snapshot(10))
    await store.bookmarks.put("b", 10)
    for position in (20, 30):
        await store.save(snapshot(position))
    return blobs


@pytest.mark.parametrize("late", [False, True], ids=["before the call", "after it"])
@pytest.mark.parametrize(
    "error", [asyncio.CancelledError, lambda: LogUnavailable("gone")], ids=["cancelled", "failed"]
)
async def test_a_save_that_is_cut_off_leaves_the_old_or_the_new(
    error: Callable[[], BaseException], late: bool
) -> None:
    """At every call to the object store. The next save goes through and leaves nothing behind."""
    total = await calls_of_a_save()
    assert total > 2 * OBJECTS
    newest = []
    for stop_at in range(total):
        blobs = await before()
        stopping = StoppingBlobs(blobs, stop_at, error(), late=late)
        try:
            await SnapshotStore(stopping, "p", chunk_bytes=CHUNK_BYTES).save(snapshot(40))
        except (asyncio.CancelledError, LogUnavailable):
            pass
        store = small_store(blobs)
        found = await store.newest(everything)
        assert found is not None
        assert same(found, snapshot(found.position))
        newest.append(found.position)
        # Whatever is listed is whole: no manifest stands without its chunks.
        for position in await store.positions():
            assert same(await store.at(position), snapshot(position))
        assert {10, 30} <= set(await store.positions())
        for position in (50, 60):
            await store.save(snapshot(position))
        assert await store.positions() == [10, 50, 60]
        assert len(await blobs.names("")) == (KEEP + 1) * OBJECTS + 1
    # Old up to the call that writes the manifest, new from then on.
    assert newest == [30] * (OBJECTS - late) + [40] * (total - OBJECTS + late)


async def test_cut_off_twice_and_more() -> None:
    """Attempts that fail again and again do not pile up once one succeeds."""
    blobs = await before()
    for stop_at in range(OBJECTS):
        stopping = StoppingBlobs(blobs, stop_at, LogUnavailable("gone"))
        with pytest.raises(LogUnavailable):
            await SnapshotStore(stopping, "p", chunk_bytes=CHUNK_BYTES).save(snapshot(40))
    assert len(await blobs.names("snapshot-chunk/p/")) == 3 * 3 + 0 + 1 + 2 + 3
    store = small_store(blobs)
    for position in (40, 50, 60):
        await store.save(snapshot(position))
    assert len(await blobs.names("")) == (KEEP + 1) * OBJECTS + 1
