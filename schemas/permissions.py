"""What each kind of client may publish and subscribe to on the server: the least that its work needs.

A subject permission knows whole tokens only. So a pool's stream, whose name holds the pool, is allowed by name
where the pools are known and by `*` where not; then the namespace's other streams are denied where they must
not be read. Reply subjects need no right of their own: the server does not check them.
"""

from typing import Final, Literal, NamedTuple

from headwater.schemas import subjects
from headwater.schemas.names import PROBE, token
from headwater.schemas.subjects import EngineVerb, InboxKind, PoolKind

Kind = Literal["edge", "router", "shadow", "worker", "operator", "admin", "observer"]

KINDS: Final[tuple[Kind, ...]] = ("edge", "router", "shadow", "worker", "operator", "admin", "observer")

DUTIES: Final[dict[Kind, str]] = {
    "edge": "ask routers and workers, write and read the request log, read leases, model cards and their files",
    "router": "answer routing queries, write route and fleet events, read the pool log, keep snapshots",
    "shadow": "write shadow events, read the pool log and the routers' snapshots",
    "worker": "take requests, send tokens, hand KV over, write its fleet, kv and load events, write and read cards",
    "operator": "make and change streams, read everything, control workers; writes no events, only empty messages "
    "that show whether a log takes any",
    "admin": "control workers, read leases; for the admin port, which shall not hold an operator's key",
    "observer": "read streams and statistics; writes nothing",
}
"""What each kind does, in a line."""

REPLY_EXPIRES: Final = "1m"
"""How long a worker may answer a message after it came."""

_ANY: Final = "*"


