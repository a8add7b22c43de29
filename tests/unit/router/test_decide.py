"""Deciding: the cached prefix, the load, the constraints of a query, and equal costs."""

import random

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.router.cost import WorkEstimate, aggregated, cost_weights
from headwater.router.decide import (
    NO_WORKER_RETRY_S,
    DecisionContext,
    decide,
    find_lowest,
    prompt_of,
    recompute,
    with_policy,
)
from headwater.router.state import RouterState
from headwater.schemas.events import BlocksStored, KvGap, LoadReported, WorkerDraining
from headwater.schemas.routing import Candidate, Decision, RouteQuery, RouteRefused, Weights
from tests.support.data.examples import joined, packed, record
from tests.support.data.queries import changed, route_query
from tests.support.data.story import fleet_of, fold, query, reply_on, story, tell

PROMPT = tuple(range(1, 11))


def fleet(*workers: str, held: dict[str, int] | None = None, tier: int = 0) -> RouterState:
    """Workers in their first life; `held` says how many of the prompt's blocks each has."""
    state = fleet_of(*map(joined, workers))
    for name, blocks in (held or {}).items():
        tell(state, BlocksStored(0, packed(*PROMPT[:blocks]), tier), writer=name)
    return state


def asked(request: str = "req-0-1", **changes: object) -> RouteQuery:
    """A prompt of ten blocks and one token more."""
    fields = {"prompt_tokens": 161, "max_tokens": 10, "hashes": packed(*PROMPT), **changes}
    return route_query(request, **fields)  # type: ignore[arg-type]


def ask(
    state: RouterState, wanted: RouteQuery | None = None, *, weights: Weights | None = None
) -> Decision | RouteRefused:
    """What a router says on this state."""
    return reply_on(state, wanted or asked(), weights=weights or Weights())


def chosen(state: RouterState, wanted: RouteQuery | None = None, **more: Weights) -> str:
    """The worker it goes to."""
    decision = ask(state, wanted, **more)
    assert isinstance(decision, Decision)
    return decision.worker


def candidate(state: RouterState, worker: str, wanted: RouteQuery | None = None) -> Candidate:
    """One worker as the decision saw it."""
    decision = ask(state, wanted)
    assert isinstance(decision, Decision)
    return next(one for one in decision.candidates if one.worker == worker)


def busy(state: RouterState, worker: str, requests: int) -> RouterState:
    """Give `worker` requests of 160 tokens each that it has not begun."""
    for number in range(requests):
        wanted = asked(f"busy{number}", hashes=packed(1000 + number), prompt_tokens=160, pinned=worker)
        decision = ask(state, wanted)
        assert isinstance(decision, Decision)
        state.loads.decide(decision)
    return state


@pytest.mark.parametrize("name", ["w1", "w2", "w3"])
def test_the_worker_that_has_most_of_the_prompt_is_chosen(name: str) -> None:
    """All else equal, what is cached need not be computed."""
    held = {"w1": 3, "w2": 3, "w3": 3} | {name: 7}
    state = fleet("w1", "w2", "w3", held=held)
    assert {chosen(state, asked(f"r{number}")) for number in range(20)} == {name}
    assert candidate(state, name).cached_blocks == 7


def test_enough_load_outweighs_a_cached_prefix() -> None:
    """One request more in front is worth the hit; five are not."""
    held = {"w1": 10}
    assert chosen(fleet("w1", "w2", held=held)) == "w1"
    assert chosen(busy(fleet("w1", "w2", held=held), "w2", 5)) == "w1"
    assert chosen(busy(fleet("w1", "w2", held=held), "w1", 5)) == "w2"


def test_the_weights_say_what_load_and_prefix_are_worth() -> None:
    """With no weight on what is to be computed, only what decodes counts, and the other way round."""
    state = busy(fleet("w1", "w2", held={"w1": 10}), "w1", 1)
    assert chosen(state, weights=Weights(prefill=0.0, decode=1.0)) == "w2"
    assert chosen(state, weights=Weights(prefill=1.0, decode=0.0)) in ("w1", "w2")
    decision = ask(state, weights=Weights(2.0, 3.0, 0.5))
    assert isinstance(decision, Decision)
    assert decision.weights == Weights(2.0, 3.0, 0.5)
    # 160 tokens queue before the one that is not cached; 10 blocks are held, and one more would be.
    assert decision.candidates[0].score == pytest.approx(2.0 * (160 + 1) / 16 + 3.0 * (10 + 1))


