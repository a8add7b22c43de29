"""Specifications of the streams of a namespace, as values."""

from typing import Any, Literal

import msgspec

from headwater.events.jetstream.api import SECOND_NS
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

    def config(self) -> dict[str, Any]:
        """The body of STREAM.CREATE, without values that are the server's defaults."""
        given = msgspec.structs.asdict(self)
        del given["what"], given["pool"]
        body = {key: value for key, value in given.items() if value not in (0, False, UNLIMITED)}
        return body | {"subjects": list(self.subjects), "retention": "limits", "storage": "file"}


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
