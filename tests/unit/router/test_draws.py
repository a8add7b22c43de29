"""Draws: which engine and revision a request draws, what replaces them, what stays together, and which weights an operator may set."""

import math
from collections import Counter
from typing import Any

import msgspec
import pytest

from headwater.actors.router.commands import find_invalid_split
from headwater.router.admission import LoadSnapshot, Saturated, find_placement
from headwater.router.candidates import find_invalid_weight, order_by_draw
from headwater.router.decide import recompute
from headwater.router.state import RouterState
from headwater.schemas.events import (
    EnginesWeighted,
    Event,
    Role,
    TrafficSplit,
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


# Traffic splits: which revision a request draws, what replaces it, what stays together, and which policy decides.


REVISIONS = {"a1": "old", "a2": "old", "b1": "new"}


def revised_fleet(shares: dict[str, float] | None = None, *more: Event) -> RouterState:
    """Two workers of one revision and one of another; then the split, if there is one, and more events."""
    events: list[Event] = [
        WorkerJoined(name, 1, "m", "sim", "both", 16, 1_000, 256, revision=revision)
        for name, revision in REVISIONS.items()
    ]
    events += [] if shares is None else [TrafficSplit("revision", shares, 0, "me")]
    return fold([record(at, event) for at, event in enumerate([*events, *more], 1)])


def counted(state: RouterState, count: int = 2_000, **fields: Any) -> Counter[str]:
    """How often each revision is used."""
    return Counter(ask(state, f"r{number}-0-1", **fields).revision for number in range(count))


def again(state: RouterState, made: Decision) -> Decision | RouteRefused:
    """The decision from its record."""
    return recompute(state.index, state.loads, state.cold, made)


@pytest.mark.parametrize("shares", [{"old": 95.0, "new": 5.0}, {"old": 1.0, "new": 3.0}])
def test_revisions_get_their_shares(shares: dict[str, float]) -> None:
    """Within four standard deviations, whatever the number of workers; each decision comes out again from its record."""
    count, share, state = 2_000, shares["new"] / sum(shares.values()), revised_fleet(shares)
    got = counted(state, count)["new"]
    assert abs(got - count * share) < 4 * math.sqrt(count * share * (1 - share))
    for number in range(50):
        made = ask(state, f"r{number}-0-1")
        assert again(state, made) == made


def test_without_a_split_the_cost_decides_and_the_record_names_the_revision() -> None:
    """Before there was one, and after it was removed."""
    for state in (revised_fleet(), revised_fleet({"new": 1.0}, TrafficSplit("revision", {}, 4, "me"))):
        decision = ask(state, "r-0-1")
        assert decision.revision_draw is None
        assert decision.revision == REVISIONS[decision.worker]
        assert len(decision.candidates) == len(REVISIONS)


def test_a_conversation_does_not_change_its_revision() -> None:
    """Nor does a session; others draw anew."""
    state = revised_fleet({"old": 1.0, "new": 1.0})
    for name in ("a", "b", "c", "d"):
        assert len(counted(state, 20, session=name)) == 1
        assert len(counted(state, 20, conversation=name)) == 1
    assert len({ask(state, "r-0-1", conversation=f"c{n}").revision for n in range(20)}) == 2


def test_a_split_that_was_overtaken_changes_nothing() -> None:
    """Of two that replace the same one only the first counts, on every fold."""
    late = TrafficSplit("revision", {"new": 1.0}, 0)
    state = revised_fleet({"old": 1.0}, late)
    assert state.loads.shares("revision") == {"old": 1.0}
    for after, shares in ((4, {"new": 2.0}), (4, {"new": 3.0}), (0, {"new": 4.0})):
        tell(state, TrafficSplit("revision", shares, after))
    assert state.loads.shares("revision") == {"new": 2.0}
    assert state.loads.splits["revision"].position == 6


@pytest.mark.parametrize(
    ("more", "reason"), [((WorkerDraining("b1", 1),), "none of the 1 workers takes requests"), ((), "")]
)
def test_a_revision_without_a_worker_leaves_its_share_to_the_others(
    more: tuple[Event, ...], reason: str
) -> None:
    """The record says why."""
    state = revised_fleet({"new": 1.0, "old": 1e-12}, *more)
    if not more:
        tell(state, WorkerDraining("b1", 1))
        del state.loads.workers["b1"]
        reason = "no worker of revision new is in the pool"
    decision = ask(state, "r-0-1")
    assert decision.revision == "old"
    assert decision.revision_draw is not None
    assert (decision.revision_draw.drawn, decision.revision_draw.used) == ("new", "old")
    assert decision.revision_draw.reason.startswith(reason)


def test_revisions_without_a_share_serve_only_where_no_other_can() -> None:
    """A third revision waits for a share, but a fleet of only such workers is not down."""
    third = WorkerJoined("c1", 1, "m", "sim", "both", 16, 1_000, 256, revision="third")
    state = revised_fleet({"old": 1.0, "new": 0.0}, third)
    assert counted(state, 50) == {"old": 50}
    for name in ("a1", "a2"):
        tell(state, WorkerDraining(name, 1))
    assert counted(state, 50) == {"third": 50}


def test_a_share_of_0_is_final() -> None:
    """After a rollback the new revision gets nothing, even if it is all that is left; the refusal says so."""
    state = revised_fleet({"old": 1.0, "new": 0.0})
    del state.loads.workers["a1"], state.loads.workers["a2"]
    refused = reply(state, "r-0-1")
    assert isinstance(refused, RouteRefused)
    assert refused.reason.startswith(
        "none of the 1 workers is of a revision that may get requests (new=0, old=1): start workers"
    )
    assert ask(state, "r-0-1", revision="new").worker == "b1"


def test_prefill_and_decode_are_of_one_revision() -> None:
    """Equal hand-off, unequal revision: no pair; the decode leg is bound to the revision of its prefill leg."""
    legs: list[tuple[str, Role, str]] = [
        ("p1", "prefill", "old"),
        ("d1", "decode", "new"),
        ("d2", "decode", "old"),
    ]
    events: list[Event] = [
        WorkerJoined(
            name, 1, "m", "sim", role, 16, 1_000, 256, "nixl", ("handoff", "split_only"), revision=revision
        )
        for name, role, revision in legs
    ]
    state = fold([record(at, event) for at, event in enumerate(events, 1)])
    made = ask(state, "r-0-1")
    assert (made.worker, made.leg, made.revision) == ("p1", "prefill", "old")
    decode = ask(state, "r-0-2", leg="decode", pairs_with=made.pairs_with, revision=made.revision)
    assert decode.worker == "d2"
    state.loads.workers["d2"].revision = "new"
    state.loads.columns.stale = True
    refused = reply(state, "r-1-1")
    assert isinstance(refused, RouteRefused)
    assert "a prefill and a decode worker that can exchange KV" in refused.reason


def test_decisions_of_the_algorithm_before_are_made_as_it_made_them() -> None:
    """Version 1 knew no revisions: its decisions on a fleet that has some come out again."""
    state, plain = revised_fleet({"old": 0.0, "new": 1.0}), revised_fleet()
    for worker in plain.loads.workers.values():
        worker.revision = ""
    plain.loads.columns.stale = True
    for number in range(30):
        made = ask(plain, f"r{number}-0-1")
        old = msgspec.structs.replace(made, algorithm=1)
        assert again(state, old) == old


def test_policies_get_their_shares() -> None:
    """Of the queries that state none; the draw is recorded and comes out again. A policy of a later release is passed over."""
    split = TrafficSplit("policy", {"kv": 1.0, "least_loaded": 1.0}, 0, "me")
    state = revised_fleet(None, split)
    made = [ask(state, f"r{number}-0-1", policy="") for number in range(400)]
    found = Counter(one.preferences.policy for one in made)
    assert set(found) == {"kv", "least_loaded"}
    assert 140 < found["kv"] < 260
    assert all(again(state, one) == one for one in made[:20])
    assert all(one.policy_draw is not None and one.policy_draw.used == one.preferences.policy for one in made)
    stated = ask(state, "r-0-1", policy="round_robin")
    assert (stated.preferences.policy, stated.policy_draw) == ("round_robin", None)
    later = revised_fleet(None, TrafficSplit("policy", {"kv": 1e-12, "oracle": 1.0}, 0))
    assert ask(later, "r-0-1", policy="").policy_draw == Draw(
        (("kv", 1e-12), ("oracle", 1.0)), "oracle", "kv", "this release has no policy oracle"
    )


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (
            TrafficSplit("revision", {"newer": 1.0}, 0),
            "no worker of this pool is of revision 'newer'; its revisions are: new, old",
        ),
        (TrafficSplit("revision", {"new": math.nan}, 0), "the share of new is nan"),
        (TrafficSplit("revision", {"new": 0.0}, 0), "every share is 0"),
        (TrafficSplit("revision", {f"r{n}": 1.0 for n in range(65)}, 0), "it names 65, and at most 64 may"),
        (TrafficSplit("revision", {"new": 1.0, "old": 0.0}, 0), "no worker of new takes requests"),
        (TrafficSplit("policy", {"oracle": 1.0}, 0), "unknown policy oracle: available are kv, "),
        (TrafficSplit("policy", {"direct": 1.0}, 0), "unknown policy direct"),
        (TrafficSplit("revision", {"new": 1.0}, 0), ""),
        (TrafficSplit("policy", {"kv": 1.0, "slo": 2.0}, 0), ""),
        (TrafficSplit("revision", {}, 0), ""),
    ],
)
def test_splits_that_cannot_be_set_are_named(event: TrafficSplit, reason: str) -> None:
    """With revision "new" draining: alone it can serve nothing, with others that have no share it can."""
    found = find_invalid_split(event, revised_fleet(None, WorkerDraining("b1", 1)).loads, None)
    assert found.startswith(reason)
    assert bool(found) == bool(reason)


