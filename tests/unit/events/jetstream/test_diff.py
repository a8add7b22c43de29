"""How a stream differs from what it should be: every class of field, and what its alteration costs."""

from itertools import product
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.events.jetstream.api import SECOND_NS, parse_time_ns
from headwater.events.jetstream.stream_spec import (
    Cost,
    StreamDifference,
    StreamSpec,
    blob_stream,
    compare,
    covers,
    namespace_streams,
    pool_log_stream,
    repairable,
    table_stream,
)

LOG = pool_log_stream("ns", "p", 1)
TABLE = table_stream("B", 1)
BLOBS = blob_stream("B", 1)
SPECS = [LOG, *namespace_streams("ns", 1)]

HOUR = 3600 * SECOND_NS

# What nats-server 2.15.1 adds of its own to the configuration of a stream.
DEFAULTS: dict[str, Any] = {
    "max_consumers": -1,
    "max_msgs": -1,
    "max_bytes": -1,
    "max_age": 0,
    "max_msgs_per_subject": -1,
    "max_msg_size": -1,
    "duplicate_window": 120 * SECOND_NS,
    "compression": "none",
    "allow_direct": False,
    "mirror_direct": False,
    "sealed": False,
    "deny_delete": False,
    "deny_purge": False,
    "allow_rollup_hdrs": False,
    "consumer_limits": {},
    "allow_msg_ttl": False,
    "metadata": {"_nats.level": "5", "_nats.req.level": "0", "_nats.ver": "2.15.1"},
}


def info(spec: StreamSpec, state: dict[str, Any] | None = None, **drift: Any) -> dict[str, Any]:
    """STREAM.INFO of a stream made from `spec`, with fields changed since."""
    held = {
        "messages": 10,
        "bytes": 1000,
        "first_seq": 1,
        "last_seq": 10,
        "first_ts": "2026-11-21T11:00:00.123456789Z",
        "num_subjects": 10,
    }
    return {
        "config": DEFAULTS | spec.config() | drift,
        "state": held | (state or {}),
        "ts": "2026-11-21T12:00:00Z",
    }


def only(spec: StreamSpec, state: dict[str, Any] | None = None, **drift: Any) -> StreamDifference:
    """The one difference there is."""
    (one,) = compare(spec, info(spec, state, **drift))
    return one


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_a_stream_as_it_was_made_differs_in_nothing(spec: StreamSpec) -> None:
    """What the server adds of its own is no difference, nor is what it will add some day."""
    assert compare(spec, info(spec)) == []
    assert compare(spec, info(spec, invented_in_2031=True, placement={"tags": ["ssd"]})) == []
    assert compare(spec, info(spec, metadata={"owner": "me"}, compression="s2", description="x")) == []


@pytest.mark.parametrize(
    ("spec", "field", "has", "cost"),
    [
        (LOG, "storage", "memory", "cannot"),
        (LOG, "retention", "workqueue", "cannot"),
        (LOG, "retention", "interest", "safe"),
        (LOG, "persist_mode", "async", "cannot"),
        (LOG, "sealed", True, "cannot"),
        (LOG, "allow_msg_counter", True, "cannot"),
        (TABLE, "mirror", {"name": "OTHER"}, "promotes"),
        (TABLE, "deny_purge", True, "cannot"),
        (BLOBS, "deny_purge", True, "cannot"),
        (LOG, "subjects", [], "safe"),
        (LOG, "allow_direct", False, "safe"),
        (LOG, "allow_atomic", False, "safe"),
        (LOG, "allow_batched", False, "safe"),
        (TABLE, "allow_rollup_hdrs", False, "safe"),
        (TABLE, "allow_msg_ttl", False, "safe"),
        (TABLE, "deny_delete", False, "safe"),
        (TABLE, "subject_delete_marker_ttl", 0, "safe"),
        (TABLE, "subject_delete_marker_ttl", 5 * SECOND_NS, "safe"),
        (LOG, "no_ack", True, "safe"),
        (TABLE, "discard_new_per_subject", True, "safe"),
        (LOG, "discard", "new", "safe"),
        (TABLE, "discard", "old", "safe"),
        (LOG, "max_age", HOUR, "safe"),
        (LOG, "max_bytes", 1024, "safe"),
        (LOG, "max_msgs", 5, "safe"),
        (LOG, "max_msgs_per_subject", 5, "safe"),
        (LOG, "max_msg_size", 5, "safe"),
        (LOG, "max_consumers", 5, "safe"),
        (LOG, "duplicate_window", SECOND_NS, "safe"),
        (TABLE, "max_age", HOUR, "safe"),
        (BLOBS, "max_bytes", 1024, "safe"),
    ],
)
def test_what_is_missing_or_too_small_is_a_difference(
    spec: StreamSpec, field: str, has: Any, cost: Cost
) -> None:
    """By field, with what its alteration costs; none of these is an operator's choice."""
    found = [one for one in compare(spec, info(spec, **{field: has})) if one.field == field]
    assert [(one.cost, one.operators) for one in found] == [(cost, False)]
    assert bool(repairable(found)) == (cost == "safe")


