"""Specifications of the streams of a namespace, as values, and how a stream differs from its specification. Pure.

Operators' settings are kept: where a stream has more than Headwater requires (a larger limit, more replicas, a further
subject or capability, a stricter protection), the difference is reported with `operators` set and needs no repair.
Fields that Headwater does not set are ignored.

The server's behaviour (2.15) is verified by tests/contract/log/test_stream_repair.py.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import msgspec

from headwater.events.jetstream.api import SECOND_NS, parse_time_ns
from headwater.events.table import STREAM_SIZES, StreamSizes
from headwater.schemas import subjects

POOL_MAX_AGE_S = 24 * 3600
REQUEST_MAX_AGE_S = 72 * 3600
DUPLICATE_WINDOW_S = 30

UNLIMITED = -1

What = Literal[
    "pool log",
    "request log",
    "leases",
    "model cards",
    "API keys",
    "secrets",
    "objects",
    "stored responses",
    "video jobs",
]


class Mirror(msgspec.Struct, frozen=True):
    """What a mirror copies: the stream of its name of a site, all of it, or of a pool's log only these kinds of events."""

    site: str
    """The site's JetStream domain."""
    kinds: tuple[str, ...] = ()


class StreamSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The specification of one stream. Field names are the server's; times are in nanoseconds.

    Other fields belong to the operator: placement, metadata, compression, republish and the like are neither
    compared nor changed.
    """

    name: str
    what: What
    pool: str = ""
    subjects: tuple[str, ...]
    discard: Literal["old", "new"]
    num_replicas: int = 1
    max_age: int = 0
    max_bytes: int = UNLIMITED
    max_msgs_per_subject: int = UNLIMITED
    duplicate_window: int = 0
    """0: the server's default."""
    subject_delete_marker_ttl: int = 0
    deny_delete: bool = False
    allow_direct: bool = True
    allow_rollup_hdrs: bool = False
    allow_msg_ttl: bool = False
    allow_atomic: bool = False
    """Atomic batches; server 2.12."""
    allow_batched: bool = False
    """Fast-ingest batches; server 2.14."""
    mirror: Mirror | None = None

    def config(self) -> dict[str, Any]:
        """The body of STREAM.CREATE, without values that are the server's defaults."""
        fields = msgspec.structs.asdict(self)
        del fields["what"], fields["pool"], fields["mirror"]
        body = {key: value for key, value in fields.items() if value not in (0, False, UNLIMITED)}
        body |= {"retention": "limits", "storage": "file"}
        if self.mirror is None:
            return body | {"subjects": list(self.subjects)}
        del body["subjects"]
        return body | {"mirror": _mirror_config(self, self.mirror)}


def log_stream(
    name: str,
    subject: str,
    *,
    max_age_s: int,
    max_bytes: int,
    replicas: int,
    what: What = "request log",
    pool: str = "",
) -> StreamSpec:
    """A stream that keeps events until they are too old or too many."""
    return StreamSpec(
        name=name,
        what=what,
        pool=pool,
        subjects=(subject,),
        discard="old",
        num_replicas=replicas,
        max_age=max_age_s * SECOND_NS,
        max_bytes=max_bytes,
        duplicate_window=DUPLICATE_WINDOW_S * SECOND_NS,
        allow_atomic=True,
        allow_batched=True,
    )


def table_stream(bucket: str, replicas: int, what: What = "leases") -> StreamSpec:
    """A KV bucket, readable by the stock tools: one value per key, per-key time to live, delete markers."""
    return StreamSpec(
        name=subjects.table_stream(bucket),
        what=what,
        subjects=(subjects.table_subject(bucket, ">"),),
        discard="new",
        num_replicas=replicas,
        max_msgs_per_subject=1,
        subject_delete_marker_ttl=SECOND_NS,
        deny_delete=True,
        allow_rollup_hdrs=True,
        allow_msg_ttl=True,
    )


def blob_stream(bucket: str, replicas: int) -> StreamSpec:
    """An object store bucket, readable by the stock tools."""
    return StreamSpec(
        name=subjects.object_stream(bucket),
        what="objects",
        subjects=(subjects.object_chunks(bucket, ">"), subjects.object_meta(bucket, ">")),
        discard="new",
        num_replicas=replicas,
        allow_rollup_hdrs=True,
    )


