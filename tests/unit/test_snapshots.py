"""Snapshots as bytes and in the object store: what comes back, what is refused, what is kept."""

import contextlib
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from headwater.events.errors import LogRefused, LogUnavailable
from headwater.events.memory import MemoryBlobs
from headwater.events.snapshots import KEEP, Snapshot, SnapshotStore, UnreadableSnapshot, decode, encode
from headwater.schemas.subjects import snapshot_name
from tests.unit.examples import texts

facts = st.dictionaries(
    texts, st.integers(0, 2**63) | texts | st.booleans() | st.lists(st.integers(0, 9), max_size=4), max_size=5
)
arrays = st.dictionaries(
    texts,
    npst.arrays(
        st.sampled_from([np.uint64, np.uint32, np.int64, np.float64]),
        npst.array_shapes(max_dims=3, max_side=5, min_side=0),
    ),
    max_size=3,
)


def snapshot(position: int = 5, **kept: Any) -> Snapshot:
    """A small snapshot that says its position."""
    table = np.arange(24, dtype=np.uint64).reshape(6, 4) + np.uint64(position)
    return Snapshot(position, {"rows": 6, **kept}, {"table": table})


def everything(_: int) -> bool:
    """Any position will do."""
    return True


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 2**62), facts, arrays)
def test_a_snapshot_comes_back_as_it_was(
    position: int, kept: dict[str, Any], bulk: dict[str, np.ndarray[Any, np.dtype[Any]]]
) -> None:
    """Position, facts, and arrays with their names, types, shapes and every bit."""
    read = decode(encode(Snapshot(position, kept, bulk)))
    assert (read.position, read.facts, list(read.arrays)) == (position, kept, list(bulk))
    for name, array in bulk.items():
        assert (read.arrays[name].dtype, read.arrays[name].shape) == (array.dtype, array.shape)
        assert read.arrays[name].tobytes() == array.tobytes()


def test_a_read_array_can_be_written_to_and_shares_nothing() -> None:
    """The fold goes on in it; the bytes it came from stay as they are."""
    data = encode(snapshot())
    read = decode(data)
    read.arrays["table"][:] = 0
    assert decode(data).arrays["table"].any()


def test_an_array_that_is_no_block_of_memory_is_kept_in_order() -> None:
    """Slices and transposed views are written as what they show."""
    view = np.arange(24, dtype=np.uint64).reshape(6, 4).T[:, ::2]
    assert decode(encode(Snapshot(1, {}, {"a": view}))).arrays["a"].tolist() == view.tolist()


@settings(deadline=None, max_examples=100)
@given(st.binary(max_size=60))
def test_foreign_bytes_are_refused(data: bytes) -> None:
    """Whatever is no snapshot raises UnreadableSnapshot with a reason."""
    for foreign in (data, b"HWSNAP01" + data):
        with pytest.raises(UnreadableSnapshot) as caught:
            decode(foreign)
        assert str(caught.value)


def test_every_cut_is_noticed() -> None:
    """A snapshot that was cut off anywhere is refused."""
    data = encode(snapshot())
    for length in range(len(data)):
        with pytest.raises(UnreadableSnapshot):
            decode(data[:length])


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_a_damaged_header_is_read_or_refused_and_nothing_else(data: st.DataObject) -> None:
    """Changed bytes never raise anything but UnreadableSnapshot: the store knows no other error."""
    written = bytearray(encode(snapshot(5, name="x")))
    end = 16 + int.from_bytes(written[8:16], "little")
    for _ in range(data.draw(st.integers(1, 4))):
        written[data.draw(st.integers(0, end - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(UnreadableSnapshot):
        decode(bytes(written))


def with_header(**change: Any) -> bytes:
    """A snapshot of one array with one number, 7, with another header."""
    header = {"format": 1, "position": 5, "facts": {}, "arrays": [["table", "<u8", [1], 8]], **change}
    head = msgspec.msgpack.encode(header)
    return b"HWSNAP01" + len(head).to_bytes(8, "little") + head + b"\x07" + bytes(7)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("format", 2),
        ("position", None),
        ("position", "five"),
        ("position", float("inf")),
        ("facts", 3),
        ("arrays", 3),
        ("arrays", [["table", "<u8"]]),
        ("arrays", [["table", "O", [1], 8]]),
        ("arrays", [["table", "|V0", [1], 8]]),
        ("arrays", [["table", "<u8", [2], 8]]),
        ("arrays", [["table", "<u8", [1], 16]]),
    ],
)
def test_a_header_that_says_nonsense_is_refused(field: str, value: Any) -> None:
    """Another format, wrong types and impossible sizes in a well-formed header are damage too."""
    assert decode(with_header()).arrays["table"].tolist() == [7]
    with pytest.raises(UnreadableSnapshot):
        decode(with_header(**{field: value}))


async def test_the_store_keeps_the_newest_and_finds_them() -> None:
    """Older ones are deleted once a newer one is there; `newest` brings the last that is accepted."""
    blobs = MemoryBlobs()
    store = SnapshotStore(blobs, "p")
    for position in (5, 9, 100, 20):
        await store.save(snapshot(position))
    assert await blobs.names("") == [snapshot_name("p", position) for position in (20, 100)]
    assert KEEP == 2
    newest = await store.newest(everything)
    assert newest is not None
    assert newest.position == 100
    assert newest.arrays["table"].tolist() == snapshot(100).arrays["table"].tolist()
    older = await store.newest(lambda position: position < 100)
    assert older is not None
    assert older.position == 20
    assert await store.newest(lambda position: position < 20) is None


async def test_pools_do_not_touch_each_others_snapshots() -> None:
    """Keeping the newest of one pool deletes nothing of another."""
    blobs = MemoryBlobs()
    for pool in ("p", "p2"):
        for position in (1, 2, 3):
            await SnapshotStore(blobs, pool).save(snapshot(position))
    assert len(await blobs.names("snapshot/p/")) == len(await blobs.names("snapshot/p2/")) == KEEP
    assert await SnapshotStore(blobs, "other").newest(everything) is None


@pytest.mark.parametrize("damage", [b"", b"HWSNAP01", b"garbage", None])
async def test_a_damaged_newest_snapshot_is_passed_over(damage: bytes | None) -> None:
    """The next older one is taken; the router starts later, not never."""
    blobs = MemoryBlobs()
    store = SnapshotStore(blobs, "p")
    await store.save(snapshot(1))
    await store.save(snapshot(2))
    whole = await blobs.get(snapshot_name("p", 2))
    assert whole is not None
    await blobs.put(snapshot_name("p", 2), whole[:-1] if damage is None else damage)
    found = await store.newest(everything)
    assert found is not None
    assert found.position == 1


class FailingBlobs(MemoryBlobs):
    """The object store refuses one object, or is not there at all."""

    error: Exception = LogRefused("its digest is wrong")
    broken: str = ""

    async def get(self, name: str) -> bytes | None:
        """See `Blobs.get`."""
        if name.endswith(self.broken):
            raise self.error
        return await super().get(name)


async def test_an_object_that_fails_its_check_is_passed_over() -> None:
    """A wrong digest, told by the object store, is damage as well; without any readable one: None."""
    blobs = FailingBlobs()
    store = SnapshotStore(blobs, "p")
    await store.save(snapshot(1))
    await store.save(snapshot(2))
    blobs.broken = "2"
    found = await store.newest(everything)
    assert found is not None
    assert found.position == 1
    blobs.broken, blobs.error = "", LogUnavailable("no answer")
    assert await store.newest(everything) is None