@given(st.integers(1, 50), st.integers(0, 49), st.integers(0, 500), st.integers(0, 90))
def test_cost_falls_with_what_is_cached_and_rises_with_load(
    blocks: int, cached: int, prefill: int, decode: int
) -> None:
    """One block more on the GPU is cheaper, one below it less so; more work before it is dearer."""
    cached = min(cached, blocks - 1)

    def cost(gpu: int, lower: int, more_prefill: int = 0, more_decode: int = 0) -> float:
        work = WorkEstimate(16, blocks * 16 + 1, gpu, lower, prefill + more_prefill, decode + more_decode, 0)
        return aggregated(cost_weights(Weights()), work)

    assert cost(cached + 1, 0) < cost(cached, 1) < cost(cached, 0)
    assert cost(cached, 0) < cost(cached, 0, more_prefill=1)
    assert cost(cached, 0) < cost(cached, 0, more_decode=1)


def test_a_lower_tier_is_better_than_nothing_and_worse_than_the_gpu() -> None:
    """Blocks below the GPU are counted apart and cost a part of computing them."""
    state = fleet("gpu", "none", held={"gpu": 6})
    state.apply(record(9, joined("cpu"), writer="cpu"))
    state.apply(record(10, BlocksStored(0, packed(*PROMPT[:6]), 1), writer="cpu"))
    scores = [candidate(state, name).score for name in ("gpu", "cpu", "none")]
    assert scores == sorted(scores)
    assert len(set(scores)) == 3
    below = candidate(state, "cpu")
    assert (below.cached_blocks, below.lower_blocks) == (0, 6)


def test_the_last_token_is_always_computed() -> None:
    """A prompt that is cached to its end still needs its last block computed: it is not counted."""
    state = fleet("w1", held={"w1": 10})
    assert candidate(state, "w1", asked(prompt_tokens=161)).cached_blocks == 10
    assert candidate(state, "w1", asked(prompt_tokens=160)).cached_blocks == 9
    only = asked(prompt_tokens=16, hashes=packed(1))
    assert candidate(state, "w1", only).cached_blocks == 0
    below = fleet("w1", held={"w1": 10}, tier=1)
    assert candidate(below, "w1", asked(prompt_tokens=160)).lower_blocks == 9


def test_a_query_without_tokens_counts_no_blocks() -> None:
    """Counts are never negative."""
    lone = candidate(fleet("w1"), "w1", asked(prompt_tokens=0, hashes=b""))
    assert (lone.cached_blocks, lone.lower_blocks, lone.score) == (0, 0, 0.0)


def test_a_pinned_query_goes_to_its_worker_or_nowhere() -> None:
    """Other choices of a request stay together, whatever it costs."""
    state = busy(fleet("w1", "w2", held={"w1": 10}), "w2", 20)
    assert chosen(state, asked(pinned="w2")) == "w2"
    refused = ask(state, asked(pinned="w9"))
    assert isinstance(refused, RouteRefused)
    assert "w9 is not in this pool" in refused.reason
    assert refused.retry_after_s > 0


def test_an_excluded_life_is_avoided_and_only_that_life() -> None:
    """`exclude` names worker and epoch: a worker that was started again may be tried."""
    state = fleet("w1", "w2", held={"w1": 10})
    assert chosen(state, asked(exclude=("w1.1",))) == "w2"
    assert chosen(state, asked(exclude=("w1.2", "w2"))) == "w1"
    refused = ask(state, asked(exclude=("w1.1", "w2.1")))
    assert isinstance(refused, RouteRefused)
    assert "none of the 2 workers" in refused.reason


def test_a_draining_worker_gets_nothing_new() -> None:
    """Not even when it is pinned or has everything cached."""
    state = fleet("w1", "w2", held={"w1": 10})
    state.apply(record(9, WorkerDraining("w1", 1)))
    assert chosen(state) == "w2"
    assert isinstance(ask(state, asked(pinned="w1")), RouteRefused)


def test_without_workers_the_refusal_says_so() -> None:
    """An empty pool is told from a busy one."""
    refused = ask(RouterState())
    assert isinstance(refused, RouteRefused)
    assert "no worker has joined" in refused.reason


def test_a_cold_worker_claims_no_hits_but_may_be_chosen() -> None:
    """A hole in its announcements costs it the benefit of its cache, not its work."""
    state = fleet("w1", held={"w1": 10})
    state.apply(record(9, KvGap(1), LoadReported(0, 0, 0, 1000)))
    cold = candidate(state, "w1")
    assert (cold.cached_blocks, cold.lower_blocks, chosen(state)) == (0, 0, "w1")


