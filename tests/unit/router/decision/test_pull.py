"""Pulling a prefix from the worker that holds it: when it is chosen, what the decision says, and how its time is learned."""

import msgspec
import numpy as np
import pytest

from headwater.ops.operator.explain import describe
from headwater.router.decision.decide import (
    DecisionContext,
    Evaluation,
    decide,
    evaluate,
    prompt_of,
    recompute,
)
from headwater.router.fold.state import RouterState
from headwater.schemas.events.event import Event
from headwater.schemas.events.kv import BlocksRemoved, BlocksStored
from headwater.schemas.events.load import LoadReported
from headwater.schemas.events.route import Decision, PrefixPull, Weights
from headwater.schemas.hashing import chain_plain, pack_hashes
from headwater.schemas.tables.capability import PREFIX_PULL
from tests.support.data.examples import joined, record
from tests.support.data.queries import route_query
from tests.support.worlds.clock import WALL_NS

BLOCKS = 100
SIZE = 16
PROMPT = np.array(chain_plain(list(range(BLOCKS * SIZE)), SIZE, 0), np.uint64)
TOKENS = BLOCKS * SIZE + 5
MS_PER_TOKEN = 0.1
PULLS = ("kv_events", PREFIX_PULL)


class PullFleet:
    """Workers `a` and `b`: computing a token takes 0.1 ms, and `a` holds the prompt's first 80 blocks."""

    def __init__(
        self, capabilities: tuple[str, ...] = PULLS, *, taught: bool = True, **fields: object
    ) -> None:
        self.state = RouterState()
        for name, epoch in (("a", 3), ("b", 4)):
            event = msgspec.structs.replace(joined(name, epoch), block_size=SIZE, capabilities=capabilities)
            self.tell(name, msgspec.structs.replace(event, **(fields if name == "b" else {})), epoch)
        samples = tuple((tokens, round(tokens * MS_PER_TOKEN * 1000)) for tokens in (256, 2_048, 8_192) * 8)
        for name, epoch in (("a", 3), ("b", 4)) if taught else ():
            self.tell(name, LoadReported(0, 0, 0, 1_000, prefills=samples), epoch)
        self.tell("a", BlocksStored(0, pack_hashes(PROMPT[:80])), 3)

    def tell(self, writer: str, event: Event, epoch: int) -> None:
        """Fold an event."""
        at = self.state.position + 1
        self.state.apply(record(at, event, writer=writer, epoch=epoch, wall_ns=WALL_NS))

    def pulled(self, tokens: int, ms: float, times: int = 1) -> None:
        """`b` reports pulls."""
        samples = ((tokens, round(ms * 1000)),) * times
        self.tell("b", LoadReported(0, 0, 0, 1_000, pulls=samples), 4)

    def decide(self, **constraints: object) -> Decision:
        """Where a request with the prompt goes. `a` has 20,000 other tokens to compute."""
        state = self.state
        context = DecisionContext(1, state.position, 0, WALL_NS, Weights(memory=0), False)
        query = route_query("r-0-1", TOKENS, 10, pack_hashes(PROMPT), **constraints)
        made = decide(state.index, state.loads, state.cold, prompt_of(query), query, context)
        assert isinstance(made, Decision)
        return made

    def keep_busy(self, tokens: int = 20_000) -> None:
        """Route another prompt to `a`."""
        state = self.state
        context = DecisionContext(9, state.position, 0, WALL_NS, Weights(), False)
        query = route_query("other-0-1", tokens, 10, b"", pinned="a")
        made = decide(state.index, state.loads, state.cold, prompt_of(query), query, context)
        assert isinstance(made, Decision)
        state.loads.decide(made)


@pytest.fixture
def fleet() -> PullFleet:
    """One whose pulls take 10 ms for the 80 blocks, and whose holder of the prefix is busy."""
    made = PullFleet()
    made.pulled(80 * SIZE, 10)
    made.keep_busy()
    return made


def test_a_busy_holder_is_pulled_from(fleet: PullFleet) -> None:
    """10 ms instead of 128: the decision names the source, its epoch and the range, and 325 tokens are left to compute."""
    made = fleet.decide()
    assert made.worker == "b"
    assert made.pull == PrefixPull("a", 3, 0, 80)
    assert made.pull.blocks == 80
    assert made.chosen.pull_blocks == 80
    assert made.chosen.pull_ms == pytest.approx(10)
    assert made.chosen.prefill_ms == pytest.approx((TOKENS - 80 * SIZE) * MS_PER_TOKEN, rel=0.02)
    assert made.chosen.transfer_ms == pytest.approx(10)
    state = fleet.state
    assert recompute(state.index, state.loads, state.cold, made) == made
    assert "b pulls blocks 0 to 79 of the prompt from a.3, expected to take 10.0 ms" in describe(made, 9)
    fleet.state.loads.decide(made)
    assert fleet.state.loads.workers["b"].prefill_tokens == TOKENS - 80 * SIZE


def test_nothing_is_pulled_by_an_idle_holder_or_from_itself() -> None:
    """An idle worker with the prefix gets the request."""
    made = PullFleet().decide()
    assert (made.worker, made.pull) == ("a", None)


def test_only_what_the_target_lacks_is_pulled(fleet: PullFleet) -> None:
    """It has 30 of the 80 blocks."""
    fleet.tell("b", BlocksStored(0, pack_hashes(PROMPT[:30])), 4)
    assert fleet.decide().pull == PrefixPull("a", 3, 30, 80)


