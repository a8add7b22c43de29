"""How a stream differs from its specification, and the consequences of altering it. Pure.

Operators' settings are kept: where a stream has more than Headwater requires (a larger limit, more replicas, a further
subject or capability, a stricter protection), the difference is reported with `operators` set and needs no repair.
Fields that Headwater does not set are ignored.

The server's behaviour (2.15) is verified by tests/contract/log/test_stream_repair.py.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import msgspec

from headwater.events.jetstream.api import parse_time_ns
from headwater.events.jetstream.streams.spec import UNLIMITED, StreamSpec

Cost = Literal["safe", "would lose", "cannot"]
"""safe: altered in place, without loss of messages. would lose: the server would accept it and delete stored
messages. cannot: the server rejects it on an existing stream."""


class StreamDifference(msgspec.Struct, frozen=True):
    """One field that differs from the specification. `wanted` is the value that an alteration would write."""

    field: str
    has: Any
    wanted: Any
    cost: Cost
    operators: bool = False
    """More than required: kept."""
    limit: bool = False
    """A limit and not a capability: start-up does not change it, only an explicit repair raises it."""


CAPABILITIES = ("allow_direct", "allow_rollup_hdrs", "allow_msg_ttl", "allow_atomic", "allow_batched")
FORBIDDEN = ("no_ack", "discard_new_per_subject")
"""Settings that prevent acknowledged writes or rewriting a key: Headwater's writers need both."""

_PER_SUBJECT = "max_msgs_per_subject"


def compare(wanted: StreamSpec, info: Mapping[str, Any]) -> list[StreamDifference]:
    """Every difference between `wanted` and the stream in a STREAM.INFO reply."""
    config, state = info["config"], info["state"]
    found = [
        *_kind(config),
        *_subjects(wanted, config),
        *_limits(wanted, config, state, info.get("ts", "")),
        *_flags(wanted, config),
    ]
    return [_as_the_server_takes_it(one, config) for one in found]


def repairable(differences: list[StreamDifference], *, limits: bool = True) -> list[StreamDifference]:
    """The differences that are altered automatically: without loss, and not set by an operator."""
    return [
        one for one in differences if one.cost == "safe" and not one.operators and (limits or not one.limit)
    ]


def _kind(config: Mapping[str, Any]) -> Iterator[StreamDifference]:
    """The kind of stream, which is fixed at its creation."""
    if config.get("storage") != "file":
        yield StreamDifference("storage", config.get("storage"), "file", "cannot")
    retention = config.get("retention")
    if retention != "limits":
        # The server (2.15) can change `interest`, and keeps the messages; it cannot change `workqueue`.
        yield StreamDifference(
            "retention", retention, "limits", "safe" if retention == "interest" else "cannot"
        )
    if config.get("persist_mode") == "async":
        yield StreamDifference("persist_mode", "async", "default", "cannot")
    if config.get("sealed"):
        yield StreamDifference("sealed", True, False, "cannot")
    if config.get("mirror"):
        yield StreamDifference("mirror", config["mirror"].get("name", ""), "", "cannot")
    if config.get("allow_msg_counter"):
        yield StreamDifference("allow_msg_counter", True, False, "cannot")


def _subjects(wanted: StreamSpec, config: Mapping[str, Any]) -> Iterator[StreamDifference]:
    has = list(config.get("subjects") or [])
    missing = [subject for subject in wanted.subjects if not any(covers(other, subject) for other in has)]
    if missing:
        # The server rejects overlapping subjects: a narrower one is replaced by ours.
        kept = [other for other in has if not any(covers(subject, other) for subject in missing)]
        yield StreamDifference("subjects", has, kept + missing, "safe")
    elif set(has) != set(wanted.subjects):
        yield StreamDifference("subjects", has, list(wanted.subjects), "safe", operators=True)


def covers(pattern: str, subject: str) -> bool:
    """Does every subject that `subject` matches also match `pattern`? Both may have wildcards."""
    ours, theirs = pattern.split("."), subject.split(".")
    for at, token in enumerate(ours):
        if token == ">":
            return len(theirs) > at
        if at >= len(theirs) or theirs[at] == ">" or (token != "*" and token != theirs[at]):
            return False
    return len(ours) == len(theirs)


