"""The local cache: fast, and trusted in nothing."""

import errno
import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headwater.events.memory import MemoryBlobs
from headwater.events.ports import sha256
from headwater.events.snapshot_bytes import Chunk, SnapshotCache
from headwater.events.snapshot_store import NEAR_RECORDS, SnapshotStore
from tests.unit.events.test_store import CHUNK_BYTES, everything, same, snapshot

PIECES = [bytes([number]) * (50 + number) for number in range(5)]
CHUNKS = [Chunk(f"c{number}", len(piece), sha256(piece)) for number, piece in enumerate(PIECES)]
KEY, OTHER = "a" * 64, "b" * 64


@pytest.fixture
def cache(tmp_path: Path) -> SnapshotCache:
    """An empty cache, whose folder does not exist."""
    return SnapshotCache(tmp_path / "deep" / "er")


@pytest.fixture
def folder(tmp_path: Path) -> SnapshotCache:
    """A cache on disk that holds `PIECES` of pool p."""
    made = SnapshotCache(tmp_path)
    made.write("p", KEY, [memoryview(piece) for piece in PIECES])
    return made


def read(cache: SnapshotCache, pool: str = "p", key: str = KEY) -> list[bytes] | None:
    """What the cache has."""
    rooms = [bytearray(chunk.size) for chunk in CHUNKS]
    found = cache.read(pool, key, CHUNKS, [memoryview(room) for room in rooms])
    return [bytes(room) for room in rooms] if found else None


def test_what_was_written_is_read_by_its_key_only(cache: SnapshotCache) -> None:
    """Another pool, another key, an empty cache: nothing. A new one replaces the old."""
    assert read(cache) is None
    assert not cache.holds("p", KEY)
    cache.write("p", KEY, [memoryview(piece) for piece in PIECES])
    assert read(cache) == PIECES
    assert cache.holds("p", KEY)
    assert read(cache, "q") is None
    assert read(cache, key=OTHER) is None
    cache.write("p", OTHER, [memoryview(piece) for piece in PIECES])
    assert read(cache) is None
    assert read(cache, key=OTHER) == PIECES


def test_every_changed_byte_and_every_cut_is_noticed_and_removed(folder: SnapshotCache) -> None:
    """A file of something else is left to the next write; one of ours that is wrong goes at once."""
    path = folder.path("p")
    whole = path.read_bytes()
    head = len(whole) - sum(map(len, PIECES))
    for at in range(len(whole)):
        changed = bytearray(whole)
        changed[at] ^= 1 << at % 8
        path.write_bytes(changed)
        assert read(folder) is None
        assert path.exists() == (at < head)
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert read(folder) is None
    path.write_bytes(whole)
    assert read(folder) == PIECES


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_file(
    folder: SnapshotCache, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """A full disk at any point: what was there stays, and no half file is left."""

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    def opened(file: int, *_: Any, **__: Any) -> io.FileIO:
        os.close(file)
        return io.FileIO("/dev/full", "w")

    name, replacement = ("fdopen", opened) if call == "write" else (call, full)
    monkeypatch.setattr(os, name, replacement)
    folder.write("p", OTHER, [memoryview(b"x")])
    monkeypatch.undo()
    assert read(folder) == PIECES
    assert os.listdir(folder.path("p").parent) == ["p.snapshot"]


def test_a_file_is_on_the_disk_before_it_has_its_name(
    folder: SnapshotCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power failure there is the old file or the new one."""
    done: list[str] = []
    fsync, replace = os.fsync, os.replace

    def noted_fsync(file: int) -> None:
        done.append("fsync")
        fsync(file)

    def noted_replace(old: str, new: Path) -> None:
        done.append("replace")
        replace(old, new)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    folder.write("p", OTHER, [])
    assert done == ["fsync", "replace"]


def test_files_of_writers_that_ended_are_removed_and_others_left(folder: SnapshotCache) -> None:
    """Half a gigabyte each. Other pools' and those being written stay."""
    base = folder.path("p").parent
    old, young, other = base / "p.snapshot.1.part", base / "p.snapshot.2.part", base / "q.snapshot.1.part"
    for path in (old, young, other):
        path.write_bytes(b"half")
    for path in (old, other):
        os.utime(path, (1, 1))
    folder.write("p", OTHER, [])
    assert [path.exists() for path in (old, young, other)] == [False, True, True]


def test_a_folder_that_cannot_be_used_is_no_failure(tmp_path: Path) -> None:
    """The router then reads the object store."""
    (tmp_path / "file").write_text("in the way")
    cache = SnapshotCache(tmp_path / "file")
    cache.write("p", KEY, [])
    assert not cache.holds("p", KEY)
    assert read(cache) is None


class CountingBlobs(MemoryBlobs):
    """Counts chunks read."""

    chunks_read = 0

    async def read_into(self, name: str, into: memoryview, digest: str) -> bool:
        """See `Blobs.read_into`."""
        self.chunks_read += 1
        return await super().read_into(name, into, digest)


async def test_a_restart_reads_nothing_large_from_the_store(cache: SnapshotCache) -> None:
    """What was saved here is opened from here; what was not, or is broken, from the store."""
    blobs = CountingBlobs()
    store = SnapshotStore(blobs, "p", cache=cache, chunk_bytes=CHUNK_BYTES)
    await store.save(snapshot(1))
    assert same(await store.newest(everything), snapshot(1))
    assert blobs.chunks_read == 0
    cache.write("p", KEY, [])
    assert same(await store.newest(everything), snapshot(1))
    assert blobs.chunks_read == 3


async def test_a_cache_of_another_deployment_never_matches(cache: SnapshotCache) -> None:
    """Same pool, same position, another log: its manifest names other bytes."""
    await SnapshotStore(MemoryBlobs(), "p", cache=cache).save(snapshot(5)._replace(arrays={"a": np.ones(9)}))
    blobs = MemoryBlobs()
    await SnapshotStore(blobs, "p").save(snapshot(5))
    assert same(await SnapshotStore(blobs, "p", cache=cache).newest(everything), snapshot(5))
    assert await SnapshotStore(MemoryBlobs(), "p", cache=cache).newest(everything) is None


@pytest.mark.parametrize(("behind", "expected"), [(NEAR_RECORDS, 10), (NEAR_RECORDS + 1, 11 + NEAR_RECORDS)])
async def test_a_cached_snapshot_is_taken_before_one_that_is_hardly_newer(
    cache: SnapshotCache, behind: int, expected: int
) -> None:
    """Another router saved since: folding the difference is faster than fetching, up to a bound."""
    blobs = MemoryBlobs()
    mine = SnapshotStore(blobs, "p", cache=cache)
    await mine.save(snapshot(10))
    await SnapshotStore(blobs, "p").save(snapshot(10 + behind))
    assert same(await mine.newest(everything), snapshot(expected))
