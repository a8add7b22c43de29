"""The only place that spells a subject, a stream or a bucket.

Subjects carry workers and actors, never requests or block hashes: the server keeps the subject index in
memory, so its size must follow the fleet and not the traffic.

========================================= ============ ====================================================
subject                                   carried by   what
========================================= ============ ====================================================
hw.<ns>.pool.<pool>.<kind>.<writer>       JetStream    fleet, kv, load, route and shadow events of one pool
hw.<ns>.digest.<pool>                     core NATS    state digests of the pool's routers, for each other
hw.<ns>.req.<edge>                        JetStream    the life of requests, by the edge that accepted them
hw.<ns>.route.<pool>                      core NATS    route query; one router of the queue group answers
hw.<ns>.wait.<pool>.<router>.<epoch>      core NATS    asks the router with which a query waits what became of it
hw.<ns>.engine.<worker>.<epoch>.<verb>    core NATS    generate, cancel, status, embed, drain, claim (of a hand-off)
hw.<ns>.worker.<worker>.resync            core NATS    asks a worker, in whatever life, to announce itself anew
hw.<ns>.worker.<worker>.control           core NATS    an operator's commands to a worker, in whatever life
hw.<ns>.edge.<edge>.frames                core NATS    token frames: one message per edge and engine step
$SRV.PING|INFO|STATS[.<name>[.<id>]]      core NATS    service discovery, as the stock `nats` tool asks it
_INBOX_<ns>_<kind>.<name>.<part>.>        core NATS    replies to one connection; nobody else may read them
========================================= ============ ====================================================
"""

from hashlib import blake2b
from typing import Final, Literal

from headwater.schemas.names import slug, token

PoolKind = Literal["fleet", "kv", "load", "route", "shadow"]
InboxKind = Literal["edge", "router", "shadow", "worker", "operator", "admin", "observer"]
EngineVerb = Literal["generate", "cancel", "status", "embed", "drain", "claim"]

POOL_KINDS: Final[tuple[PoolKind, ...]] = ("fleet", "kv", "load", "route", "shadow")


def pool_stream(ns: str, pool: str) -> str:
    """Stream that holds everything a routing decision in `pool` depends on, in one total order."""
    return pool_stream_prefix(ns) + token("pool", pool)


def pool_stream_prefix(ns: str) -> str:
    """Names of a namespace's pool streams start with this; the rest is the pool."""
    return f"HW_{token('namespace', ns)}_POOL_"


def in_namespace(ns: str, subject: str) -> bool:
    """Is it one of this namespace's log or bus subjects?"""
    return subject.startswith(f"hw.{token('namespace', ns)}.")


def pool_filter(ns: str, pool: str) -> str:
    """All subjects of one pool log."""
    return f"hw.{token('namespace', ns)}.pool.{token('pool', pool)}.>"


def pool_subject(ns: str, pool: str, kind: PoolKind, writer: str) -> str:
    """Subject of one writer's events of one kind. Fencing and order are per such subject."""
    return f"hw.{token('namespace', ns)}.pool.{token('pool', pool)}.{kind}.{token('writer', writer)}"


def pool_kind(subject: str) -> str:
    """Kind of a pool log subject: fleet, kv, load, route or shadow."""
    return subject.rsplit(".", 2)[1]


def writer_of(subject: str) -> str:
    """Name of the writer whose subject this is."""
    return subject.rsplit(".", 1)[1]


def request_stream(ns: str) -> str:
    """Stream with the life of every request."""
    return f"HW_{token('namespace', ns)}_REQ"


def request_filter(ns: str) -> str:
    """All subjects of the request log."""
    return f"hw.{token('namespace', ns)}.req.>"


def request_subject(ns: str, edge: str) -> str:
    """Subject of the requests that one edge accepted."""
    return f"hw.{token('namespace', ns)}.req.{token('edge', edge)}"


def route_query(ns: str, pool: str) -> str:
    """Where an edge asks for a decision; routers of the pool subscribe in one queue group."""
    return f"hw.{token('namespace', ns)}.route.{token('pool', pool)}"


def digests(ns: str, pool: str) -> str:
    """Where a pool's routers tell each other the digests of their states."""
    return f"hw.{token('namespace', ns)}.digest.{token('pool', pool)}"


def route_wait(ns: str, pool: str, router: str, epoch: int) -> str:
    """Where an edge asks one life of a router after a query that waits with it."""
    return f"hw.{token('namespace', ns)}.wait.{token('pool', pool)}.{token('router', router)}.{epoch}"


def engine(ns: str, worker: str, epoch: int, verb: EngineVerb) -> str:
    """Direct subject of one incarnation of a worker. A new epoch is a new subject."""
    return f"hw.{token('namespace', ns)}.engine.{token('worker', worker)}.{epoch}.{verb}"


def resync(ns: str, worker: str) -> str:
    """Where a worker is asked to announce itself and its cache anew. Not by epoch: who asks may not know it."""
    return f"hw.{token('namespace', ns)}.worker.{token('worker', worker)}.resync"


def control(ns: str, worker: str) -> str:
    """Where a worker takes an operator's commands. Not by epoch: they are meant for the worker, whoever it is now."""
    return f"hw.{token('namespace', ns)}.worker.{token('worker', worker)}.control"


def edge_frames(ns: str, edge: str) -> str:
    """Where engines send token frames for one edge process."""
    return f"hw.{token('namespace', ns)}.edge.{token('edge', edge)}.frames"


def lease_bucket(ns: str) -> str:
    """KV bucket of leases: who is alive."""
    return f"HW_{token('namespace', ns)}_LEASE"


def lease_key(kind: Literal["worker", "router", "edge", "shadow"], name: str) -> str:
    """Key of one lease."""
    return f"{kind}.{token(kind, name)}"


def card_bucket(ns: str) -> str:
    """KV bucket of model cards."""
    return f"HW_{token('namespace', ns)}_CARD"


def card_key(pool: str) -> str:
    """Key of a pool's model card."""
    return token("pool", pool)


def adapter_key(pool: str, name: str) -> str:
    """Key of a LoRA adapter's card, among the model cards. Adapters have names of any form: the key is a digest."""
    return f"{token('pool', pool)}.lora.{blake2b(name.encode(), digest_size=8).hexdigest()}"


def card_pool(key: str) -> str:
    """The pool of a model card with this key, empty for an adapter's card."""
    return "" if "." in key else key


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
    """Object names of the chunks of a pool's snapshots start with this. Not among the snapshots: those are listed."""
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
