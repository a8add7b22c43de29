"""The router's fold: lives of workers, holes in announcements, snapshots, and events that fit nothing."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.events.ports import Record, Slice, Unreadable
from headwater.router.state import RouterState
from headwater.schemas.encoding import (
    DIGEST_BYTES,
    NO_DIGEST,
    SCHEMA_ID,
    SCHEMA_VERSION,
    UnreadableBatch,
    decode_batch,
    digest_of,
)
from headwater.schemas.events import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    Event,
    KvGap,
    LoadReported,
    WorkerDraining,
    WorkerLeft,
)
from headwater.schemas.routing import Candidate, Constraints, Preferences, RouteQuery, Weights
from headwater.schemas.subjects import pool_subject
from tests.support.data.examples import joined, keys, packed, record
from tests.support.data.story import decided, fold, story
from tests.support.ports.snapshots import saved_and_read
from tests.support.worlds.clock import WALL_NS

numbers = st.integers(0, 10_000)


def content(state: RouterState) -> str:
    """Digest of everything but the position."""
    position, state.position = state.position, 0
    digest = state.digest()
    state.position = position
    return digest


def cached(state: RouterState, worker: str, *names: int) -> int:
    """Blocks of a prompt that a router would count on at `worker`."""
    query = RouteQuery("q", len(names) * 16 + 1, 1, packed(*names))
    decision = decided(state, query, 1, 0)
    assert decision is not None
    return next(one.cached_blocks for one in decision.candidates if one.worker == worker)


def two_workers() -> RouterState:
    """w1 in its fifth life with three blocks and a load, w2 with nothing."""
    return fold(
        [
            record(1, joined("w1", 5), writer="w1", epoch=5),
            record(2, joined("w2", 6), writer="w2", epoch=6),
            record(3, BlocksCleared(), BlocksStored(0, packed(1, 2, 3)), writer="w1", epoch=5),
            record(4, LoadReported(1, 2, 3, 1000), writer="w1", epoch=5),
        ]
    )


@pytest.mark.parametrize(("writer", "epoch"), [("w1", 4), ("w1", 6), ("w9", 5), ("r1", 5)])
@pytest.mark.parametrize(
    "event",
    [
        BlocksStored(0, packed(1, 2, 3, 4)),
        BlocksRemoved(packed(1)),
        BlocksCleared(),
        KvGap(1),
        LoadReported(7, 7, 7, 7, ("a",), ("b",), ("c",)),
        WorkerDraining("w1", 4),
        WorkerDraining("w9", 5),
        WorkerLeft("w1", 4, "late"),
        WorkerLeft("w1", 6, "early"),
        joined("w1", 5),
        joined("w1", 4, block_size=32),
    ],
    ids=lambda event: type(event).__name__,
)
def test_what_an_unknown_life_says_changes_nothing(event: Event, writer: str, epoch: int) -> None:
    """Events of strangers and of lives that are over, or not begun, leave the state as it was."""
    state = two_workers()
    before = content(state)
    state.apply(record(5, event, writer=writer, epoch=epoch))
    ahead = (writer, epoch) == ("w1", 6) and isinstance(
        event, BlocksStored | BlocksRemoved | BlocksCleared | KvGap
    )
    # Whoever speaks of a cache under a later epoch has joined, and the log lost that.
    assert state.cold == ({"w1"} if ahead else set())
    state.cold.clear()
    assert content(state) == before
    assert state.position == 5


def test_a_new_life_begins_with_nothing() -> None:
    """Blocks, load and requests of the earlier life do not exist any more, nor does its drain."""
    state = two_workers()
    state.apply(record(5, WorkerDraining("w1", 5), KvGap(1), writer="w1", epoch=5))
    assert state.loads.workers["w1"].draining
    assert state.cold == {"w1"}
    state.apply(record(6, joined("w1", 7), writer="w1", epoch=7))
    assert cached(state, "w1", 1, 2, 3) == 0
    assert state.loads.workers["w1"].running == 0
    assert not state.loads.workers["w1"].draining
    assert state.cold == set()
    assert state.index.rows == 0
    before = content(state)
    state.apply(record(7, BlocksStored(0, packed(1)), writer="w1", epoch=5))
    assert content(state) == before, "the old life still writes"


def test_a_worker_that_left_takes_its_blocks_along() -> None:
    """Leaving twice is fine; the others stay."""
    state = two_workers()
    state.apply(record(5, KvGap(1), writer="w1", epoch=5))
    for position in (6, 7):
        state.apply(record(position, WorkerLeft("w1", 5, "gone"), writer="r1", epoch=9))
    assert list(state.loads.workers) == ["w2"]
    assert list(state.index.slots) == ["w2"]
    assert (state.index.rows, state.index.copies, state.cold) == (0, {}, set())


def test_a_slice_is_folded_in_order_and_its_unreadable_messages_make_their_writers_cold() -> None:
    """The position is that of the last message."""
    state = two_workers()
    last = state.position
    lost = Unreadable(last + 1, pool_subject("ns", "p", "kv", "w1"), "a bit is flipped")
    state.fold(
        Slice([record(last + 2, WorkerLeft("w2", 6, "gone"), writer="w2", epoch=6)], 0, unreadable=(lost,))
    )
    assert (state.position, state.cold, set(state.loads.workers)) == (last + 2, {"w1"}, {"w1"})


def test_a_hole_makes_a_worker_cold_until_it_announces_itself_anew() -> None:
    """After a gap no hit is claimed, whatever is stored meanwhile; `BlocksCleared` ends that."""
    state = two_workers()
    assert cached(state, "w1", 1, 2, 3) == 3
    state.apply(record(5, KvGap(2), BlocksStored(3, packed(4)), writer="w1", epoch=5))
    assert cached(state, "w1", 1, 2, 3, 4) == 0
    state.apply(record(6, BlocksCleared(), writer="w1", epoch=5))
    assert cached(state, "w1", 1, 2, 3, 4) == 0
    state.apply(record(7, BlocksStored(0, packed(1, 2)), writer="w1", epoch=5))
    assert cached(state, "w1", 1, 2, 3, 4) == 2


@given(numbers, st.integers(0, 80), st.integers(0, 80))
def test_a_snapshot_and_the_tail_equal_the_whole_log(number: int, before: int, after: int) -> None:
    """Restored from its bytes at any position, the fold goes on as if it had read everything."""
    log = story(number, before + after)
    whole = fold(log)
    at_snapshot = fold(log[:before])
    restored = RouterState.restore(saved_and_read(at_snapshot.snapshot()))
    assert restored.digest() == at_snapshot.digest()
    assert restored.position == before
    assert fold(log[before:], restored).digest() == whole.digest()
    assert restored.loads == whole.loads


@settings(max_examples=30)
@given(numbers, st.integers(0, 80), st.integers(1, 40))
def test_a_snapshot_stays_what_it_was_while_the_fold_goes_on(number: int, before: int, after: int) -> None:
    """It is written while the router works on; its loads may be taken ahead, as a router does."""
    log = story(number, before + after)
    state = fold(log[:before])
    digest, loads = state.digest(), msgspec.to_builtins(state.loads)
    made = decided(state, RouteQuery("late", 50, 9, packed(1, 2)), 9999, WALL_NS)
    if made is not None:
        state.loads.decide(made)
    kept = state.snapshot(loads)
    fold(log[before:], state)
    assert RouterState.restore(kept).digest() == kept.digest == digest


def test_a_snapshot_that_contradicts_itself_is_no_state() -> None:
    """Columns and counts of another index: a router then folds the log instead."""
    sound = two_workers().snapshot()
    keys_of, parents = sound.arrays["keys"], sound.arrays["parents"]
    for facts, arrays in (
        ({}, {**sound.arrays, "keys": keys_of[1:]}),
        ({}, {**sound.arrays, "keys": keys_of.astype("f8")}),
        ({}, {"keys": keys_of}),
        ({}, {"rows": keys_of, "taken": parents}),
        ({"tiers": 3, "words": 2}, sound.arrays),
        ({"rows": 1}, sound.arrays),
        ({"blocks": {"w1": 1, "w2": 1}}, sound.arrays),
        ({}, {}),
    ):
        with pytest.raises((ValueError, LookupError)):
            RouterState.restore(sound._replace(facts={**sound.facts, **facts}, arrays=arrays))


def test_a_snapshot_keeps_a_large_index() -> None:
    """More than 64 workers, four tiers, copies and a grown table come back."""
    state = RouterState()
    for number in range(70):
        state.apply(record(number + 1, joined(f"w{number}"), writer=f"w{number}"))
    for number in range(0, 70, 3):
        names = packed(*range(number * 100 + 1, number * 100 + 150))
        state.apply(record(100, BlocksStored(0, names, number % 4), writer=f"w{number}"))
        state.apply(record(101, BlocksStored(0, names, number % 4), writer=f"w{number}"))
    again = RouterState.restore(saved_and_read(state.snapshot()))
    assert again.digest() == state.digest()
    assert again.index.rows == state.index.rows > 2000
    for one in (state, again):
        one.apply(record(102, BlocksRemoved(packed(1, 2)), WorkerLeft("w69", 1, ""), joined("w70", 2)))
        one.apply(record(103, BlocksStored(0, packed(1, 2)), writer="w70", epoch=2))
    assert again.digest() == state.digest()


def test_the_digest_tells_every_part_of_the_state_apart() -> None:
    """Position, blocks, copies, coldness, load and early stages: each alone changes the number."""
    changes: list[Event] = [
        BlocksStored(3, packed(4)),
        BlocksStored(0, packed(1)),
        BlocksRemoved(packed(3)),
        KvGap(1),
        LoadReported(2, 2, 3, 1000),
        LoadReported(1, 2, 3, 1000, ("early",)),
        WorkerDraining("w1", 5),
        WorkerLeft("w2", 6, ""),
    ]
    digests = {content(two_workers())}
    for event in changes:
        state = two_workers()
        state.apply(record(5, event, writer="w1", epoch=5))
        digests.add(content(state))
    assert len(digests) == len(changes) + 1
    moved = two_workers()
    moved.position += 1
    assert moved.digest() != two_workers().digest()


def sound_bytes(*event: Any) -> bytes:
    """A log message of w1 in its fifth life with one event, given as its tag and fields."""
    envelope = [SCHEMA_VERSION, "w1", 5, 1, WALL_NS, [event], SCHEMA_ID, "", NO_DIGEST, NO_DIGEST]
    data = msgspec.msgpack.encode(envelope)
    return data[:-DIGEST_BYTES] + digest_of(data)


def decision_fields(worker: str, candidate: str) -> tuple[Any, ...]:
    """A decision for `worker` with one candidate."""
    chosen = Candidate(candidate, 5, 0, 0, 0, 0, 0, 0.0)
    standing: tuple[Any, ...] = (
        1,
        4,
        0,
        WALL_NS,
        "r",
        9,
        9,
        0,
        0,
        0,
        0,
        Constraints(),
        Preferences(),
        Weights(),
        1,
    )
    return ("route.decided", *standing, worker, 5, [chosen])


def test_the_bytes_below_are_sound_but_for_what_they_say() -> None:
    """Otherwise the next test would show nothing."""
    for event in (
        ("kv.stored", 0, packed(9), 0),
        ("kv.removed", packed(2), 0),
        ("fleet.joined", "w3", 9, "m", "sim", "both", 16, 10, 10),
        decision_fields("w1", "w1"),
    ):
        assert len(decode_batch(sound_bytes(*event)).events) == 1


@pytest.mark.parametrize(
    "event",
    [
        ("kv.stored", 0, b"torn", 0),
        ("kv.removed", b"torn", 0),
        ("kv.stored", 0, bytes(8), 0),
        ("kv.stored", 0, packed(9) + bytes(8) + packed(10), 0),
        ("kv.stored", -1, packed(9), 0),
        ("kv.stored", 0, packed(9), -1),
        ("kv.stored", 0, packed(9), 2**62),
        ("kv.removed", packed(2), -1),
        ("fleet.joined", "w3", 9, "m", "sim", "both", 0, 10, 10),
        decision_fields("w1", "w2"),
    ],
    ids=lambda event: str(event[0]),
)
def test_a_senseless_event_is_unreadable_or_changes_nothing(event: tuple[Any, ...]) -> None:
    """Folding never fails: one bad message may not stop every router of the pool, now and at each restart."""
    try:
        read = decode_batch(sound_bytes(*event))
    except UnreadableBatch:
        return
    state, untouched = two_workers(), two_workers()
    state.apply(Record(5, "hw.test", WALL_NS, read))
    # What comes after must be folded as if nothing had been: also a block whose place is the first row.
    first_row = 4096 << 20
    for one in (state, untouched):
        one.apply(record(6, BlocksStored(0, packed(first_row)), writer="w2", epoch=6))
    assert decided(state, RouteQuery("q", 33, 1, packed(1, 2)), 1, 0) is not None
    assert content(state) == content(untouched)
    found, wanted = (one.index.find(keys(first_row))[1].tolist() for one in (state, untouched))
    assert found == wanted