def test_the_last_block_of_a_prompt_is_computed() -> None:
    """An engine computes at least the last token."""
    made = PullFleet()
    made.tell("a", BlocksStored(0, pack_hashes(PROMPT), 0), 3)
    made.keep_busy()
    context = DecisionContext(1, 0, 0, WALL_NS, Weights(), False)
    query = route_query("r-0-1", BLOCKS * SIZE, 10, pack_hashes(PROMPT))
    state = made.state
    found = decide(state.index, state.loads, state.cold, prompt_of(query), query, context)
    assert isinstance(found, Decision)
    assert found.pull == PrefixPull("a", 3, 0, BLOCKS - 1)


def test_a_pull_that_takes_longer_than_computing_is_not_made(fleet: PullFleet) -> None:
    """Its time is learned from what workers report: 300 ms for the blocks, computed in 128."""
    fleet.pulled(80 * SIZE, 300, times=40)
    made = fleet.decide()
    assert made.pull is None
    assert not made.chosen.pull_blocks


def test_a_pull_during_the_queue_costs_nothing(fleet: PullFleet) -> None:
    """The request waits for its blocks while the worker computes other prompts."""
    state = fleet.state
    context = DecisionContext(2, state.position, 0, WALL_NS, Weights(), False)
    query = route_query("more-0-1", 3_000, 10, b"", pinned="b")
    more = decide(state.index, state.loads, state.cold, prompt_of(query), query, context)
    assert isinstance(more, Decision)
    state.loads.decide(more)
    made = fleet.decide()
    assert made.worker == "b"
    assert made.chosen.transfer_ms == 0
    assert made.chosen.pull_ms == pytest.approx(10)


def test_the_first_pulls_are_made_to_be_measured() -> None:
    """Nothing was measured: they are expected to take a quarter of the time to compute the blocks."""
    made = PullFleet()
    made.keep_busy()
    assert made.decide().chosen.pull_ms == pytest.approx(0.25 * 80 * SIZE * MS_PER_TOKEN, rel=0.02)


@pytest.mark.parametrize(
    "made",
    [
        PullFleet(capabilities=("kv_events",)),
        PullFleet(engine="vllm"),
        PullFleet(block_size=32),
        PullFleet(capabilities=()),
    ],
    ids=["cannot", "another engine", "other blocks", "says nothing"],
)
def test_workers_that_cannot_pull_from_each_other_compute(made: PullFleet) -> None:
    """Both need the capability, the engine and the size of blocks."""
    made.tell("b", LoadReported(0, 0, 0, 1_000, prefills=((256, 25_600), (4_096, 409_600)) * 10), 4)
    made.keep_busy()
    assert made.decide(exclude=()).pull is None


def test_before_times_are_known_a_prefix_is_pulled_too() -> None:
    """In units of blocks, a pulled one costs a quarter of a computed one: so a fleet that starts under load does not compute prefixes again."""
    made = PullFleet(taught=False)
    made.keep_busy()
    found = made.decide()
    assert (found.worker, found.pull) == ("b", PrefixPull("a", 3, 0, 80))
    assert found.chosen.score == pytest.approx(
        (TOKENS / SIZE - 80) + 0.25 * 80 + found.chosen.decode_blocks + 101
    )
    assert (found.chosen.prefill_ms, found.chosen.pull_ms) == (0.0, 0.0)


def test_before_times_are_known_nothing_is_pulled_from_another_engine() -> None:
    """Engines whose step times are all unknown are still different engines."""
    made = PullFleet(taught=False, engine="other")
    made.keep_busy()
    assert made.decide().pull is None


def test_blocks_that_the_source_has_lost_are_not_pulled(fleet: PullFleet) -> None:
    """The index has what the log says, so the range ends where the source's prefix does."""
    fleet.tell("a", BlocksRemoved(pack_hashes(PROMPT[50:51])), 3)
    assert fleet.decide().pull == PrefixPull("a", 3, 0, 50)


def test_a_worker_that_is_left_out_is_no_source(fleet: PullFleet) -> None:
    """The request may have failed there."""
    assert fleet.decide(exclude=("a.3",)).pull is None


def test_of_equal_holders_the_first_by_name_is_the_source(fleet: PullFleet) -> None:
    """Every router names the same one."""
    event = msgspec.structs.replace(joined("c", 9), block_size=SIZE, capabilities=PULLS)
    fleet.tell("c", event, 9)
    fleet.tell("c", BlocksStored(0, pack_hashes(PROMPT[:80])), 9)
    made = fleet.decide(exclude=("c.9",))
    assert made.pull == PrefixPull("a", 3, 0, 80)
    fleet.tell("c", BlocksStored(0, pack_hashes(PROMPT[:80])), 9)
    state = fleet.state
    context = DecisionContext(3, state.position, 0, WALL_NS, Weights(memory=0), False)
    query = route_query("r-0-2", TOKENS, 10, pack_hashes(PROMPT))
    both = evaluate(state.index, state.loads, state.cold, prompt_of(query), query, context)
    assert isinstance(both, Evaluation)
    [target] = [one for one in both.candidates if one.worker == "b"]
    pull = both.candidates.pull_of(target)
    assert pull == PrefixPull("a", 3, 0, 80)


def test_times_of_pulls_grow_with_their_length(fleet: PullFleet) -> None:
    """Between two lengths that were measured linearly, and in proportion beyond a single one."""
    fleet.tell("b", BlocksStored(0, pack_hashes(PROMPT[:40])), 4)
    assert fleet.decide().chosen.pull_ms == pytest.approx(10)
    fleet.pulled(20 * SIZE, 4)
    assert fleet.decide().chosen.pull_ms == pytest.approx(6)