class Rights(NamedTuple):
    """Subject patterns. `answers` also allows one reply to each message received, within `REPLY_EXPIRES`."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    deny_publish: tuple[str, ...] = ()
    answers: bool = False


class _Streams(NamedTuple):
    """Names of the streams of a namespace."""

    leases: str
    cards: str
    blobs: str
    requests: str
    pools: tuple[str, ...]


def rights(ns: str, kind: Kind, *, name: str = "", pools: tuple[str, ...] = ()) -> Rights:
    """Rights of the client `name` of a kind (empty: of all of that kind), over `pools` (empty: over all).

    Raises `InvalidName`.
    """
    token("namespace", ns)
    who = token(kind, name) if name else _ANY
    made = {
        "edge": _edge,
        "router": _router,
        "shadow": _shadow,
        "worker": _worker,
        "operator": _operator,
        "admin": _admin,
    }.get(kind, _observer)
    return made(ns, who, tuple(token("pool", pool) for pool in pools))


def _edge(ns: str, who: str, pools: tuple[str, ...]) -> Rights:
    streams = _streams(ns, pools)
    verbs: tuple[EngineVerb, ...] = ("generate", "cancel", "status", "embed")
    return Rights(
        publish=(
            *(f"hw.{ns}.route.{pool}" for pool in pools or (_ANY,)),
            *(f"hw.{ns}.wait.{pool}.*.*" for pool in pools or (_ANY,)),
            *(f"hw.{ns}.engine.*.*.{verb}" for verb in verbs),
            f"hw.{ns}.req.{who}",
            f"$KV.{subjects.lease_bucket(ns)}.edge.{who}",
            *_look(streams.leases, streams.cards, streams.blobs, streams.requests),
            *_read(streams.leases, streams.cards, streams.blobs, streams.requests),
            *_answer(ns, "operator", "observer"),
        ),
        subscribe=(_inbox(ns, "edge", who), f"hw.{ns}.edge.{who}.frames", *_services("edge", who)),
    )


def _router(ns: str, who: str, pools: tuple[str, ...]) -> Rights:
    streams = _streams(ns, pools)
    blobs = subjects.blob_bucket(ns)
    return Rights(
        publish=(
            *_events(ns, pools, ("route", "fleet"), who),
            *(f"hw.{ns}.digest.{pool}" for pool in pools or (_ANY,)),
            f"hw.{ns}.worker.*.resync",
            f"$KV.{subjects.lease_bucket(ns)}.router.{who}",
            f"$O.{blobs}.>",
            f"$JS.API.STREAM.PURGE.{streams.blobs}",
            *_look(streams.leases, streams.cards, streams.blobs, *streams.pools),
            _info(streams.requests),
            *_read(streams.leases, streams.cards, streams.blobs, *streams.pools),
            *_answer(ns, "edge", "operator", "observer"),
        ),
        subscribe=(
            _inbox(ns, "router", who),
            *(f"hw.{ns}.route.{pool}" for pool in pools or (_ANY,)),
            *(f"hw.{ns}.digest.{pool}" for pool in pools or (_ANY,)),
            *(f"hw.{ns}.wait.{pool}.{who}.*" for pool in pools or (_ANY,)),
            *_services("router", who),
        ),
        deny_publish=_no_reading(streams.requests),
    )


def _shadow(ns: str, who: str, pools: tuple[str, ...]) -> Rights:
    streams = _streams(ns, pools)
    return Rights(
        publish=(
            # A subject kind of its own, so that it can not pass for a router.
            *_events(ns, pools, ("shadow",), who),
            f"$KV.{subjects.lease_bucket(ns)}.shadow.{who}",
            *_look(streams.leases, streams.cards, streams.blobs, *streams.pools),
            _info(streams.requests),
            *_read(streams.leases, streams.cards, streams.blobs, *streams.pools),
            *_answer(ns, "operator", "observer"),
        ),
        subscribe=(_inbox(ns, "shadow", who), *_services("shadow", who)),
        deny_publish=_no_reading(streams.requests),
    )


def _worker(ns: str, who: str, pools: tuple[str, ...]) -> Rights:
    streams = _streams(ns, pools)
    return Rights(
        publish=(
            *_events(ns, pools, ("fleet", "kv", "load"), who),
            f"hw.{ns}.edge.*.frames",
            # A decode worker claims the KV of its prompt from the worker that computed it.
            f"hw.{ns}.engine.*.*.claim",
            f"$KV.{subjects.lease_bucket(ns)}.worker.{who}",
            *(f"$KV.{subjects.card_bucket(ns)}.{pool}" for pool in pools or (_ANY,)),
            *(f"$KV.{subjects.card_bucket(ns)}.{pool}.lora.*" for pool in pools or (_ANY,)),
            f"$O.{subjects.blob_bucket(ns)}.>",
            # Two workers may store the same file at once, and the later one takes the earlier one's bytes away.
            # No more power than the bucket's subjects give: a roll-up header deletes as well.
            f"$JS.API.STREAM.PURGE.{streams.blobs}",
            *_look(streams.leases, streams.cards, streams.blobs, *streams.pools),
            # It follows the cards: a forgotten adapter goes everywhere.
            *_read(streams.cards),
            _info(streams.requests),
        ),
        subscribe=(
            _inbox(ns, "worker", who),
            f"hw.{ns}.engine.{who}.>",
            f"hw.{ns}.worker.{who}.>",
            *_services("worker", who),
        ),
        deny_publish=_no_reading(streams.requests),
        # Exact, and affordable here only: the server remembers every message with a reply subject, and each
        # one read from a stream has one. A worker reads no log, only the few cards.
        answers=True,
    )


def _operator(ns: str, who: str, pools: tuple[str, ...]) -> Rights:
    del pools
    verbs: tuple[EngineVerb, ...] = ("cancel", "status", "drain")
    return Rights(
        publish=(
            "$JS.API.>",
            f"$KV.{subjects.lease_bucket(ns)}.>",
            f"$KV.{subjects.card_bucket(ns)}.>",
            f"$O.{subjects.blob_bucket(ns)}.>",
            # See headwater.events.jetstream.stream_probe.
            f"hw.{ns}.pool.*.load.{PROBE}",
            f"hw.{ns}.req.{PROBE}",
            f"hw.{ns}.route.*",
            *(f"hw.{ns}.engine.*.*.{verb}" for verb in verbs),
            f"hw.{ns}.worker.*.resync",
            f"hw.{ns}.worker.*.control",
            "$SRV.>",
        ),
        subscribe=(_inbox(ns, "operator", who), "$JS.EVENT.>"),
    )


def _admin(ns: str, who: str, pools: tuple[str, ...]) -> Rights:
    streams = _streams(ns, pools)
    return Rights(
        publish=(
            f"hw.{ns}.worker.*.control",
            *_look(streams.leases),
            *_read(streams.leases),
            # That they are there, as every process looks at its start.
            *(_info(stream) for stream in (streams.cards, streams.blobs, streams.requests)),
        ),
        subscribe=(_inbox(ns, "admin", who),),
    )


def _observer(ns: str, who: str, pools: tuple[str, ...]) -> Rights:
    streams = _streams(ns, pools)
    everything = (streams.leases, streams.cards, streams.blobs, streams.requests, *streams.pools)
    return Rights(
        publish=(
            "$JS.API.INFO",
            "$JS.API.STREAM.NAMES",
            "$JS.API.STREAM.LIST",
            *_look(*everything),
            *_read(*everything),
            "$SRV.>",
        ),
        subscribe=(_inbox(ns, "observer", who), "$JS.EVENT.>"),
    )


def _streams(ns: str, pools: tuple[str, ...]) -> _Streams:
    return _Streams(
        f"KV_{subjects.lease_bucket(ns)}",
        f"KV_{subjects.card_bucket(ns)}",
        f"OBJ_{subjects.blob_bucket(ns)}",
        subjects.request_stream(ns),
        tuple(subjects.pool_stream(ns, pool) for pool in pools) or (_ANY,),
    )


def _inbox(ns: str, kind: InboxKind, who: str) -> str:
    return f"{subjects.inbox_root(ns, kind)}.{who}.>"


def _answer(ns: str, *kinds: InboxKind) -> tuple[str, ...]:
    """Replies to these kinds' questions."""
    return tuple(f"{subjects.inbox_root(ns, kind)}.>" for kind in kinds)


