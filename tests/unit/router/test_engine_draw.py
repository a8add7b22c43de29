"""Engine weights: which engine a request draws, what replaces it, and which weights an operator may set."""

import math
from collections import Counter
from typing import Any

import pytest

from headwater.router.admission import LoadSnapshot, Saturated, find_placement
from headwater.router.candidates import find_invalid_weight, order_by_draw
from headwater.router.decide import recompute
from headwater.router.state import RouterState
from headwater.schemas.events import (
    EnginesWeighted,
    Event,
    WorkerChanged,
    WorkerDraining,
    WorkerJoined,
    WorkerState,
)
from headwater.schemas.routing import Decision, Draw, RouteQuery, RouteRefused
from tests.support.data.examples import packed, record
from tests.support.data.queries import changed
from tests.support.data.story import fold, tell
from tests.unit.router.test_policies import PROMPT, ask, reply

ENGINES = {"v1": "vllm", "v2": "vllm", "s1": "sglang"}


def fleet(weights: dict[str, float] | None = None, *more: Event, tokenizer: str = "") -> RouterState:
    """Two workers of vLLM and one of SGLang; then the weights, if any are set, and more events."""
    events: list[Event] = [
        WorkerJoined(name, 1, "m", engine, "both", 16, 1_000, 256, tokenizer=tokenizer)
        for name, engine in ENGINES.items()
    ]
    events += [] if weights is None else [EnginesWeighted(weights, "me")]
    return fold([record(at, event) for at, event in enumerate([*events, *more], 1)])


def shares(state: RouterState, count: int = 2_000, **fields: Any) -> Counter[str]:
    """How often each engine is used."""
    return Counter(ENGINES[ask(state, f"r{number}-0-1", **fields).worker] for number in range(count))


def changed_state(worker: str, state: WorkerState) -> Event:
    """The worker's status from now on."""
    return WorkerChanged(worker, 1, state, "both")


@pytest.mark.parametrize("weights", [{"vllm": 0.95, "sglang": 0.05}, {"vllm": 1.0, "sglang": 3.0}])
def test_engines_get_their_shares(weights: dict[str, float]) -> None:
    """Within four standard deviations, whatever the number of workers and the cost."""
    count = 2_000
    share = weights["sglang"] / sum(weights.values())
    got = shares(fleet(weights), count)["sglang"]
    assert abs(got - count * share) < 4 * math.sqrt(count * share * (1 - share))


def test_weights_are_relative() -> None:
    """Twice the weights are the same draws."""
    assert shares(fleet({"vllm": 1, "sglang": 1}), 200) == shares(fleet({"vllm": 2, "sglang": 2}), 200)


def test_no_weights_draw_nothing() -> None:
    """Before any were set, and after they were removed, cost alone decides."""
    for state in (fleet(), fleet({"vllm": 1.0}, EnginesWeighted({}, "me"))):
        decision = ask(state, "r-0-1")
        assert decision.draw is None
        assert {one.worker for one in decision.candidates} == set(ENGINES)


def test_a_decision_records_its_draw() -> None:
    """The weights by name, what was drawn and what was used; candidates of the other engines stay for comparison."""
    decision = ask(fleet({"vllm": 0.0, "sglang": 2.0}), "r-0-1")
    assert decision.draw == Draw((("sglang", 2.0), ("vllm", 0.0)), "sglang", "sglang")
    assert decision.worker == "s1"
    both = ask(fleet({"vllm": 1.0, "sglang": 1.0}), "r-0-1")
    assert {one.worker for one in both.candidates} == set(ENGINES)


def test_a_recomputed_decision_has_the_weights_of_the_fold() -> None:
    """Not those of the record: a fold with others shows as a difference."""
    made = ask(fleet({"vllm": 1.0, "sglang": 1.0}), "r-0-1")
    other = fleet({"vllm": 1.0, "sglang": 2.0})
    again = recompute(other.index, other.loads, other.cold, made)
    assert isinstance(again, Decision)
    assert again != made