@pytest.mark.parametrize(
    ("field", "has", "cost"),
    [
        ("max_age", 0, "safe"),
        ("max_age", 48 * HOUR, "safe"),
        ("max_bytes", -1, "safe"),
        ("max_bytes", 2**40, "safe"),
        ("duplicate_window", 60 * SECOND_NS, "safe"),
        ("num_replicas", 3, "safe"),
        ("subjects", ["hw.ns.pool.p.>", "mine.>"], "safe"),
        ("subjects", ["hw.ns.>"], "safe"),
        ("allow_rollup_hdrs", True, "safe"),
        ("allow_msg_ttl", True, "safe"),
        ("deny_delete", True, "cannot"),
        ("deny_purge", True, "cannot"),
    ],
)
def test_more_than_was_asked_for_is_the_operators(field: str, has: Any, cost: Cost) -> None:
    """It is told, and stays."""
    one = only(LOG, **{field: has})
    assert (one.field, one.has, one.cost, one.operators) == (field, has, cost, True)
    assert repairable([one]) == []


@pytest.mark.parametrize(
    ("spec", "field", "has", "state", "cost"),
    [
        (LOG, "max_age", 0, {"first_ts": "2026-11-20T12:00:00.000000001Z"}, "would lose"),
        (LOG, "max_age", 0, {"first_ts": "2026-11-20T12:00:01Z"}, "safe"),
        (LOG, "max_age", 0, {"messages": 0, "first_ts": "0001-01-01T00:00:00Z"}, "safe"),
        (LOG, "max_bytes", -1, {"bytes": LOG.max_bytes + 1}, "would lose"),
        (LOG, "max_bytes", -1, {"bytes": LOG.max_bytes}, "safe"),
        (TABLE, "max_msgs_per_subject", 5, {"messages": 11}, "would lose"),
        (TABLE, "max_msgs_per_subject", -1, {"messages": 11}, "would lose"),
        (TABLE, "max_msgs_per_subject", 5, {"messages": 10}, "safe"),
        (TABLE, "max_msgs_per_subject", 5, {"messages": 0, "num_subjects": 0}, "safe"),
    ],
)
def test_a_limit_that_would_cut_now_is_told_apart(
    spec: StreamSpec, field: str, has: int, state: dict[str, Any], cost: Cost
) -> None:
    """Lowering costs stored messages or not: that depends on what is stored. A history in a table is no choice."""
    one = only(spec, state, **{field: has})
    assert one.cost == cost
    assert one.operators == (field != "max_msgs_per_subject")


def test_replicas_are_raised_and_never_lowered() -> None:
    """R1 where three are wanted is altered; R3 where one is wanted stays."""
    wanted = msgspec.structs.replace(LOG, num_replicas=3)
    assert repairable([only(wanted, num_replicas=1)])
    assert not repairable([only(LOG, num_replicas=3)])


def test_start_up_leaves_limits_alone() -> None:
    """A limit that an operator made smaller survives every start; capabilities are added."""
    found = compare(LOG, info(LOG, max_age=HOUR, max_bytes=1024, discard="new", allow_atomic=False))
    assert [one.field for one in repairable(found, limits=False)] == ["allow_atomic"]
    assert {one.field for one in repairable(found)} == {"max_age", "max_bytes", "discard", "allow_atomic"}


def test_missing_subjects_are_added_without_overlap() -> None:
    """Others' subjects stay; a narrower one of ours gives way, since the server refuses overlaps."""
    narrow = only(LOG, subjects=["hw.ns.pool.p.kv.>", "mine.x"])
    assert narrow.wanted == ["mine.x", "hw.ns.pool.p.>"]
    half = only(BLOBS, subjects=["$O.B.C.>"])
    assert half.wanted == ["$O.B.C.>", "$O.B.M.>"]


