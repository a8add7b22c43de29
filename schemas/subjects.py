"""The only place that spells a subject, a stream or a bucket.

Subjects contain workers and actors, never requests or block hashes: the server keeps the subject index in memory, so its
size must grow with the fleet and not with the traffic. The exceptions are objects whose number a byte bound limits: files,
snapshots, and the stored responses and video jobs of clients.

========================================= ============ ====================================================
subject                                   carried by   content
========================================= ============ ====================================================
hw.<ns>.pool.<pool>.<kind>.<writer>       JetStream    fleet, kv, load, route and shadow events of one pool
hw.<ns>.digest.<pool>                     core NATS    state digests that the pool's routers exchange
hw.<ns>.req.<edge>                        JetStream    request lifecycle events, by the edge that accepted them
hw.<ns>.route.<pool>                      core NATS    route query; one router of the queue group answers
hw.<ns>.wait.<pool>.<router>.<epoch>      core NATS    poll of a query in one router's admission queue
hw.<ns>.weights.<pool>                    core NATS    an operator's engine weights; one router of the queue group answers
hw.<ns>.split.<pool>                      core NATS    an operator's traffic splits; one router of the queue group answers
hw.<ns>.engine.<worker>.<epoch>.<verb>    core NATS    generate, cancel, status, embed, encode, file (to generate), drain, claim (of a hand-off), offer (of a tensor)
hw.<ns>.worker.<worker>.resync            core NATS    requests that a worker reannounces itself, at any epoch
hw.<ns>.worker.<worker>.control           core NATS    an operator's commands to a worker, at any epoch
hw.<ns>.edge.<edge>.frames                core NATS    token frames: one message per edge and engine step
hw.<ns>.edge.<edge>.media                 core NATS    queries of workers for media of the edge's requests
hw.<ns>.edge.<edge>.offer                 core NATS    claims and releases of media that the edge offers to workers
hw.<ns>.edge.<edge>.streams.<epoch>       core NATS    queries of workers whether one incarnation of the edge still receives what they generate for it
hw.<ns>.usage.<edge>                      core NATS    what an edge's clients use of their rate limits, for the other edges
$SRV.PING|INFO|STATS[.<name>[.<id>]]      core NATS    service discovery, as the stock `nats` tool sends it
_INBOX_<ns>_<kind>.<name>.<part>.>        core NATS    replies to one connection; no other client may read them
========================================= ============ ====================================================
"""

from hashlib import blake2b
from typing import Final, Literal, get_args

from headwater.schemas.names import slug, token

PoolKind = Literal["fleet", "kv", "load", "route", "shadow"]
InboxKind = Literal[
    "edge", "router", "shadow", "worker", "operator", "admin", "console", "tracer", "picker", "observer"
]
LeaseKind = Literal["worker", "router", "edge", "shadow"]
EngineVerb = Literal["generate", "cancel", "status", "embed", "encode", "file", "drain", "claim", "offer"]

POOL_KINDS: Final[tuple[PoolKind, ...]] = get_args(PoolKind)


class Wildcard(str):
    """A token that matches any other. Its type sets `ANY` apart from names, which may not be `*`."""


ANY: Final = Wildcard("*")
"""Stands in place of a name: the pattern of all subjects of that form."""


def matches(pattern: str, subject: str) -> bool:
    """Does a subject match a pattern with '*' for one token and '>' for all remaining ones?"""
    pattern_parts, subject_parts = pattern.split("."), subject.split(".")
    for number, part in enumerate(pattern_parts):
        if part == ">":
            return len(subject_parts) > number
        if number >= len(subject_parts) or part not in ("*", subject_parts[number]):
            return False
    return len(pattern_parts) == len(subject_parts)


def _token(kind: str, name: str) -> str:
    """One token: a checked name, or `ANY`. Raises `InvalidName`."""
    return name if isinstance(name, Wildcard) else token(kind, name)


def _ours(ns: str, *parts: str) -> str:
    """A subject of a namespace."""
    return ".".join(("hw", token("namespace", ns), *parts))


STORED: Final = ("hw.*.pool.>", "hw.*.req.>", "$O.>")
"""What streams of any namespace take, except for tables. Leaf nodes do not carry it: a stream at the other end would take it, and acknowledge it,
too. Messages for tables they do not carry by themselves.
"""


def pool_stream(ns: str, pool: str) -> str:
    """Stream with everything that a routing decision in `pool` depends on, in one total order."""
    return pool_stream_prefix(ns) + token("pool", pool)


def pool_stream_prefix(ns: str) -> str:
    """Names of a namespace's pool streams start with this; the rest is the pool."""
    return f"HW_{token('namespace', ns)}_POOL_"


def in_namespace(ns: str, subject: str) -> bool:
    """Is it one of this namespace's log or bus subjects?"""
    return subject.startswith(_ours(ns, ""))


def pool_filter(ns: str, pool: str) -> str:
    """All subjects of one pool log."""
    return _ours(ns, "pool", token("pool", pool), ">")


