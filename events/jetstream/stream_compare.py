"""How a stream differs from what it should be, and what altering it would cost. Pure.

The rule about operators: whoever gave a stream more than Headwater asks for (a larger limit, more replicas, a
further subject or capability, a stricter protection) meant it, and it stays. Such a difference is told with
`operators` set and needs no repair. Fields that Headwater does not set are not looked at.

What the server (2.15) does was tried: tests/contract/test_stream_repair.py holds it to that.
"""

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any, Literal

import msgspec

from headwater.events.jetstream.stream_spec import SECOND_NS, UNLIMITED, StreamSpec

Cost = Literal["safe", "would lose", "cannot"]
"""safe: altered in place, nothing stored is lost. would lose: the server would take it and delete stored
messages now. cannot: the server refuses it on a stream that exists."""


class Difference(msgspec.Struct, frozen=True):
    """One field that is not as wanted. `wanted` is what an alteration would write."""

    field: str
    has: Any
    wanted: Any
    cost: Cost
    operators: bool = False
    """More than was asked for: it stays."""
    limit: bool = False
    """A limit and not a capability: start-up leaves it alone, only a repair that is asked for raises it."""


CAPABILITIES = ("allow_direct", "allow_rollup_hdrs", "allow_msg_ttl", "allow_atomic", "allow_batched")
FORBIDDEN = ("no_ack", "discard_new_per_subject")
"""Never acknowledged writes, and keys that can not be written twice: not with our writers."""

_PER_SUBJECT = "max_msgs_per_subject"


def compare(wanted: StreamSpec, info: Mapping[str, Any]) -> list[Difference]:
    """Every difference between `wanted` and the stream that STREAM.INFO answered with."""
    config, state = info["config"], info["state"]
    found = [
        *_kind(config),
        *_subjects(wanted, config),
        *_limits(wanted, config, state, info.get("ts", "")),
        *_flags(wanted, config),
    ]
    return [_as_the_server_takes_it(one, config) for one in found]


def repairable(differences: list[Difference], *, limits: bool = True) -> list[Difference]:
    """Those that are altered without asking: they lose nothing and override no operator."""
    return [
        one for one in differences if one.cost == "safe" and not one.operators and (limits or not one.limit)
    ]


def parse_time_ns(text: str) -> int:
    """The server's time (RFC 3339) as nanoseconds since 1970, to the microsecond; 0 for its "never"."""
    if not text or text.startswith("0001-"):
        return 0
    moment = datetime.fromisoformat(text)
    return int(moment.timestamp()) * SECOND_NS + moment.microsecond * 1_000


def _kind(config: Mapping[str, Any]) -> Iterator[Difference]:
    """What kind of stream it is: settled when it is created."""
    if config.get("storage") != "file":
        yield Difference("storage", config.get("storage"), "file", "cannot")
    retention = config.get("retention")
    if retention != "limits":
        # From `interest` the server goes (2.15), and keeps what is stored; from `workqueue` never.
        yield Difference("retention", retention, "limits", "safe" if retention == "interest" else "cannot")
    if config.get("persist_mode") == "async":
        yield Difference("persist_mode", "async", "default", "cannot")
    if config.get("sealed"):
        yield Difference("sealed", True, False, "cannot")
    if config.get("mirror"):
        yield Difference("mirror", config["mirror"].get("name", ""), "", "cannot")
    if config.get("allow_msg_counter"):
        yield Difference("allow_msg_counter", True, False, "cannot")


def _subjects(wanted: StreamSpec, config: Mapping[str, Any]) -> Iterator[Difference]:
    has = list(config.get("subjects") or [])
    missing = [subject for subject in wanted.subjects if not any(covers(other, subject) for other in has)]
    if missing:
        # The server refuses subjects that overlap: a narrower one gives way to ours.
        kept = [other for other in has if not any(covers(subject, other) for subject in missing)]
        yield Difference("subjects", has, kept + missing, "safe")
    elif set(has) != set(wanted.subjects):
        yield Difference("subjects", has, list(wanted.subjects), "safe", operators=True)


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
) -> Iterator[Difference]:
    replicas = int(config.get("num_replicas", 1))
    if replicas != wanted.num_replicas:
        more = replicas > wanted.num_replicas
        yield Difference("num_replicas", replicas, wanted.num_replicas, "safe", operators=more)
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
            yield Difference(field, has, limit, "safe", limit=True)
            continue
        cost: Cost = "would lose" if _drops(field, limit, state, now) else "safe"
        # A table has one value per key: a longer history would let old values come back.
        yield Difference(field, has, limit, cost, operators=field != _PER_SUBJECT, limit=True)
    window = int(config.get("duplicate_window", 0))
    if wanted.duplicate_window and window != wanted.duplicate_window:
        more = window > wanted.duplicate_window
        yield Difference(
            "duplicate_window", window, wanted.duplicate_window, "safe", operators=more, limit=True
        )
    if config.get("discard") != wanted.discard:
        yield Difference("discard", config.get("discard"), wanted.discard, "safe", limit=True)


def _size(limit: int) -> float:
    """A limit for comparing: the server spells "none" as 0 or -1."""
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
            # One subject may hold all that the others, with one message each, leave over.
            return messages - int(state.get("num_subjects", 0)) + 1 > limit
        case _:
            return False


def _flags(wanted: StreamSpec, config: Mapping[str, Any]) -> Iterator[Difference]:
    for field in CAPABILITIES:
        want, has = bool(getattr(wanted, field)), bool(config.get(field))
        if want != has:
            yield Difference(field, has, want, "safe", operators=has)
    for field in FORBIDDEN:
        if config.get(field):
            yield Difference(field, True, False, "safe")
    ttl = int(config.get("subject_delete_marker_ttl", 0))
    if wanted.subject_delete_marker_ttl and ttl != wanted.subject_delete_marker_ttl:
        yield Difference("subject_delete_marker_ttl", ttl, wanted.subject_delete_marker_ttl, "safe")
    if bool(config.get("deny_delete")) != wanted.deny_delete:
        # Once set it stays set; nothing of ours deletes single messages.
        yield Difference(
            "deny_delete",
            not wanted.deny_delete,
            wanted.deny_delete,
            "safe" if wanted.deny_delete else "cannot",
            operators=not wanted.deny_delete,
        )
    if config.get("deny_purge"):
        # Replacing a value of a table or an object purges the old one; a log is never purged.
        yield Difference("deny_purge", True, False, "cannot", operators=not wanted.allow_rollup_hdrs)


def _as_the_server_takes_it(one: Difference, config: Mapping[str, Any]) -> Difference:
    """Alterations that are fine by themselves and refused on such a stream."""
    purged = one.field in ("allow_rollup_hdrs", "subject_delete_marker_ttl") and config.get("deny_purge")
    unsynced = one.field == "allow_atomic" and config.get("persist_mode") == "async"
    mirrored = one.field in ("subjects", "allow_atomic", "allow_batched") and config.get("mirror")
    if one.cost == "safe" and not one.operators and (purged or unsynced or mirrored):
        return msgspec.structs.replace(one, cost="cannot")
    return one