def test_an_alteration_that_such_a_stream_does_not_take_is_not_called_safe() -> None:
    """Purges denied: no roll-ups. Written without sync: no atomic batches. A mirror: nothing of writers."""
    for spec, field, drift in (
        (TABLE, "allow_rollup_hdrs", {"allow_rollup_hdrs": False, "deny_purge": True}),
        (LOG, "allow_atomic", {"allow_atomic": False, "persist_mode": "async"}),
        (LOG, "allow_atomic", {"allow_atomic": False, "mirror": {"name": "OTHER"}}),
        (LOG, "duplicate_window", {"duplicate_window": 0, "mirror": {"name": "OTHER"}}),
    ):
        costs = {one.field: one.cost for one in compare(spec, info(spec, **drift))}
        assert costs[field] == "cannot"


def test_times_of_the_server_are_read() -> None:
    """With nanoseconds, without, and its word for never."""
    assert parse_time_ns("1970-01-01T00:00:01.123456789Z") == SECOND_NS + 123_456_000
    assert parse_time_ns("1970-01-01T01:00:02+01:00") == 2 * SECOND_NS
    assert parse_time_ns("0001-01-01T00:00:00Z") == parse_time_ns("") == 0


TOKENS = st.sampled_from(["a", "b", "*", ">"])


@st.composite
def patterns(draw: st.DrawFn) -> str:
    """A subject, perhaps with wildcards."""
    tokens = draw(st.lists(TOKENS, min_size=1, max_size=3))
    cut = tokens.index(">") + 1 if ">" in tokens else len(tokens)
    return ".".join(tokens[:cut])


LITERALS = [".".join(tokens) for depth in range(1, 6) for tokens in product("abc", repeat=depth)]


def matches(pattern: str, literal: str) -> bool:
    """The server's rule for a subject without wildcards."""
    ours, theirs = pattern.split("."), literal.split(".")
    for at, token in enumerate(ours):
        if token == ">":
            return len(theirs) > at
        if at >= len(theirs) or token not in ("*", theirs[at]):
            return False
    return len(ours) == len(theirs)


@given(patterns(), patterns())
def test_covering_is_matching_everything_that_the_other_matches(one: str, other: str) -> None:
    """Compared with all subjects of up to five tokens."""
    every = all(matches(one, literal) for literal in LITERALS if matches(other, literal))
    assert covers(one, other) == every


DRIFT = st.fixed_dictionaries(
    {},
    optional={
        "storage": st.just("memory"),
        "retention": st.sampled_from(["interest", "workqueue"]),
        "persist_mode": st.just("async"),
        "sealed": st.just(True),
        "no_ack": st.just(True),
        "discard": st.sampled_from(["old", "new"]),
        "discard_new_per_subject": st.booleans(),
        "subjects": st.lists(patterns(), max_size=2, unique=True),
        "num_replicas": st.sampled_from([1, 3]),
        "max_age": st.sampled_from([0, HOUR, 48 * HOUR]),
        "max_bytes": st.sampled_from([-1, 10, 2**40]),
        "max_msgs": st.sampled_from([-1, 0, 5]),
        "max_msgs_per_subject": st.sampled_from([-1, 0, 1, 5]),
        "duplicate_window": st.sampled_from([SECOND_NS, 60 * SECOND_NS]),
        "subject_delete_marker_ttl": st.sampled_from([0, 2 * SECOND_NS]),
        "deny_delete": st.booleans(),
        "deny_purge": st.booleans(),
        "allow_direct": st.booleans(),
        "allow_rollup_hdrs": st.booleans(),
        "allow_msg_ttl": st.booleans(),
        "allow_atomic": st.booleans(),
        "allow_batched": st.booleans(),
    },
)


@given(st.sampled_from(SPECS), st.sampled_from([1, 3]), DRIFT, st.integers(10, 12))
def test_altering_what_is_safe_leaves_nothing_safe(
    spec: StreamSpec, replicas: int, drift: dict[str, Any], messages: int
) -> None:
    """Once is enough, the rest is as it was, and no operator's choice is touched."""
    spec = msgspec.structs.replace(spec, num_replicas=replicas)
    before = info(spec, {"messages": messages}, **drift)
    found = compare(spec, before)
    change = {one.field: one.wanted for one in repairable(found)}
    after = {**before, "config": before["config"] | change}
    again = compare(spec, after)
    assert repairable(again) == []
    # Subjects were added to those of others, which are an operator's choice from now on.
    rest = [one for one in again if one.field != "subjects" or "subjects" not in change]
    assert rest == [one for one in found if one.field not in change]
    assert [one for one in again if one not in rest and not one.operators] == []
    assert not {one.field for one in found if one.operators} & change.keys()