def pool_subject(ns: str, pool: str, kind: PoolKind, writer: str) -> str:
    """Subject of one writer's events of one kind. Fencing and order are per such subject."""
    return _ours(ns, "pool", _token("pool", pool), kind, _token("writer", writer))


def pool_kinds(*kinds: PoolKind) -> list[str]:
    """All subjects of these kinds in a pool's log, whose ever it is."""
    return [f"hw.*.pool.*.{kind}.*" for kind in kinds]


def pool_kind(subject: str) -> str:
    """Kind of a pool log subject: fleet, kv, load, route or shadow."""
    return subject.rsplit(".", 2)[1]


def writer_of(subject: str) -> str:
    """Name of the writer whose subject this is."""
    return subject.rsplit(".", 1)[1]


def request_stream(ns: str) -> str:
    """Stream with the lifecycle of every request."""
    return f"HW_{token('namespace', ns)}_REQ"


def request_filter(ns: str) -> str:
    """All subjects of the request log."""
    return _ours(ns, "req", ">")


def request_subject(ns: str, edge: str) -> str:
    """Subject of the requests that one edge accepted."""
    return _ours(ns, "req", _token("edge", edge))


def edge_media(ns: str, edge: str) -> str:
    """Queries for pieces of the media of an edge's requests."""
    return _ours(ns, "edge", _token("edge", edge), "media")


def edge_offer(ns: str, edge: str) -> str:
    """Claims and releases of an edge's offers of media."""
    return _ours(ns, "edge", _token("edge", edge), "offer")


def route_query(ns: str, pool: str) -> str:
    """Route queries of a pool; its routers subscribe in one queue group."""
    return _ours(ns, "route", _token("pool", pool))


def traffic_split(ns: str, pool: str) -> str:
    """Commands about a pool's traffic splits; its routers subscribe in one queue group."""
    return _ours(ns, "split", _token("pool", pool))


def engine_weights(ns: str, pool: str) -> str:
    """Commands about a pool's engine weights; its routers subscribe in one queue group."""
    return _ours(ns, "weights", _token("pool", pool))


def digests(ns: str, pool: str) -> str:
    """State digests that a pool's routers exchange."""
    return _ours(ns, "digest", _token("pool", pool))


def route_wait(ns: str, pool: str, router: str, epoch: int | Wildcard) -> str:
    """Polls of queries in the admission queue of one router's incarnation."""
    return _ours(ns, "wait", _token("pool", pool), _token("router", router), str(epoch))


def engine(ns: str, worker: str, epoch: int | Wildcard, verb: EngineVerb) -> str:
    """Requests to one incarnation of a worker. A new epoch is a new subject."""
    return _ours(ns, "engine", _token("worker", worker), str(epoch), verb)


def engine_requests(ns: str, worker: str) -> str:
    """All requests to any incarnation of a worker."""
    return _ours(ns, "engine", _token("worker", worker), ">")


def worker_requests(ns: str, worker: str) -> str:
    """All requests to a worker that do not name its epoch."""
    return _ours(ns, "worker", _token("worker", worker), ">")


def resync(ns: str, worker: str) -> str:
    """Requests that a worker reannounces itself and its cache. Without epoch: the sender may not have it."""
    return _ours(ns, "worker", _token("worker", worker), "resync")


def control(ns: str, worker: str) -> str:
    """An operator's commands to a worker. Without epoch: they apply to whichever incarnation runs."""
    return _ours(ns, "worker", _token("worker", worker), "control")


def edge_frames(ns: str, edge: str) -> str:
    """Token frames for one edge process."""
    return _ours(ns, "edge", _token("edge", edge), "frames")


def edge_streams(ns: str, edge: str, epoch: int | Wildcard) -> str:
    """Queries to one incarnation of an edge about its streams. A new epoch is a new subject."""
    return _ours(ns, "edge", _token("edge", edge), "streams", str(epoch))


def usage(ns: str, edge: str) -> str:
    """Return the subject for what the clients of one edge use of their rate limits; all edges listen."""
    return _ours(ns, "usage", _token("edge", edge))


def lease_bucket(ns: str) -> str:
    """KV bucket of leases."""
    return f"HW_{token('namespace', ns)}_LEASE"


def lease_key(kind: LeaseKind, name: str) -> str:
    """Key of one lease."""
    return f"{kind}.{_token(kind, name)}"


def card_bucket(ns: str) -> str:
    """KV bucket of model cards."""
    return f"HW_{token('namespace', ns)}_CARD"


def card_key(pool: str) -> str:
    """Key of a pool's model card."""
    return _token("pool", pool)


def lora_key(pool: str, name: str) -> str:
    """Key of a LoRA adapter's card, among the model cards. Names of adapters have any form: the key is a digest."""
    digest = name if isinstance(name, Wildcard) else blake2b(name.encode(), digest_size=8).hexdigest()
    return f"{_token('pool', pool)}.lora.{digest}"


def card_pool(key: str) -> str:
    """The pool of a model card with this key, empty for a LoRA adapter's card."""
    return "" if "." in key else key