def stored_stream(bucket: str, replicas: int, max_bytes: int) -> StreamSpec:
    """A KV bucket with a byte bound, at which it discards the oldest values. Expired values leave no markers, as it is not watched."""
    return StreamSpec(
        name=subjects.table_stream(bucket),
        what="stored responses",
        subjects=(subjects.table_subject(bucket, ">"),),
        discard="old",
        num_replicas=replicas,
        max_bytes=max_bytes,
        max_msgs_per_subject=1,
        deny_delete=True,
        allow_rollup_hdrs=True,
        allow_msg_ttl=True,
    )


def namespace_streams(ns: str, replicas: int, sizes: StreamSizes = STREAM_SIZES) -> list[StreamSpec]:
    """The streams that every process of a namespace needs."""
    return [
        table_stream(subjects.lease_bucket(ns), replicas, "leases"),
        table_stream(subjects.card_bucket(ns), replicas, "model cards"),
        table_stream(subjects.api_key_bucket(ns), replicas, "API keys"),
        table_stream(subjects.secret_bucket(ns), replicas, "secrets"),
        table_stream(subjects.video_bucket(ns), replicas, "video jobs"),
        blob_stream(subjects.blob_bucket(ns), replicas),
        stored_stream(subjects.stored_bucket(ns), replicas, sizes.stored),
        log_stream(
            subjects.request_stream(ns),
            subjects.request_filter(ns),
            max_age_s=REQUEST_MAX_AGE_S,
            max_bytes=sizes.requests,
            replicas=replicas,
        ),
    ]


def pool_log_stream(ns: str, pool: str, replicas: int, sizes: StreamSizes = STREAM_SIZES) -> StreamSpec:
    """The log of one pool."""
    return log_stream(
        subjects.pool_stream(ns, pool),
        subjects.pool_filter(ns, pool),
        max_age_s=POOL_MAX_AGE_S,
        max_bytes=sizes.pool,
        replicas=replicas,
        what="pool log",
        pool=pool,
    )


# Mirrors (see headwater.events.jetstream.copies).


def mirrored(original: StreamSpec, mirror: Mirror) -> StreamSpec:
    """The specification of a copy: without what belongs to writing."""
    return msgspec.structs.replace(
        original,
        mirror=mirror,
        duplicate_window=0,
        subject_delete_marker_ttl=0,
        allow_atomic=False,
        allow_batched=False,
    )


def _mirror_config(spec: StreamSpec, mirror: Mirror) -> dict[str, Any]:
    body: dict[str, Any] = {"name": spec.name, "external": {"api": f"$JS.{mirror.site}.API"}}
    if mirror.kinds:
        # A subject that is mapped to itself: a mirror has one filter, or any number of these.
        [log] = spec.subjects
        of_kinds = [log.removesuffix(">") + f"{kind}.>" for kind in mirror.kinds]
        body["subject_transforms"] = [{"src": subject, "dest": subject} for subject in of_kinds]
    return body


def mirror_of(config: Mapping[str, Any]) -> Mirror | None:
    """What a stream with this configuration mirrors; None for no mirror. An operator's own mirror may be within one domain: "" then."""
    mirror_config = config.get("mirror")
    if not mirror_config:
        return None
    prefix = (mirror_config.get("external") or {}).get("api", "")
    site = prefix.removeprefix("$JS.").removesuffix(".API") if prefix else ""
    kinds = tuple(
        transform["src"].split(".")[-2] for transform in mirror_config.get("subject_transforms") or ()
    )
    return Mirror(site, kinds)


# Differences of a stream from its specification, and the consequences of altering it.

Cost = Literal["safe", "would lose", "promotes", "cannot"]
"""safe: altered in place, without loss of messages. would lose: the server would accept it and delete stored
messages. promotes: the stream stops being a copy of another. cannot: the server rejects it on an existing stream."""


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
_WRITERS = ("duplicate_window", "subject_delete_marker_ttl")


def compare(spec: StreamSpec, info: Mapping[str, Any]) -> list[StreamDifference]:
    """Every difference between `spec` and the stream in a STREAM.INFO reply."""
    config, state = info["config"], info["state"]
    differences = [
        *_kind(config),
        *_origin(spec, config),
        *_subjects(spec, config),
        *_limits(spec, config, state, info.get("ts", "")),
        *_flags(spec, config),
    ]
    return [_as_the_server_takes_it(difference, config) for difference in differences]