def test_equal_costs_are_drawn_by_the_requests_id() -> None:
    """The same request always goes to the same worker; many requests go to all of them, about evenly."""
    names = tuple(f"w{number}" for number in range(4))
    state = fleet(*names)
    draws = [chosen(state, asked(f"r{number}")) for number in range(400)]
    assert draws == [chosen(fleet(*reversed(names)), asked(f"r{number}")) for number in range(400)]
    assert all(60 < draws.count(name) < 140 for name in names)


@given(st.integers(0, 10_000), st.integers(0, 60), st.randoms(use_true_random=False))
def test_the_chosen_worker_has_the_least_score_of_all_candidates(
    number: int, records: int, draw: random.Random
) -> None:
    """Every eligible worker is a candidate, its score follows from its recorded inputs, the least wins."""
    state = fold(story(number, records))
    wanted = changed(query(draw, "q-0-1"), policy="", temperature=0.0)
    decision = ask(state, wanted, weights=Weights(estimate=False))
    eligible = {
        worker.name
        for worker in state.loads.workers.values()
        if not worker.draining
        and wanted.constraints.pinned in ("", worker.name)
        and f"{worker.name}.{worker.epoch}" not in wanted.constraints.exclude
    }
    if isinstance(decision, RouteRefused):
        assert not eligible
        return
    assert {one.worker for one in decision.candidates} == eligible
    for one in decision.candidates:
        assert 0 <= one.cached_blocks <= one.cached_blocks + one.lower_blocks <= decision.blocks
        assert one.cached_blocks * 16 < wanted.prompt_tokens
        inputs = {name: getattr(one, name) for name in WorkEstimate._fields if hasattr(one, name)}
        work = WorkEstimate(block_size=16, prompt_tokens=wanted.prompt_tokens, **inputs)
        assert one.score == aggregated(cost_weights(decision.weights), work)
    best = min(one.score for one in decision.candidates)
    assert best == next(one.score for one in decision.candidates if one.worker == decision.worker)


GOLD = [("gold", "", True, False), ("silver", "no_worker_of_tier", True, True), ("silver", "", False, False)]
"""A tier, the code of the refusal, whether the query may wait, and whether it need not be sent again."""


@pytest.mark.parametrize(("tier", "code", "waits", "final"), GOLD)
def test_only_a_tier_that_no_worker_has_is_refused_for_good(
    tier: str, code: str, waits: bool, final: bool
) -> None:
    """A draining worker has its tier all the same, and a query that does not wait is asked again by its edge."""
    state = fold([record(1, msgspec.structs.replace(joined("w1"), tier="gold"), writer="w1")])
    state.apply(record(2, WorkerDraining("w1", 1), writer="w1"))
    refused = ask(state, asked(tier=tier, waits=waits))
    assert isinstance(refused, RouteRefused)
    assert (refused.code, refused.final) == (code, final)
    assert refused.retry_after_s == NO_WORKER_RETRY_S


def test_the_record_has_what_the_router_knew_besides_the_fleet() -> None:
    """That its state was stale, how long the query waited, and the temperature that was used."""
    state = fleet("w1", "w2")
    standing = DecisionContext(7, state.position, 3, 11, Weights(), True, temperature=0.5, waited_ms=250)
    found = {}
    for temperature in (-1.0, 0.0, 0.25):
        wanted = asked(temperature=temperature)
        decision = decide(state.index, state.loads, state.cold, prompt_of(wanted), wanted, standing)
        assert isinstance(decision, Decision)
        assert (decision.number, decision.seen, decision.wall_ns) == (7, 3, 11)
        assert (decision.degraded, decision.waited_ms) == (True, 250)
        assert recompute(state.index, state.loads, state.cold, decision) == decision
        found[temperature] = decision.preferences.temperature
    assert found == {-1.0: 0.5, 0.0: 0.0, 0.25: 0.25}


def test_a_record_is_compared_with_a_policy_without_a_draw() -> None:
    decision = ask(fleet("w1", "w2"), asked(temperature=0.7, session="s"))
    assert isinstance(decision, Decision)
    other = with_policy(decision, "round_robin")
    assert (other.preferences.policy, other.preferences.temperature) == ("round_robin", 0.0)
    assert other.preferences.session == decision.preferences.session == "s"
    assert other.request == decision.request


@given(st.lists(st.integers(0, 5), max_size=12), st.integers(1, 14))
def test_the_lowest_are_found_and_of_equal_ones_the_first(values: list[int], count: int) -> None:
    in_order = sorted(range(len(values)), key=lambda at: (values[at], at))
    assert sorted(find_lowest(np.array(values, float), count)) == sorted(in_order[:count])