def api_key_bucket(ns: str) -> str:
    """KV bucket of API keys, by id. It has digests of secrets, no secrets."""
    return f"HW_{token('namespace', ns)}_APIKEY"


def secret_bucket(ns: str) -> str:
    """KV bucket of secrets that all edges of a namespace share. No other kind of client may read it."""
    return f"HW_{token('namespace', ns)}_SECRET"


SALT_KEY: Final = "cache-salt"
"""Key of the secret that the cache salts of tenants are derived from."""


def stored_bucket(ns: str) -> str:
    """KV bucket of stored responses and conversations, which is bounded in bytes."""
    return f"HW_{token('namespace', ns)}_STORED"


def stored_object_key(tenant: str, kind: str, digest: str) -> str:
    """Key of a stored object of a tenant. `tenant` is a digest of its name, `digest` that of tenant and id."""
    return f"{token('tenant', tenant)}.{token('kind', kind)}.{token('digest', digest)}"


def stored_object_of(key: str) -> str:
    """Key of the stored object that a message with this key belongs to: the object's own, or one of its chunks."""
    return ".".join(key.split(".")[:3])


def stored_chunk_key(key: str, writing: str, number: int) -> str:
    """Key of a further chunk of a large stored object. `writing` names one version of the object."""
    return f"{key}.{token('writing', writing)}.{number}"


def video_bucket(ns: str) -> str:
    """KV bucket of video jobs."""
    return f"HW_{token('namespace', ns)}_VIDEO"


def video_key(tenant: str, id_: str) -> str:
    """Key of a tenant's video job. `tenant` is a digest of its name."""
    return f"{token('tenant', tenant)}.{token('video', id_)}"


def table_stream(bucket: str) -> str:
    """Stream behind a KV bucket."""
    return f"KV_{bucket}"


def table_subject(bucket: str, key: str) -> str:
    """Subject of one key of a KV bucket; `>`: of all."""
    return f"$KV.{bucket}.{key}"


def object_stream(bucket: str) -> str:
    """Stream behind an object store bucket."""
    return f"OBJ_{bucket}"


def object_chunks(bucket: str, object_id: str) -> str:
    """Subject of the chunks of one object; `>`: of all."""
    return f"$O.{bucket}.C.{object_id}"


def object_meta(bucket: str, encoded_name: str) -> str:
    """Subject of the metadata of one object; `>`: of all."""
    return f"$O.{bucket}.M.{encoded_name}"


def object_subjects(bucket: str) -> str:
    """All subjects of an object store bucket."""
    return f"$O.{bucket}.>"


def blob_bucket(ns: str) -> str:
    """Object store bucket: snapshots, their bookmarks, and tokenizer files."""
    return f"HW_{token('namespace', ns)}_BLOB"


def snapshot_prefix(pool: str) -> str:
    """Object names of a pool's snapshots start with this."""
    return f"snapshot/{token('pool', pool)}/"


def snapshot_name(pool: str, position: int) -> str:
    """Object name of the snapshot at `position`; fixed width, so names sort by position."""
    return f"{snapshot_prefix(pool)}{position:020d}"


def snapshot_position(name: str) -> int:
    """Position of the snapshot with this object name."""
    return int(name.rsplit("/", 1)[1])


def snapshot_chunk_prefix(pool: str) -> str:
    """Object names of the chunks of a pool's snapshots start with this. Snapshots have another prefix: they are listed."""
    return f"snapshot-chunk/{token('pool', pool)}/"


def snapshot_chunk(pool: str, position: int, writing: str, number: int) -> str:
    """Object name of one chunk. `writing` names one attempt to save, so that no two ever share an object."""
    return f"{snapshot_chunk_prefix(pool)}{position:020d}/{token('writing', writing)}/{number:04d}"


def bookmark_prefix(pool: str) -> str:
    """Object names of a pool's bookmarks start with this."""
    return f"snapshot-bookmark/{token('pool', pool)}/"


def bookmark_name(pool: str, name: str) -> str:
    """Object name of one bookmark."""
    return f"{bookmark_prefix(pool)}{token('bookmark', name)}"


def artifact_name(digest: str) -> str:
    """Object name of a file by its SHA-256 (tokenizer, chat template)."""
    return f"artifact/{digest}"


def service(verb: Literal["PING", "INFO", "STATS"], name: str = "", service_id: str = "") -> str:
    """Subject of the NATS services protocol (ADR-32)."""
    return ".".join(part for part in ("$SRV", verb, name, service_id) if part)


def inbox_root(ns: str, kind: InboxKind) -> str:
    """First token of the inboxes of all clients of a kind."""
    return f"_INBOX_{token('namespace', ns)}_{kind}"


def inbox(ns: str, kind: InboxKind, name: str, part: str) -> str:
    """Prefix of the inboxes of one connection: the `part` (bus, log) of the client `name`."""
    return f"{inbox_root(ns, kind)}.{token(kind, name)}.{token('part', part)}"


def loose_inbox(name: str) -> str:
    """Prefix of the inboxes of a connection that belongs to no namespace, such as a test's."""
    return f"_INBOX_loose.{slug(name)}"