def repairable(differences: list[StreamDifference], *, limits: bool = True) -> list[StreamDifference]:
    """The differences that are altered automatically: without loss, and not set by an operator."""
    return [
        difference
        for difference in differences
        if difference.cost == "safe" and not difference.operators and (limits or not difference.limit)
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
    if config.get("allow_msg_counter"):
        yield StreamDifference("allow_msg_counter", True, False, "cannot")


def _origin(spec: StreamSpec, config: Mapping[str, Any]) -> Iterator[StreamDifference]:
    """A mirror's configuration can be removed, and not altered otherwise."""
    has = mirror_of(config)
    if has != spec.mirror:
        name = (config.get("mirror") or {}).get("name", "")
        yield StreamDifference("mirror", name, "", "cannot" if spec.mirror else "promotes")


def _subjects(spec: StreamSpec, config: Mapping[str, Any]) -> Iterator[StreamDifference]:
    if config.get("mirror"):
        # It has those of its origin, and is given its own when it stops being a mirror.
        return
    has = list(config.get("subjects") or [])
    missing = [subject for subject in spec.subjects if not any(covers(other, subject) for other in has)]
    if missing:
        # The server rejects overlapping subjects: a narrower one is replaced by ours.
        remaining = [other for other in has if not any(covers(subject, other) for subject in missing)]
        yield StreamDifference("subjects", has, remaining + missing, "safe")
    elif set(has) != set(spec.subjects):
        yield StreamDifference("subjects", has, list(spec.subjects), "safe", operators=True)


def covers(pattern: str, subject: str) -> bool:
    """Does every subject that `subject` matches also match `pattern`? Both may have wildcards."""
    pattern_tokens, subject_tokens = pattern.split("."), subject.split(".")
    for at, token in enumerate(pattern_tokens):
        if token == ">":
            return len(subject_tokens) > at
        if (
            at >= len(subject_tokens)
            or subject_tokens[at] == ">"
            or (token != "*" and token != subject_tokens[at])
        ):
            return False
    return len(pattern_tokens) == len(subject_tokens)


def _limits(
    spec: StreamSpec, config: Mapping[str, Any], state: Mapping[str, Any], now: str
) -> Iterator[StreamDifference]:
    replicas = int(config.get("num_replicas", 1))
    if replicas != spec.num_replicas:
        more = replicas > spec.num_replicas
        yield StreamDifference("num_replicas", replicas, spec.num_replicas, "safe", operators=more)
    for field, limit in (
        ("max_age", spec.max_age),
        ("max_bytes", spec.max_bytes),
        ("max_msgs", UNLIMITED),
        (_PER_SUBJECT, spec.max_msgs_per_subject),
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
    if spec.duplicate_window and window != spec.duplicate_window:
        more = window > spec.duplicate_window
        yield StreamDifference(
            "duplicate_window", window, spec.duplicate_window, "safe", operators=more, limit=True
        )
    if config.get("discard") != spec.discard:
        yield StreamDifference("discard", config.get("discard"), spec.discard, "safe", limit=True)


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


def _flags(spec: StreamSpec, config: Mapping[str, Any]) -> Iterator[StreamDifference]:
    for field in CAPABILITIES:
        want, has = bool(getattr(spec, field)), bool(config.get(field))
        if want != has:
            yield StreamDifference(field, has, want, "safe", operators=has)
    for field in FORBIDDEN:
        if config.get(field):
            yield StreamDifference(field, True, False, "safe")
    ttl = int(config.get("subject_delete_marker_ttl", 0))
    if spec.subject_delete_marker_ttl and ttl != spec.subject_delete_marker_ttl:
        yield StreamDifference("subject_delete_marker_ttl", ttl, spec.subject_delete_marker_ttl, "safe")
    if bool(config.get("deny_delete")) != spec.deny_delete:
        # It cannot be unset; Headwater deletes no single messages.
        yield StreamDifference(
            "deny_delete",
            not spec.deny_delete,
            spec.deny_delete,
            "safe" if spec.deny_delete else "cannot",
            operators=not spec.deny_delete,
        )
    if config.get("deny_purge"):
        # Replacing a value of a table or an object purges the old one; a log is never purged.
        yield StreamDifference("deny_purge", True, False, "cannot", operators=not spec.allow_rollup_hdrs)


def _as_the_server_takes_it(difference: StreamDifference, config: Mapping[str, Any]) -> StreamDifference:
    """Alterations that are rejected on a stream with these settings."""
    purged = difference.field in ("allow_rollup_hdrs", "subject_delete_marker_ttl") and config.get(
        "deny_purge"
    )
    unsynced = difference.field == "allow_atomic" and config.get("persist_mode") == "async"
    mirrored = difference.field in ("allow_atomic", "allow_batched", *_WRITERS) and config.get("mirror")
    if difference.cost == "safe" and not difference.operators and (purged or unsynced or mirrored):
        return msgspec.structs.replace(difference, cost="cannot")
    return difference