def test_a_session_draws_one_engine() -> None:
    """All its requests, under any policy; another session may draw another."""
    state = fleet({"vllm": 1.0, "sglang": 1.0})
    for session in ("a", "b", "c", "d"):
        for policy in ("kv", "round_robin"):
            assert len(shares(state, 20, session=session, policy=policy)) == 1
    assert {ENGINES[ask(state, "r-0-1", session=f"s{n}").worker] for n in range(20)} == {"vllm", "sglang"}


def test_a_change_of_weights_moves_only_sessions_that_it_must() -> None:
    """From the engine whose share shrinks to the one whose share grows, and none the other way."""
    before, after = {"vllm": 0.9, "sglang": 0.1}, {"vllm": 0.5, "sglang": 0.5}
    moved = Counter(
        (order_by_draw(before, f"session {n}")[0], order_by_draw(after, f"session {n}")[0])
        for n in range(1_000)
    )
    assert moved["sglang", "vllm"] == 0
    assert 300 < moved["vllm", "sglang"] < 500


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (
            WorkerDraining("s1", 1),
            "none of the 1 workers takes requests (all are draining, paused or asleep)",
        ),
        (changed_state("s1", "sleeping"), "none of the 1 workers takes requests"),
    ],
)
def test_an_engine_without_a_worker_that_may_take_it_is_replaced(event: Event, reason: str) -> None:
    """The record says by which and why."""
    state = fleet({"sglang": 1.0, "vllm": 1e-12}, event)
    decision = ask(state, "r-0-1")
    assert decision.worker in ("v1", "v2")
    assert decision.draw is not None
    assert (decision.draw.drawn, decision.draw.used) == ("sglang", "vllm")
    assert decision.draw.reason.startswith(reason)


def test_an_engine_that_has_left_is_replaced() -> None:
    """Its weight stays for its return."""
    state = fleet({"sglang": 1.0, "vllm": 1e-12})
    del state.loads.workers["s1"]
    decision = ask(state, "r-0-1")
    assert decision.draw is not None
    assert decision.draw.reason == "no worker of sglang is in the pool"


def test_an_engine_with_weight_0_gets_no_new_request() -> None:
    """Not even where no other worker is left: the refusal names the weights."""
    state = fleet({"vllm": 1.0, "sglang": 0.0}, WorkerDraining("v1", 1))
    assert shares(state, 50) == {"vllm": 50}
    state = fleet({"vllm": 1.0, "sglang": 0.0}, WorkerDraining("v1", 1), WorkerDraining("v2", 1))
    refused = reply(state, "r-0-1")
    assert isinstance(refused, RouteRefused)
    assert refused.reason == "none of the 2 workers takes requests (all are draining, paused or asleep)"
    del state.loads.workers["v1"], state.loads.workers["v2"]
    refused = reply(state, "r-0-1")
    assert isinstance(refused, RouteRefused)
    assert refused.reason == ("none of the 1 workers runs an engine with a weight above 0 (sglang=0, vllm=1)")


def test_an_engine_without_a_weight_has_weight_0() -> None:
    """One that joins a pool whose weights do not name it waits for a weight."""
    assert shares(fleet({"vllm": 1.0}), 50) == {"vllm": 50}
    state = fleet({"vllm": 1.0}, WorkerDraining("v1", 1), WorkerDraining("v2", 1))
    refused = reply(state, "r-0-1")
    assert isinstance(refused, RouteRefused)
    assert refused.reason == "none of the 2 workers takes requests (all are draining, paused or asleep)"


@pytest.mark.parametrize(
    "fields", [{"pinned": "s1", "policy": "direct"}, {"engine": "sglang"}], ids=["worker", "engine"]
)
def test_what_a_request_names_stands_above_weights(fields: dict[str, Any]) -> None:
    """So that an engine can be tried before it gets a share."""
    decision = ask(fleet({"vllm": 1.0, "sglang": 0.0}), "r-0-1", **fields)
    assert decision.worker == "s1"
    assert decision.draw is None


