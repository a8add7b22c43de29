"""Blocks that count before they are announced: which are named, for how long they count, and on engines that never tell."""

import random
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.router.state import RouterState
from headwater.router.worker import (
    AGE_NS_MAX,
    SAMPLE_MAX,
    Credit,
    ExpectedBlocks,
    RoutedPrompt,
    sample_positions,
)
from headwater.schemas.events import KvGap, LoadReported, WorkerJoined, WorkerLeft
from headwater.schemas.routing import Decision, DecisionVoided
from tests.support.data.examples import joined, packed, record
from tests.support.data.queries import route_query
from tests.support.data.story import fleet_of, fold, reply_on, tell

PROMPT = tuple(range(1, 41))


@given(st.integers(0, 9_000), st.integers(0, 9_000))
def test_named_places_are_few_and_on_one_grid(first: int, blocks: int) -> None:
    """First and last always; a longer rest is named on a coarser grid that the finer one holds."""
    named = sample_positions(first, blocks)
    if first >= blocks:
        assert named == []
        return
    assert named == sorted(set(named))
    assert (named[0], named[-1]) == (first, blocks - 1)
    assert len(named) <= 2 * SAMPLE_MAX + 3
    inner = named[1:-1]
    steps = {after - before for before, after in pairwise(inner)}
    assert len(steps) <= 1
    assert all((place + 1) % step == 0 for step in steps for place in inner)


def given_to(
    state: RouterState, request: str, names: tuple[int, ...], *, only: str = "", at_ms: int = 0
) -> Decision:
    """Decide for a prompt of these blocks, and let the state know."""
    query = route_query(request, len(names) * 16 + 1, 5, packed(*names), pinned=only)
    decision = reply_on(state, query, wall_ns=at_ms * 1_000_000)
    assert isinstance(decision, Decision)
    state.loads.decide(decision)
    return decision


def two() -> RouterState:
    """Two workers with nothing cached, whose step times are known."""
    state = fleet_of(joined("w1"), joined("w2"))
    measured = LoadReported(0, 0, 0, 1_000, prefills=((100, 20_000), (1_000, 40_000)) * 20)
    for name in ("w1", "w2"):
        tell(state, measured, writer=name)
    return state


def test_a_follow_up_goes_where_its_prompt_is_being_computed() -> None:
    """Before any block is announced, and counted as assumed; another prompt goes elsewhere."""
    state = two()
    first = given_to(state, "a-0-1", PROMPT)
    again = given_to(state, "b-0-1", (*PROMPT, 99), at_ms=10)
    assert again.worker == first.worker
    assert (again.chosen.cached_blocks, again.chosen.assumed_blocks) == (len(PROMPT), len(PROMPT))
    assert given_to(state, "c-0-1", (500, 501, 502), at_ms=10).worker != first.worker


def test_a_prompt_that_parts_on_the_way_counts_up_to_the_last_named_place_before() -> None:
    """The hash of a named block is its whole prefix: what comes behind it does not count."""
    state = two()
    given_to(state, "a-0-1", PROMPT, only="w1")
    for shared in (0, 1, 7, 33):
        names = (*PROMPT[:shared], *range(1_000 * shared + 1_000, 1_000 * shared + 1_050))
        found = given_to(state, f"b{shared}-0-1", names, only="w1").chosen.assumed_blocks
        assert found <= shared
        assert found >= shared - 2


@pytest.mark.parametrize("end", ["finished", "voided", "left", "anew"])
def test_what_is_assumed_ends_with_its_request(end: str) -> None:
    """However it ends; by then the worker has told what it holds."""
    state = two()
    decision = given_to(state, "a-0-1", PROMPT, only="w1")
    assert state.loads.credit.holders
    match end:
        case "finished":
            report = LoadReported(0, 0, 0, 9, ("a-0-1",), ("a-0-1",), ("a-0-1",))
            tell(state, report, writer="w1")
        case "voided":
            state.loads.void(DecisionVoided("a-0-1", "w1", decision.epoch))
        case "left":
            tell(state, WorkerLeft("w1", 1, "gone"), writer="w1")
        case _:
            tell(state, joined("w1", 2), writer="w1", epoch=2)
    assert state.loads.credit == Credit()


def test_a_cold_worker_is_trusted_with_what_it_was_given() -> None:
    """Its announcements have a hole, what it was given has not."""
    state = two()
    tell(state, KvGap(1), writer="w1")
    given_to(state, "a-0-1", PROMPT, only="w1")
    assert given_to(state, "b-0-1", PROMPT, at_ms=10).worker == "w1"


def silent(blocks: int = 100) -> RouterState:
    """One worker whose engine tells of no blocks."""
    event = WorkerJoined("w1", 1, "m", "old", "both", 16, blocks, 256, capabilities=("generate",))
    return fold([record(1, event, writer="w1")])


def test_engines_that_never_tell_are_believed_to_hold_what_they_were_given() -> None:
    """Beyond the request's end, as much as fits, the newest first."""
    state = silent(blocks=100)
    for number in range(3):
        names = tuple(range(1_000 * number + 1, 1_000 * number + 41))
        given_to(state, f"r{number}-0-1", names)
        done = (f"r{number}-0-1",)
        tell(state, LoadReported(0, 0, 0, 100, done, done, done), writer="w1")
    held = [
        given_to(state, f"again{first}-0-1", tuple(range(first, first + 40))).chosen.cached_blocks
        for first in (2_001, 1_001, 1)
    ]
    assert held == [40, 40, 0]


@given(st.lists(st.tuples(st.integers(0, 2 * AGE_NS_MAX), st.integers(1, 60)), max_size=12), st.randoms())
def test_expected_blocks_do_not_depend_on_the_order_in_which_prompts_came(
    prompts: list[tuple[int, int]], draw: random.Random
) -> None:
    """Routers apply their own decisions before the log brings those of others."""

    def held(order: list[int]) -> ExpectedBlocks:
        expected = ExpectedBlocks()
        for number in order:
            decided_ns, blocks = prompts[number]
            expected.add(f"r{number}", RoutedPrompt(decided_ns, blocks, b""), 100)
        return expected

    order = list(range(len(prompts)))
    first = held(order)
    draw.shuffle(order)
    again = held(order)
    assert again == first
    assert first.blocks == sum(belief.blocks for belief in first.prompts.values())


def test_what_is_assumed_is_in_snapshots() -> None:
    """A router that starts from one decides as the one that wrote it."""
    state = two()
    given_to(state, "a-0-1", PROMPT, only="w1")
    snapshot = state.snapshot()
    facts = msgspec.msgpack.decode(msgspec.msgpack.encode(snapshot.facts), strict=False)
    restored = RouterState.restore(snapshot._replace(facts=facts))
    assert restored.loads.credit == state.loads.credit
    assert given_to(restored, "b-0-1", PROMPT, at_ms=10).worker == "w1"