def _limits(
    wanted: StreamSpec, config: Mapping[str, Any], state: Mapping[str, Any], now: str
) -> Iterator[StreamDifference]:
    replicas = int(config.get("num_replicas", 1))
    if replicas != wanted.num_replicas:
        more = replicas > wanted.num_replicas
        yield StreamDifference("num_replicas", replicas, wanted.num_replicas, "safe", operators=more)
    for field, limit in (
        ("max_age", wanted.max_age),
        ("max_bytes", wanted.max_bytes),
        ("max_msgs", UNLIMITED),
        (_PER_SUBJECT, wanted.max_msgs_per_subject),
        ("max_msg_size", UNLIMITED),
        ("max_consumers", UNLIMITED),
    ):
        has = int(config.get(field, 0))
        if _size(has) == _size(limit):
            continue
        if _size(has) < _size(limit):
            yield StreamDifference(field, has, limit, "safe", limit=True)
            continue
        cost: Cost = "would lose" if _drops(field, limit, state, now) else "safe"
        # A table has one value per key: with a longer history old values could reappear.
        yield StreamDifference(field, has, limit, cost, operators=field != _PER_SUBJECT, limit=True)
    window = int(config.get("duplicate_window", 0))
    if wanted.duplicate_window and window != wanted.duplicate_window:
        more = window > wanted.duplicate_window
        yield StreamDifference(
            "duplicate_window", window, wanted.duplicate_window, "safe", operators=more, limit=True
        )
    if config.get("discard") != wanted.discard:
        yield StreamDifference("discard", config.get("discard"), wanted.discard, "safe", limit=True)


def _size(limit: int) -> float:
    """A limit for comparing: the server represents "none" as 0 or -1."""
    return limit if limit > 0 else float("inf")


def _drops(field: str, limit: int, state: Mapping[str, Any], now: str) -> bool:
    """Would lowering this limit delete stored messages now? In doubt: yes."""
    messages = int(state["messages"])
    match field:
        case "max_age":
            return bool(messages) and parse_time_ns(now) - parse_time_ns(state["first_ts"]) >= limit
        case "max_bytes":
            return int(state["bytes"]) > limit
        case "max_msgs_per_subject":
            # One subject may have all messages except one for each other subject.
            return messages - int(state.get("num_subjects", 0)) + 1 > limit
        case _:
            return False


def _flags(wanted: StreamSpec, config: Mapping[str, Any]) -> Iterator[StreamDifference]:
    for field in CAPABILITIES:
        want, has = bool(getattr(wanted, field)), bool(config.get(field))
        if want != has:
            yield StreamDifference(field, has, want, "safe", operators=has)
    for field in FORBIDDEN:
        if config.get(field):
            yield StreamDifference(field, True, False, "safe")
    ttl = int(config.get("subject_delete_marker_ttl", 0))
    if wanted.subject_delete_marker_ttl and ttl != wanted.subject_delete_marker_ttl:
        yield StreamDifference("subject_delete_marker_ttl", ttl, wanted.subject_delete_marker_ttl, "safe")
    if bool(config.get("deny_delete")) != wanted.deny_delete:
        # It cannot be unset; Headwater deletes no single messages.
        yield StreamDifference(
            "deny_delete",
            not wanted.deny_delete,
            wanted.deny_delete,
            "safe" if wanted.deny_delete else "cannot",
            operators=not wanted.deny_delete,
        )
    if config.get("deny_purge"):
        # Replacing a value of a table or an object purges the old one; a log is never purged.
        yield StreamDifference("deny_purge", True, False, "cannot", operators=not wanted.allow_rollup_hdrs)


def _as_the_server_takes_it(one: StreamDifference, config: Mapping[str, Any]) -> StreamDifference:
    """Alterations that are rejected on a stream with these settings."""
    purged = one.field in ("allow_rollup_hdrs", "subject_delete_marker_ttl") and config.get("deny_purge")
    unsynced = one.field == "allow_atomic" and config.get("persist_mode") == "async"
    mirrored = one.field in ("subjects", "allow_atomic", "allow_batched") and config.get("mirror")
    if one.cost == "safe" and not one.operators and (purged or unsynced or mirrored):
        return msgspec.structs.replace(one, cost="cannot")
    return one
