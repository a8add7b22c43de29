"""Snapshots in the object store: what comes back, what is refused, what is kept."""

import hashlib
from collections.abc import Awaitable, Callable
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from headwater.events.memory import MemoryBlobs
from headwater.events.ports import Bounds, LogRefused, LogUnavailable
from headwater.events.snapshot_bytes import Manifest, decode_manifest, encode_manifest
from headwater.events.snapshot_store import (
    KEEP,
    LADDER_MAX,
    Snapshot,
    SnapshotStore,
    UnreadableSnapshot,
    thin_out,
)
from headwater.schemas.subjects import snapshot_chunk_prefix, snapshot_name
from tests.support.data.examples import texts
from tests.support.ports.snapshots import saved_and_read

facts = st.dictionaries(
    texts, st.integers(0, 2**63) | texts | st.booleans() | st.lists(st.integers(0, 9), max_size=4), max_size=5
)
arrays = st.dictionaries(
    texts,
    npst.arrays(
        st.sampled_from([np.uint64, np.uint32, np.int64, np.float64]),
        npst.array_shapes(max_dims=3, max_side=5, min_side=0) | st.just(()),
    ),
    max_size=3,
)
CHUNK_BYTES = 80


def snapshot(position: int = 5, **kept: Any) -> Snapshot:
    """A small snapshot that says its position: 192 bytes, three chunks."""
    table = np.arange(24, dtype=np.uint64).reshape(6, 4) + np.uint64(position)
    return Snapshot(position, {"rows": 6, **kept}, {"table": table}, f"digest {position}", 7)


def small_store(blobs: MemoryBlobs, pool: str = "p") -> SnapshotStore:
    """A store that cuts arrays into chunks of 80 bytes."""
    return SnapshotStore(blobs, pool, chunk_bytes=CHUNK_BYTES)


def everything(_: int) -> bool:
    """Any position will do."""
    return True


def same(read: Snapshot | None, written: Snapshot) -> bool:
    """Equal in every bit."""
    assert read is not None
    assert (*read[:2], *read[3:], list(read.arrays)) == (*written[:2], *written[3:], list(written.arrays))
    for name, array in written.arrays.items():
        assert (read.arrays[name].dtype, read.arrays[name].shape) == (array.dtype, array.shape)
        assert read.arrays[name].tobytes() == array.tobytes()
    return True


@given(st.integers(0, 2**62), facts, arrays)
def test_a_snapshot_comes_back_as_it_was(
    position: int, kept: dict[str, Any], bulk: dict[str, np.ndarray[Any, np.dtype[Any]]]
) -> None:
    """Position, facts, and arrays with their names, types, shapes and every bit."""
    written = Snapshot(position, kept, bulk, "d", 9)
    assert same(saved_and_read(written), written)


def test_an_array_that_is_no_block_of_memory_is_kept_in_order() -> None:
    """Slices and transposed views are written as what they show."""
    view = np.arange(24, dtype=np.uint64).reshape(6, 4).T[:, ::2]
    assert saved_and_read(Snapshot(1, {}, {"a": view})).arrays["a"].tolist() == view.tolist()


async def test_a_read_array_can_be_written_to_and_shares_nothing() -> None:
    """The fold goes on in it; what is stored stays as it is."""
    store = small_store(MemoryBlobs())
    await store.save(snapshot())
    (await store.at(5)).arrays["table"][:] = 0
    assert same(await store.at(5), snapshot())


async def test_any_single_byte_that_changed_is_noticed() -> None:
    """Anywhere: in the manifest or a chunk, whichever bit. The next older snapshot is taken."""
    blobs = MemoryBlobs()
    store = small_store(blobs)
    await store.save(snapshot(1))
    older = set(await blobs.names(""))
    await store.save(snapshot(2))
    newer = [name for name in await blobs.names("") if name not in older]
    assert len(newer) == 4
    for name in newer:
        whole = await blobs.get(name)
        assert whole is not None
        for at in range(len(whole)):
            changed = bytearray(whole)
            changed[at] ^= 1 << at % 8
            await blobs.put(name, bytes(changed))
            with pytest.raises((UnreadableSnapshot, LogRefused)):
                await store.at(2)
            assert same(await store.newest(everything), snapshot(1))
        for damaged in (whole[:-1], whole + b"\0", b"", b"HWSNAP01", b"garbage"):
            await blobs.put(name, damaged)
            assert same(await store.newest(everything), snapshot(1))
        await blobs.delete(name)
        assert same(await store.newest(everything), snapshot(1))
        await blobs.put(name, whole)
    assert same(await store.newest(everything), snapshot(2))