def test_splits_are_in_the_snapshot_the_digest_and_the_queue() -> None:
    """A router that starts from a snapshot has them; blocked queries are decided again after a change."""
    state, without = revised_fleet({"old": 1.0, "new": 2.0}), revised_fleet()
    assert RouterState.restore(state.snapshot()).loads.splits == state.loads.splits
    assert state.digest() != without.digest()
    assert LoadSnapshot.of(state.loads).fingerprint != LoadSnapshot.of(without.loads).fingerprint


def test_a_snapshot_of_the_release_before_is_completed_from_the_log() -> None:
    """That release ignored revisions and splits: without them its state would be taken for this release's."""
    events = [
        *(
            WorkerJoined(name, 1, "m", "sim", "both", 16, 1_000, 256, revision=revision)
            for name, revision in REVISIONS.items()
        ),
        TrafficSplit("revision", {"old": 1.0, "new": 2.0}, 0),
    ]
    records = [record(at, event) for at, event in enumerate(events, 1)]
    whole = fold(records)
    snapshot = fold(records).snapshot()
    del snapshot.facts["version"], snapshot.facts["loads"]["splits"]
    for worker in snapshot.facts["loads"]["workers"].values():
        del worker["revision"]
    state = RouterState.restore(snapshot)
    assert (state.version, state.loads.splits) == (1, {})
    assert state.digest() != whole.digest()
    for one in records:
        state.complete(one)
    assert state.digest() == whole.digest()
