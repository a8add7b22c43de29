"""Snapshots over memory and over the real object store: whole or not there, verified, and cut off anywhere."""

import asyncio
from collections.abc import AsyncIterator, Callable

import numpy as np
import pytest
from nats.aio.client import Client

from headwater.events.jetstream import JetStreamBlobs
from headwater.events.jetstream.api import api
from headwater.events.jetstream.stream_spec import blob_stream
from headwater.events.jetstream.streams import ensure
from headwater.events.memory import MemoryBlobs
from headwater.events.ports import Blobs, LogError, LogUnavailable
from headwater.events.snapshot_store import KEEP, Snapshot, SnapshotStore
from tests.support.ports.logs import connected
from tests.support.ports.snapshots import StoppingBlobs
from tests.support.servers.nats import NatsServer

CHUNK_BYTES = 3 * 512 * 1024 + 8
ROWS = 600_000


@pytest.fixture
async def blobs(backend: NatsServer | None, unique: str) -> AsyncIterator[Blobs]:
    """An empty bucket."""
    if backend is None:
        yield MemoryBlobs()
        return
    async with connected(backend) as client:
        await ensure(client, blob_stream(unique, 1))
        yield JetStreamBlobs(client, unique)


def snapshot(position: int, rows: int = 50) -> Snapshot:
    """A snapshot that says its position in every row."""
    table = np.arange(rows, dtype=np.uint64) * np.uint64(1000) + np.uint64(position)
    return Snapshot(position, {"rows": rows}, {"table": table, "none": table[:0]}, f"d{position}", 1)


def store(blobs: Blobs, chunk_bytes: int = 200) -> SnapshotStore:
    """Two chunks to a small snapshot."""
    return SnapshotStore(blobs, "p", chunk_bytes=chunk_bytes)


def is_whole(found: Snapshot | None, rows: int = 50) -> int:
    """Its position, after comparing all of it."""
    assert found is not None
    expected = snapshot(found.position, rows)
    assert (found.facts, found.digest) == (expected.facts, expected.digest)
    for name, array in expected.arrays.items():
        assert np.array_equal(found.arrays[name], array)
    return found.position


async def test_a_snapshot_of_many_chunks_comes_back(blobs: Blobs) -> None:
    """Chunks of several pieces each, read some at a time."""
    large = store(blobs, CHUNK_BYTES)
    for position in (1, 2, 3):
        await large.save(snapshot(position, ROWS))
    assert is_whole(await large.newest(lambda _: True), ROWS) == 3
    assert is_whole(await large.newest(lambda position: position < 3), ROWS) == 2
    assert await large.positions() == [2, 3]
    chunks = -(-ROWS * 8 // CHUNK_BYTES)
    assert len(await blobs.names("")) == KEEP * (chunks + 1)
    for kept in await large.listing():
        assert kept.manifest is not None
        assert ROWS * 8 < kept.size < ROWS * 8 + 4000


async def test_a_wrong_chunk_is_passed_over(blobs: Blobs) -> None:
    """Other bytes, fewer, or none: the next older snapshot."""
    mine = store(blobs)
    for position in (1, 2):
        await mine.save(snapshot(position))
    chunk = (await blobs.names("snapshot-chunk/p/"))[-1]
    whole = await blobs.get(chunk)
    assert whole is not None
    for damaged in (whole[:-1] + bytes([whole[-1] ^ 1]), whole[:-1], whole + b"x", b"", None):
        if damaged is None:
            await blobs.delete(chunk)
        else:
            await blobs.put(chunk, damaged)
        assert is_whole(await mine.newest(lambda _: True)) == 1
    await blobs.put(chunk, whole)
    assert is_whole(await mine.newest(lambda _: True)) == 2


@pytest.mark.parametrize("late", [False, True], ids=["before the call", "after it"])
@pytest.mark.parametrize(
    "error", [asyncio.CancelledError, lambda: LogUnavailable("gone")], ids=["cancelled", "failed"]
)
async def test_a_save_cut_off_at_any_call_leaves_old_or_new(
    blobs: Blobs, error: Callable[[], BaseException], late: bool
) -> None:
    """Each attempt stops one call later, on the remains of all those before. Once saves go through again, nothing of them is left."""
    mine = store(blobs)
    await mine.save(snapshot(1))
    await mine.bookmarks.put("first", 1)
    position, stop_at, before = 1, 0, 1
    while True:
        position += 1
        stopping = StoppingBlobs(blobs, stop_at, error(), late=late)
        try:
            await store(stopping).save(snapshot(position))
        except (asyncio.CancelledError, LogUnavailable):
            pass
        newest = is_whole(await mine.newest(lambda _: True))
        assert newest in (before, position)
        for kept in await mine.positions():
            assert is_whole(await mine.at(kept)) == kept
        before = newest
        if stopping.calls <= stop_at:
            break
        stop_at += 1
    assert stop_at > 6
    assert newest == position
    for later in range(KEEP):
        await mine.save(snapshot(position + 1 + later))
    assert await mine.positions() == [1, position + 1, position + 2]
    # Of each a manifest and two chunks, and the bookmark.
    assert len(await blobs.names("")) == (KEEP + 1) * 3 + 1


async def test_two_routers_saving_at_once_leave_whole_snapshots(blobs: Blobs) -> None:
    """Same positions or others, while a third reads."""

    async def save(start: int) -> None:
        for position in range(start, 30, 3):
            await store(blobs).save(snapshot(position))

    await store(blobs).save(snapshot(1))
    async with asyncio.TaskGroup() as tasks:
        saving = [tasks.create_task(save(start)) for start in (2, 3, 2)]
        while not all(task.done() for task in saving):
            is_whole(await store(blobs).newest(lambda _: True))
            await asyncio.sleep(0)
    assert is_whole(await store(blobs).newest(lambda _: True)) == 29


async def test_a_store_that_goes_away_while_it_is_written_keeps_what_was_there(
    own_server: NatsServer, unique: str
) -> None:
    """SIGKILL in the middle of a save; after the restart the old snapshot is read, and the next one saved."""
    async with connected(own_server) as client:
        await ensure(client, blob_stream(unique, 1))
        blobs = JetStreamBlobs(client, unique)
        large = store(blobs, CHUNK_BYTES)
        await large.save(snapshot(1, ROWS))
        saving = asyncio.create_task(large.save(snapshot(2, ROWS)))
        while len(await blobs.names("snapshot-chunk/p/00000000000000000002")) < 1:
            await asyncio.sleep(0)
        own_server.kill()
        saving.cancel()
        await asyncio.gather(saving, return_exceptions=True)
        await own_server.restart()
        found = None
        async with asyncio.timeout(30):
            while found is None:
                try:
                    found = await large.newest(lambda _: True)
                except LogError:
                    continue
        assert is_whole(found, ROWS) == 1
        for position in (3, 4):
            await large.save(snapshot(position, ROWS))
        assert is_whole(await large.newest(lambda _: True), ROWS) == 4
        assert await large.positions() == [3, 4]


async def test_space_is_given_back(client: Client, unique: str) -> None:
    """A router saves for months: bytes and names in the bucket stay those of what is kept."""
    await ensure(client, blob_stream(unique, 1))
    mine = store(JetStreamBlobs(client, unique))
    for position in range(1, 12):
        await mine.save(snapshot(position))
    state = (await api(client, f"STREAM.INFO.OBJ_{unique}"))["state"]
    # Per snapshot: manifest and two chunks, an entry and one piece each.
    assert state["messages"] == state["num_subjects"] == KEEP * 6