async def test_damage_is_told_with_the_object_and_the_mend() -> None:
    """An operator reads which object it is and what to do."""
    blobs = MemoryBlobs()
    store = small_store(blobs)
    await store.save(snapshot())
    name = (await blobs.names(snapshot_chunk_prefix("p")))[1]
    await blobs.put(name, b"x")
    with pytest.raises(LogRefused, match=rf"{name}.*delete it"):
        await store.at(5)
    await blobs.delete(name)
    with pytest.raises(UnreadableSnapshot, match=rf"{name} is missing.*next snapshot replaces it"):
        await store.at(5)


@given(st.binary(max_size=60))
def test_foreign_bytes_are_no_manifest(data: bytes) -> None:
    """Whatever is none raises UnreadableSnapshot with a reason."""
    for foreign in (data, b"HWSNAP02" + data):
        with pytest.raises(UnreadableSnapshot) as caught:
            decode_manifest(foreign)
        assert str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("position", None),
        ("position", 6),
        ("facts", 3),
        ("arrays", 3),
        ("arrays", [{"name": "a"}]),
        ("dtype", "O"),
        ("dtype", "|V0"),
        ("dtype", "nonsense"),
        ("shape", [25]),
        ("shape", [-24]),
        ("shape", [-6, -4]),
        ("shape", [2**62, 2**62]),
        ("chunks", []),
    ],
)
async def test_a_manifest_that_says_nonsense_is_refused(field: str, value: Any) -> None:
    """With a right digest: written by a release with a fault, or by somebody else."""
    blobs = MemoryBlobs()
    store = small_store(blobs)
    told = msgspec.to_builtins(await store.save(snapshot()))
    if field in told:
        told[field] = value
    else:
        told["arrays"][0][field] = value
    nonsense = msgspec.msgpack.encode(told)
    head = encode_manifest(Manifest(0, {}, ()))[:8]
    await blobs.put(snapshot_name("p", 5), head + sha256_of(nonsense) + nonsense)
    with pytest.raises(UnreadableSnapshot):
        await store.at(5)
    assert await store.newest(everything) is None


def sha256_of(body: bytes) -> bytes:
    """The check that stands in front of a manifest's body."""
    return hashlib.sha256(body).digest()


async def test_the_store_keeps_the_newest_and_finds_them() -> None:
    """Older ones are deleted with their chunks; `newest` brings the last that is accepted."""
    blobs = MemoryBlobs()
    store = small_store(blobs)
    for position in (5, 9, 100, 20):
        await store.save(snapshot(position))
    assert await store.positions() == [20, 100]
    assert len(await blobs.names("")) == KEEP * 4
    assert same(await store.newest(everything), snapshot(100))
    assert same(await store.newest(lambda position: position < 100), snapshot(20))
    assert await store.newest(lambda position: position < 20) is None


async def test_pools_do_not_touch_each_others_snapshots() -> None:
    """Keeping the newest of one pool deletes nothing of another, nor a bookmark of the same name."""
    blobs = MemoryBlobs()
    for pool in ("p", "p2"):
        store = small_store(blobs, pool)
        await store.save(snapshot(1))
        await store.bookmarks.put("b", 1)
        for position in (2, 3, 4):
            await store.save(snapshot(position))
    await small_store(blobs, "p2").bookmarks.drop("b")
    await small_store(blobs, "p2").save(snapshot(5))
    assert await small_store(blobs, "p").positions() == [1, 3, 4]
    assert await small_store(blobs, "p2").positions() == [4, 5]
    assert same(await small_store(blobs, "p").at(1), snapshot(1))
    assert await small_store(blobs, "other").newest(everything) is None