def _services(kind: str, who: str) -> tuple[str, ...]:
    """Where an actor answers service discovery."""
    scopes = ("", f".headwater-{kind}", f".headwater-{kind}.{who}")
    return tuple(f"$SRV.{verb}{scope}" for verb in ("PING", "INFO", "STATS") for scope in scopes)


def _events(ns: str, pools: tuple[str, ...], kinds: tuple[PoolKind, ...], who: str) -> tuple[str, ...]:
    return tuple(f"hw.{ns}.pool.{pool}.{kind}.{who}" for pool in pools or (_ANY,) for kind in kinds)


def _info(stream: str) -> str:
    return f"$JS.API.STREAM.INFO.{stream}"


def _look(*streams: str) -> tuple[str, ...]:
    """That a stream exists, and single messages of it: by the leader, and by any replica."""
    return tuple(
        subject
        for stream in streams
        for subject in (
            _info(stream),
            f"$JS.API.STREAM.MSG.GET.{stream}",
            f"$JS.API.DIRECT.GET.{stream}",
            f"$JS.API.DIRECT.GET.{stream}.>",
        )
    )


def _read(*streams: str) -> tuple[str, ...]:
    """Whole streams, by a consumer of one's own."""
    return tuple(
        subject
        for stream in streams
        for subject in (
            f"$JS.API.CONSUMER.CREATE.{stream}.>",
            f"$JS.API.CONSUMER.INFO.{stream}.*",
            f"$JS.API.CONSUMER.DELETE.{stream}.*",
            f"$JS.API.CONSUMER.MSG.NEXT.{stream}.*",
        )
    )


def _no_reading(stream: str) -> tuple[str, ...]:
    """Against `*` for pools whose names are not known."""
    return tuple(right for right in (*_look(stream), *_read(stream)) if right != _info(stream))
