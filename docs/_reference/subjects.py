"""Subjects, streams, buckets and permissions, from `schemas/subjects.py`, the stream specifications and the rights."""

import re
from itertools import pairwise

from docs._reference.markdown import code, table
from headwater.events.jetstream import stream_spec
from headwater.events.jetstream.api import SECOND_NS
from headwater.schemas import permissions, subjects

NS, POOL = "NS", "POOL"
_HEAD = """
# Subjects and streams

`NS` is the namespace (`--namespace`), `POOL` a pool. Subjects carry workers and actors, never requests or block hashes: the server keeps the subject
index in memory.

## Subjects
"""


def page() -> str:
    """The whole page."""
    parts = [
        _HEAD,
        table(("subject", "carried by", "what"), _subjects()),
        "## Streams and buckets",
        _streams(),
        "## Permissions",
        "What `headwater nats-config` permits each kind of client.",
        *(_rights(kind) for kind in permissions.KINDS),
    ]
    return "\n\n".join(parts)


def _subjects() -> list[tuple[str, str, str]]:
    """Rows of the table in the module's docstring."""
    lines = (subjects.__doc__ or "").splitlines()
    rules = [line for line in lines if re.fullmatch(r"=+( =+)+", line)]
    starts = [match.start() for match in re.finditer("=+", rules[0])]
    inside = lines[lines.index(rules[0]) + 3 : len(lines) - 1 - lines[::-1].index(rules[0])]
    cuts = [*pairwise(starts), (starts[-1], None)]
    rows = [[line[a:b].strip() for a, b in cuts] for line in inside]
    return [(code(subject), carried, what) for subject, carried, what in rows]


def _streams() -> str:
    made = [stream_spec.pool_log_stream(NS, POOL, 1), *stream_spec.namespace_streams(NS, 1)]
    rows = []
    for stream in made:
        features = [
            name
            for name in ("allow_atomic", "allow_batched", "allow_msg_ttl", "allow_rollup_hdrs", "deny_delete")
            if getattr(stream, name)
        ]
        rows.append(
            (
                code(stream.name),
                stream.what,
                " ".join(code(subject) for subject in stream.subjects),
                _kept(stream),
                " ".join(code(feature) for feature in features),
            )
        )
    return table(("stream", "what", "subjects", "kept", "features"), rows)


def _kept(stream: stream_spec.StreamSpec) -> str:
    parts = []
    if stream.max_age:
        parts.append(f"{stream.max_age // SECOND_NS // 3600} h")
    if stream.max_bytes != stream_spec.UNLIMITED:
        parts.append(f"{stream.max_bytes // 1024**3} GiB")
    if stream.max_msgs_per_subject != stream_spec.UNLIMITED:
        parts.append(f"{stream.max_msgs_per_subject} per key")
    return ", ".join(parts)


def _rights(kind: permissions.Kind) -> str:
    given = permissions.rights(NS, kind)
    rows = [
        ("publish", "<br>".join(code(subject) for subject in given.publish)),
        ("subscribe", "<br>".join(code(subject) for subject in given.subscribe)),
    ]
    if given.deny_publish:
        rows.append(("never publish", "<br>".join(code(subject) for subject in given.deny_publish)))
    if given.answers:
        rows.append(("reply", f"one reply to each message received, within {permissions.REPLY_EXPIRES}"))
    return f"### {kind}\n\n{permissions.DUTIES[kind]}\n\n{table(('right', 'subjects'), rows)}"