async def test_a_bookmarked_snapshot_is_kept_until_its_last_name_is_dropped() -> None:
    """It does not count among the newest, and goes with the next save once nobody names it."""
    blobs = MemoryBlobs()
    store = small_store(blobs)
    await store.save(snapshot(1))
    await store.bookmarks.put("incident", 1)
    await store.bookmarks.put("again", 1)
    for position in (2, 3, 4):
        await store.save(snapshot(position))
    assert await store.positions() == [1, 3, 4]
    assert same(await store.at(1), snapshot(1))
    assert await store.bookmarks.drop("again")
    assert not await store.bookmarks.drop("again")
    await store.save(snapshot(5))
    assert await store.positions() == [1, 4, 5]
    await store.bookmarks.drop("incident")
    await store.save(snapshot(6))
    assert await store.positions() == [5, 6]
    assert len(await blobs.names("")) == KEEP * 4


async def test_nothing_is_deleted_while_a_bookmark_cannot_be_read() -> None:
    """What it names might be what would go."""
    blobs = MemoryBlobs()
    store = small_store(blobs)
    await store.bookmarks.put("b", 1)
    await blobs.put("snapshot-bookmark/p/b", b"torn")
    for position in (1, 2, 3):
        await store.save(snapshot(position))
    assert await store.positions() == [1, 2, 3]
    with pytest.raises(LogRefused, match="snapshot-bookmark/p/b is not a bookmark"):
        await store.bookmarks.all()


async def test_snapshots_of_a_log_that_is_gone_make_room() -> None:
    """Its positions are beyond the end of the new log, and would be the newest for ever."""
    blobs = MemoryBlobs()
    store = small_store(blobs)

    async def bounds() -> Bounds:
        return Bounds(1, 50)

    for position in (900, 1000):
        await store.save(snapshot(position))
    await store.save(snapshot(40), bounds)
    await store.save(snapshot(50), bounds)
    assert await store.positions() == [40, 50]
    assert len(await blobs.names("")) == KEEP * 4


async def test_two_routers_that_save_the_same_position_do_not_mix() -> None:
    """Each writes objects of its own; the later manifest counts, and what the other wrote goes in time."""
    blobs = MemoryBlobs()
    one, two = small_store(blobs), small_store(blobs)
    await one.save(snapshot(5))
    await two.save(snapshot(5, other=True))
    assert same(await one.newest(everything), snapshot(5, other=True))
    for position in (6, 7):
        await one.save(snapshot(position))
    assert len(await blobs.names("")) == KEEP * 4


async def test_a_listing_names_what_is_there_and_what_is_broken() -> None:
    """With sizes and facts, without reading the bulk."""
    blobs = MemoryBlobs()
    store = small_store(blobs)
    await store.save(snapshot(1))
    await store.save(snapshot(2))
    await blobs.put(snapshot_name("p", 1), b"broken")
    await blobs.put(snapshot_name("p", 1) + "x", b"foreign")
    broken, sound = await store.listing()
    assert (broken.position, broken.manifest) == (1, None)
    assert "snapshot" in broken.problem
    assert sound.manifest is not None
    assert (sound.position, sound.manifest.digest, sound.manifest.made_ns) == (2, "digest 2", 7)
    assert 192 < sound.size < 1000


class FailingBlobs(MemoryBlobs):
    """The object store refuses objects whose name ends so."""

    error: Exception = LogRefused("its digest is wrong")
    broken: str = "none"

    async def get(self, name: str) -> bytes | None:
        """See `Blobs.get`."""
        if name.endswith(self.broken):
            raise self.error
        return await super().get(name)


async def test_an_object_that_cannot_be_read_is_passed_over() -> None:
    """A wrong digest, told by the object store, is damage as well; without any readable one: None."""
    blobs = FailingBlobs()
    store = small_store(blobs)
    await store.save(snapshot(1))
    await store.save(snapshot(2))
    blobs.broken = "2"
    assert same(await store.newest(everything), snapshot(1))
    blobs.broken, blobs.error = "", LogUnavailable("no answer")
    assert await store.newest(everything) is None


