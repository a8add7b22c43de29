"""Traffic splits: which revision a request draws, what replaces it, what stays together, and which policy decides."""

import math
from collections import Counter
from typing import Any

import msgspec
import pytest

from headwater.actors.router.commands import find_invalid_split
from headwater.router.admission import LoadSnapshot
from headwater.router.decide import recompute
from headwater.router.state import RouterState
from headwater.schemas.events import Event, Role, TrafficSplit, WorkerDraining, WorkerJoined
from headwater.schemas.routing import Decision, Draw, RouteRefused
from tests.support.data.examples import record
from tests.support.data.story import fold, tell
from tests.unit.router.test_policies import ask, reply

REVISIONS = {"a1": "old", "a2": "old", "b1": "new"}


def fleet(shares: dict[str, float] | None = None, *more: Event) -> RouterState:
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
    count, share, state = 2_000, shares["new"] / sum(shares.values()), fleet(shares)
    got = counted(state, count)["new"]
    assert abs(got - count * share) < 4 * math.sqrt(count * share * (1 - share))
    for number in range(50):
        made = ask(state, f"r{number}-0-1")
        assert again(state, made) == made


def test_without_a_split_the_cost_decides_and_the_record_names_the_revision() -> None:
    """Before there was one, and after it was removed."""
    for state in (fleet(), fleet({"new": 1.0}, TrafficSplit("revision", {}, 4, "me"))):
        decision = ask(state, "r-0-1")
        assert decision.revision_draw is None
        assert decision.revision == REVISIONS[decision.worker]
        assert len(decision.candidates) == len(REVISIONS)


def test_a_conversation_does_not_change_its_revision() -> None:
    """Nor does a session; others draw anew."""
    state = fleet({"old": 1.0, "new": 1.0})
    for name in ("a", "b", "c", "d"):
        assert len(counted(state, 20, session=name)) == 1
        assert len(counted(state, 20, conversation=name)) == 1
    assert len({ask(state, "r-0-1", conversation=f"c{n}").revision for n in range(20)}) == 2


def test_a_split_that_was_overtaken_changes_nothing() -> None:
    """Of two that replace the same one only the first counts, on every fold."""
    late = TrafficSplit("revision", {"new": 1.0}, 0)
    state = fleet({"old": 1.0}, late)
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
    state = fleet({"new": 1.0, "old": 1e-12}, *more)
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
    state = fleet({"old": 1.0, "new": 0.0}, third)
    assert counted(state, 50) == {"old": 50}
    for name in ("a1", "a2"):
        tell(state, WorkerDraining(name, 1))
    assert counted(state, 50) == {"third": 50}


def test_a_share_of_0_is_final() -> None:
    """After a rollback the new revision gets nothing, even if it is all that is left; the refusal says so."""
    state = fleet({"old": 1.0, "new": 0.0})
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
    state, plain = fleet({"old": 0.0, "new": 1.0}), fleet()
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
    state = fleet(None, split)
    made = [ask(state, f"r{number}-0-1", policy="") for number in range(400)]
    found = Counter(one.preferences.policy for one in made)
    assert set(found) == {"kv", "least_loaded"}
    assert 140 < found["kv"] < 260
    assert all(again(state, one) == one for one in made[:20])
    assert all(one.policy_draw is not None and one.policy_draw.used == one.preferences.policy for one in made)
    stated = ask(state, "r-0-1", policy="round_robin")
    assert (stated.preferences.policy, stated.policy_draw) == ("round_robin", None)
    later = fleet(None, TrafficSplit("policy", {"kv": 1e-12, "oracle": 1.0}, 0))
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
    found = find_invalid_split(event, fleet(None, WorkerDraining("b1", 1)).loads, None)
    assert found.startswith(reason)
    assert bool(found) == bool(reason)


def test_splits_are_in_the_snapshot_the_digest_and_the_queue() -> None:
    """A router that starts from a snapshot has them; blocked queries are decided again after a change."""
    state, without = fleet({"old": 1.0, "new": 2.0}), fleet()
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