def test_a_decode_leg_follows_its_prefill_leg() -> None:
    """Its engine was drawn when the prompt was placed, and may have weight 0 by now."""
    state = fleet({"vllm": 1.0, "sglang": 0.0})
    for name, engine in ENGINES.items():
        state.loads.workers[name].pairs_with = engine
    decision = ask(state, "r-0-2", leg="decode", pairs_with="sglang")
    assert (decision.worker, decision.draw) == ("s1", None)


def test_saturation_of_one_engine_overflows_to_the_other_but_not_to_weight_0() -> None:
    """A query waits only where every engine that may take it is saturated."""

    def place(state: RouterState, *saturated: str) -> object:
        query = changed(RouteQuery("r-0-1", 161, 5, PROMPT), waits=True)
        return find_placement(
            lambda one: reply(state, one.request, **_fields(one)), state.loads, query, saturated
        )

    found = place(fleet({"sglang": 1.0, "vllm": 1e-12}), "s1.1")
    assert isinstance(found, Decision)
    assert found.draw is not None
    assert (found.draw.drawn, found.draw.used) == ("sglang", "vllm")
    assert isinstance(place(fleet({"sglang": 1.0, "vllm": 0.0}), "s1.1"), Saturated)


def _fields(query: RouteQuery) -> dict[str, Any]:
    return {"exclude": query.constraints.exclude}


def test_blocked_queries_are_decided_again_after_a_change_of_weights() -> None:
    """Weights are part of what the queue remembers a block by."""
    before, after = fleet({"vllm": 1.0}), fleet({"vllm": 1.0, "sglang": 1.0})
    assert LoadSnapshot.of(before.loads).fingerprint != LoadSnapshot.of(after.loads).fingerprint
    assert LoadSnapshot.of(before.loads).ready == LoadSnapshot.of(after.loads).ready


@pytest.mark.parametrize(
    ("weights", "reason"),
    [
        ({"vlm": 1.0}, "no worker of this pool runs engine 'vlm'; its engines are: sglang, vllm"),
        ({"vllm": math.nan}, "the weight of vllm is nan"),
        ({"vllm": math.inf}, "the weight of vllm is inf"),
        ({"vllm": -1.0, "sglang": 2.0}, "the weight of vllm is -1"),
        ({"vllm": 0.0, "sglang": 0.0}, "every weight is 0"),
        ({"sglang": 1.0}, "no worker of sglang takes requests"),
        ({"sglang": 1.0, "vllm": 1.0}, ""),
        ({"vllm": 1.0}, ""),
    ],
)
def test_weights_that_cannot_be_set_are_named(weights: dict[str, float], reason: str) -> None:
    """A sum that is not 1 is fine; a switch to workers that take nothing is not."""
    state = fleet(None, WorkerDraining("s1", 1))
    found = find_invalid_weight(weights, list(state.loads.workers.values()))
    assert found.startswith(reason)
    assert bool(found) == bool(reason)


def test_weights_are_in_the_snapshot_and_the_digest() -> None:
    """A router that starts from a snapshot has them; one that lacks them has another state."""
    state = fleet({"vllm": 1.0, "sglang": 2.0})
    assert RouterState.restore(state.snapshot()).loads.engine_weights == {"vllm": 1.0, "sglang": 2.0}
    without = fleet({"vllm": 1.0, "sglang": 2.0})
    without.loads.engine_weights = {}
    assert state.digest() != without.digest()


def test_an_answer_continues_only_with_its_own_tokenizer() -> None:
    """A worker whose release published none passes."""
    state = fleet(tokenizer="aa")
    assert ask(state, "r-0-1", tokenizer="aa")
    refused = reply(state, "r-0-1", tokenizer="bb")
    assert isinstance(refused, RouteRefused)
    assert (
        refused.reason
        == "none of the 3 workers has the tokenizer of the answer so far, so none can continue it"
    )
    without = WorkerJoined("s1", 2, "m", ENGINES["s1"], "both", 16, 1_000, 256)
    tell(state, without)
    assert ask(state, "r-0-1", tokenizer="bb", hashes=packed(1)).worker == "s1"
