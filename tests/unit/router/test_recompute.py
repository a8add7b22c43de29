"""Recomputing: a decision's record and the state it was made on give the very same decision, bit for bit."""

import contextlib
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.router.decide import CannotRecompute, recompute
from headwater.router.state import RouterState
from headwater.schemas.encoding import decode_batch, encode_batch
from headwater.schemas.events import BlocksCleared, BlocksRemoved, BlocksStored, LoadReported
from headwater.schemas.hashing import pack_hashes
from headwater.schemas.routing import Decision, RouteQuery, RouteRefused
from tests.support.data.examples import batch, joined, packed, record
from tests.support.data.queries import route_query
from tests.support.data.story import ROOTS, decided, fold, prompt, query, story


def again(state: RouterState, decision: Decision) -> Decision | RouteRefused:
    """Decide from the record."""
    return recompute(state.index, state.loads, state.cold, decision)


def two_workers() -> RouterState:
    """w1 has three blocks of a prompt, w2 two."""
    return fold(
        [
            record(1, joined("w1"), writer="w1"),
            record(2, joined("w2"), writer="w2"),
            record(3, BlocksStored(0, packed(1, 2, 3)), writer="w1"),
            record(4, BlocksStored(0, packed(1, 2)), writer="w2"),
        ]
    )


def made_on(state: RouterState, *names: int) -> Decision:
    """A decision for a prompt of these blocks."""
    decision = decided(state, RouteQuery("q-0-1", len(names) * 16 + 3, 5, packed(*names)), 1, 0)
    assert decision is not None
    return decision


@given(st.integers(0, 10_000), st.integers(1, 120), st.randoms(use_true_random=False))
def test_a_decision_can_be_made_again_bit_for_bit(number: int, records: int, draw: random.Random) -> None:
    """On the same state, from what the log keeps of it, for any fleet and any query."""
    state = fold(story(number, records))
    decision = decided(state, query(draw, f"req-{number}"), 1, 123)
    if decision is None:
        return
    [stored] = decode_batch(encode_batch(batch(decision))).events
    assert isinstance(stored, Decision)
    made = again(state, stored)
    assert made == decision
    assert msgspec.msgpack.encode(made) == msgspec.msgpack.encode(decision)


@given(st.integers(0, 10_000), st.integers(0, 39), st.integers(0, 12), st.integers(0, 3))
def test_it_holds_for_every_depth_of_a_hit_and_every_root(
    number: int, which: int, depth: int, tier: int
) -> None:
    """Nothing cached, a part, the whole prompt; plain, salted and adapted; whole blocks or not."""
    state = fold(story(number, 30))
    names = prompt(which)
    depth = min(depth, len(names))
    if "w1" not in state.loads.workers:
        state.apply(record(31, joined("w1", 900), writer="w1", epoch=900))
    if depth:
        state.index.store("w1", tier, ROOTS[which % len(ROOTS)], names[:depth])
    for tokens in (len(names) * 16, len(names) * 16 + 1):
        decision = decided(state, RouteQuery("q", tokens, 9, pack_hashes(names)), 1, 0)
        if decision is not None:
            assert again(state, decision) == decision


def test_a_fully_cached_prompt_with_a_salt_can_be_decided_again() -> None:
    """The path of a salted prompt ends at a root that is no block, and it may be as long as the prompt."""
    state = two_workers()
    root = 0x7701B2B8DB1E9E50
    state.apply(record(5, BlocksStored(root, packed(21, 22, 23)), writer="w1"))
    decision = made_on(state, 21, 22, 23)
    assert (decision.deepest, decision.blocks, decision.following) == (23, 3, 0)
    assert again(state, decision) == decision


def test_a_decision_keeps_its_prompt_as_four_numbers() -> None:
    """Count of blocks, the deepest that anyone has, the one after it, the last."""
    decision = made_on(two_workers(), 1, 2, 3, 4, 5)
    assert (decision.blocks, decision.deepest, decision.following, decision.last) == (5, 3, 4, 5)
    unknown = made_on(two_workers(), 7, 8)
    assert (unknown.blocks, unknown.deepest, unknown.following, unknown.last) == (2, 0, 7, 8)
    short = made_on(two_workers())
    assert (short.blocks, short.deepest, short.following, short.last) == (0, 0, 0, 0)


@pytest.mark.parametrize(
    ("event", "writer"),
    [
        (BlocksRemoved(packed(3)), "w1"),
        (BlocksStored(2, packed(3)), "w2"),
        (BlocksCleared(), "w2"),
        (LoadReported(0, 0, 0, 10, (), (), ("busy",)), "w1"),
        (joined("w3"), "w3"),
    ],
    ids=["block gone", "block more", "cache gone", "request ended", "worker more"],
)
def test_another_state_gives_another_decision(event: object, writer: str) -> None:
    """What changed what a decision depends on is seen: it differs, or cannot be made again."""
    state = two_workers()
    busy = decided(state, route_query("busy", 320, 5, b"", pinned="w1"), 1, 0)
    assert busy is not None
    state.loads.decide(busy)
    decision = made_on(state, 1, 2, 3, 4, 5)
    assert again(state, decision) == decision
    state.apply(record(5, event, writer=writer))  # type: ignore[arg-type]
    with contextlib.suppress(CannotRecompute):
        assert again(state, decision) != decision


def test_a_state_that_knows_more_of_the_prompt_gives_another_decision() -> None:
    """If the block after the deepest is there now, the record alone shows that the states differ."""
    state = two_workers()
    decision = made_on(state, 1, 2, 3, 4, 5)
    state.apply(record(5, BlocksStored(3, packed(4)), writer="w1"))
    assert again(state, decision) != decision


def test_a_lost_path_is_told_as_such() -> None:
    """Where nobody has the matched block any more, nothing is made up."""
    state = two_workers()
    decision = made_on(state, 1, 2, 3, 4)
    for writer in ("w1", "w2"):
        state.apply(record(5, BlocksCleared(), writer=writer))
    with pytest.raises(CannotRecompute, match="0000000000000003"):
        again(state, decision)


@given(st.integers(0, 10_000), st.integers(0, 40), st.integers(0, 40), st.randoms(use_true_random=False))
def test_on_a_foreign_state_it_differs_or_says_why_it_cannot(
    number: int, records: int, other: int, draw: random.Random
) -> None:
    """Any decision against any other state: equal, different, or CannotRecompute; never another error."""
    decision = decided(fold(story(number, records)), query(draw, "q"), 1, 0)
    if decision is None:
        return
    foreign = fold(story(number + 1 + other, other))
    for loads_of in (foreign, fold(story(number, records))):
        try:
            made = recompute(foreign.index, loads_of.loads, foreign.cold, decision)
        except CannotRecompute:
            continue
        assert isinstance(made, Decision | RouteRefused)
