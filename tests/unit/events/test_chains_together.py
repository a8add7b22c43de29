"""Stored blocks that follow each other in a message are folded in one call: the state may not show it."""

from hypothesis import given
from hypothesis import strategies as st

from headwater.router.state import RouterState, StoredChains, merge_stored
from headwater.schemas.events import BlocksCleared, BlocksRemoved, BlocksStored, Event
from tests.support.data.examples import joined, packed, record

blocks = st.lists(st.integers(1, 12), max_size=5).map(lambda names: packed(*names))
stored = st.builds(BlocksStored, st.integers(0, 12), blocks, st.integers(0, 2))
events = st.lists(
    stored | stored | stored | st.builds(BlocksRemoved, blocks, st.integers(0, 2)) | st.just(BlocksCleared())
)


def content(state: RouterState) -> tuple[object, ...]:
    """Everything the index holds."""
    index = state.index
    return index.digest(), index.rows, index.blocks, index.copies


@given(events)
def test_one_message_of_many_events_is_many_messages_of_one(given_events: list[Event]) -> None:
    """Chains, their parents, repeated blocks and tiers come out the same."""
    at_once, one_by_one = RouterState(), RouterState()
    for state in (at_once, one_by_one):
        state.apply(record(1, joined("w1")))
    at_once.apply(record(2, *given_events))
    for event in given_events:
        one_by_one.apply(record(2, event))
    assert content(at_once) == content(one_by_one)


def test_only_neighbours_of_one_tier_are_merged() -> None:
    """Order between stores and removals stays, and so do tiers."""
    first, second, third = (
        BlocksStored(0, packed(1)),
        BlocksStored(1, packed(2)),
        BlocksStored(0, packed(3), 1),
    )
    gone = BlocksRemoved(packed(1))
    run, alone, removed, last = merge_stored((first, second, third, gone, first))
    assert isinstance(run, StoredChains)
    assert (run.tier, run.parents.tolist(), run.lengths.tolist(), run.hashes.tolist()) == (
        0,
        [0, 1],
        [1, 1],
        [1, 2],
    )
    assert (alone, removed, last) == (third, gone, first)
