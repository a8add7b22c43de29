"""Snapshots of format 1, as release 0.1 wrote them: still read, and damage still noticed where it can be."""

import contextlib
import gzip
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tests
from headwater.events.memory.stores import MemoryBlobs
from headwater.events.snapshots.format import Snapshot, UnreadableSnapshot, decode_1
from headwater.events.snapshots.store import SnapshotStore
from headwater.router.fold.state import RouterState
from headwater.schemas.subjects import snapshot_name

GOLDEN = Path(tests.__path__[0]) / "golden" / "snapshot-1.gz"
INDEX_DIGEST = 15348475761497537050
BLOCKS = {"w1": 57, "w3": 49, "w2": 6, "w4": 0}
COPIES = {
    5425185804655761426: 2,
    17671764716638906042: 2,
    6213041148998643980: 2,
    6828237645882177841: 2,
    11010776168825377584: 1,
}


def golden() -> bytes:
    """A router's state as release 0.1 wrote it."""
    return gzip.decompress(GOLDEN.read_bytes())


async def test_a_snapshot_of_release_0_1_is_read_from_the_store() -> None:
    """An upgraded router starts from what the old one left, and writes it on in today's format."""
    blobs = MemoryBlobs()
    store = SnapshotStore(blobs, "p")
    await blobs.put(snapshot_name("p", 120), golden())
    snapshot = await store.newest(lambda _: True)
    assert snapshot is not None
    state = RouterState.restore(snapshot)
    assert (state.position, state.index.rows, state.index.digest()) == (120, 88, INDEX_DIGEST)
    assert (state.index.blocks, state.index.copies) == (BLOCKS, {("w3", 0): COPIES})
    assert sorted(state.loads.workers) == ["w1", "w2", "w3", "w4"]
    (kept,) = await store.listing()
    assert kept.manifest is not None
    assert (kept.position, kept.size, kept.manifest.facts["rows"]) == (120, len(golden()), 88)
    await store.save(state.snapshot())
    again = await store.newest(lambda _: True)
    assert again is not None
    assert RouterState.restore(again).digest() == state.digest() == again.digest


def test_a_snapshot_of_packed_rows_is_read() -> None:
    """As the release behind 0.1 wrote them: rows without the empty ones between them, and where they were."""
    told = msgspec.msgpack.decode(gzip.decompress(GOLDEN.with_name("snapshot-rows.gz").read_bytes()))
    arrays: dict[str, Any] = {
        name: np.frombuffer(data, kind).reshape(shape) for name, kind, shape, data in told["arrays"]
    }
    assert sorted(arrays) == ["rows", "taken"]
    state = RouterState.restore(Snapshot(told["position"], told["facts"], arrays))
    assert (state.position, state.index.rows, state.index.digest()) == (120, 88, INDEX_DIGEST)
    assert (state.index.blocks, state.index.copies) == (BLOCKS, {("w3", 0): COPIES})


def test_what_was_read_can_be_written_to_and_shares_nothing() -> None:
    """The fold goes on in it; the bytes it came from stay as they are."""
    data = with_header()
    decode_1(data).arrays["table"][:] = 0
    assert decode_1(data).arrays["table"].any()


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
    assert decode_1(with_header()).arrays["table"].tolist() == [7]
    with pytest.raises(UnreadableSnapshot):
        decode_1(with_header(**{field: value}))


@given(st.binary(max_size=60))
def test_foreign_bytes_are_refused(data: bytes) -> None:
    """Whatever is no snapshot raises UnreadableSnapshot with a reason."""
    for foreign in (data, b"HWSNAP01" + data):
        with pytest.raises(UnreadableSnapshot) as caught:
            decode_1(foreign)
        assert str(caught.value)


def test_every_cut_is_noticed() -> None:
    """A snapshot that was cut off anywhere is refused."""
    data = with_header()
    for length in range(len(data)):
        with pytest.raises(UnreadableSnapshot):
            decode_1(data[:length])


@given(st.data())
def test_a_damaged_header_is_read_or_refused_and_nothing_else(data: st.DataObject) -> None:
    """Changed bytes never raise anything but UnreadableSnapshot: the store knows no other error."""
    written = bytearray(with_header(facts={"name": "x"}))
    end = 16 + int.from_bytes(written[8:16], "little")
    for _ in range(data.draw(st.integers(1, 4))):
        written[data.draw(st.integers(0, end - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(UnreadableSnapshot):
        decode_1(bytes(written))