class PruningBlobs(MemoryBlobs):
    """Meanwhile another router saves so often that what is being read is dropped."""

    meanwhile: bool = False

    async def read_into(self, name: str, into: memoryview, digest: str) -> bool:
        """See `Blobs.read_into`."""
        if self.meanwhile:
            self.meanwhile = False
            for position in (8, 9):
                await small_store(self).save(snapshot(position))
        return await super().read_into(name, into, digest)


async def test_a_snapshot_dropped_while_it_is_read_is_no_loss() -> None:
    """The newer ones are found."""
    blobs = PruningBlobs()
    store = small_store(blobs)
    await store.save(snapshot(1))
    blobs.meanwhile = True
    assert same(await store.newest(everything), snapshot(9))


class OvertakingBlobs(MemoryBlobs):
    """Just before the manifest at 9 is written, other routers save 7 and 8; `bounds` are the log's for them."""

    bounds: Callable[[], Awaitable[Bounds]] | None = None

    async def put(self, name: str, data: bytes | memoryview) -> str:
        """See `Blobs.put`."""
        if name == snapshot_name("p", 9):
            for position in (7, 8):
                await small_store(self).save(snapshot(position), self.bounds)
        return await super().put(name, data)


@pytest.mark.parametrize("asked", [False, True], ids=["log not asked", "log asked"])
async def test_chunks_that_somebody_is_writing_are_left_alone(asked: bool) -> None:
    """Without a manifest yet, but newer than what is kept: no remains of a save that was cut off."""

    async def bounds() -> Bounds:
        return Bounds(1, 9)

    blobs = OvertakingBlobs()
    blobs.bounds = bounds if asked else None
    await small_store(blobs).save(snapshot(9))
    assert same(await small_store(blobs).newest(everything), snapshot(9))
    assert len(await blobs.names("")) == KEEP * 4


async def test_a_ladder_of_older_snapshots_stays_within_its_bytes() -> None:
    """And goes with the part of the log that it needs."""
    blobs = MemoryBlobs()
    size = len(await _saved_alone(10))
    store = SnapshotStore(blobs, "p", chunk_bytes=100, ladder_bytes=6 * size)
    first = 1

    async def bounds() -> Bounds:
        return Bounds(first, 10_000)

    for position in range(10, 210, 10):
        await store.save(snapshot(position), bounds)
    kept = await store.positions()
    assert 3 < len(kept) <= 6
    assert kept[0] == 10
    assert kept[-KEEP:] == [190, 200]
    first = 150
    await store.save(snapshot(210), bounds)
    assert all(position >= 149 for position in await store.positions())


async def _saved_alone(position: int) -> bytes:
    """All bytes that a snapshot takes."""
    blobs = MemoryBlobs()
    await SnapshotStore(blobs, "p", chunk_bytes=100).save(snapshot(position))
    return b"".join([await blobs.get(name) or b"" for name in await blobs.names("")])


@given(st.lists(st.integers(1, 50), min_size=3, max_size=300), st.integers(100, 2_000))
def test_what_is_thinned_out_fits_and_is_denser_near_the_end(gaps: list[int], budget: int) -> None:
    """The first and the newest stay; one after the other or at once, no gap is much longer than its distance from the end asks for."""
    sizes: dict[int, int] = {}
    position = 0
    kept: list[int] = []
    for gap in gaps:
        position += gap
        sizes = {at: sizes.get(at, 10) for at in [*kept, position]}
        kept = thin_out(sizes, budget)
        assert kept == sorted(kept)
        assert position in kept
        assert len(kept) <= LADDER_MAX
        assert len(kept) <= max(KEEP + 1, budget // 10)
    assert kept[0] == gaps[0]
    rungs = budget // 10
    span = kept[-1] - kept[0]
    for early, late in pairwise(kept):
        # A geometric ladder of so many rungs has gaps of at most this share of a rung's age; the newest are not thinned.
        assert late - early <= max(3 * 50, 12 * span / rungs)
