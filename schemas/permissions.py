"""Permissions on the server: what each kind of client may publish and subscribe to, which is the least that its work requires.

A subject permission matches whole tokens only. A pool's stream has the pool in its name, so it is allowed by name where
the pools are known and by `*` where they are not; the namespace's other streams are then denied where they must not be
read. Reply subjects need no permission: the server does not check them.
"""

from typing import Final, Literal, NamedTuple, get_args

from headwater.schemas import subjects
from headwater.schemas.names import PROBE, token
from headwater.schemas.subjects import ANY, EngineVerb, InboxKind, PoolKind

Kind = InboxKind

KINDS: Final[tuple[Kind, ...]] = get_args(Kind)

DUTIES: Final[dict[Kind, str]] = {
    "edge": "query routers and workers, write and read the request log, read leases, model cards and their files, "
    "API keys and shared secrets, write and read stored responses and video jobs",
    "router": "answer route queries, write route and fleet events, read the pool log, write snapshots",
    "shadow": "write shadow events, read the pool log and the routers' snapshots",
    "worker": "accept requests, send tokens, hand off KV, write its fleet, kv and load events, write and read cards",
    "operator": "create and change streams, read everything except shared secrets, control workers, write API keys; "
    "writes no events, only empty messages that probe whether a log accepts any",
    "admin": "control workers, set engine weights, read leases; for the admin port, which must not have an operator's key",
    "console": "read the logs, snapshots, cards, leases and API keys, and hear the routers' digests; writes nothing",
    "tracer": "read the logs, to send traces of requests elsewhere; writes nothing",
    "picker": "query routers, read leases, model cards and their files, API keys and shared secrets; writes nothing but a first secret",
    "observer": "read streams and statistics; writes nothing",
}
"""What each kind does, in a line."""

REPLY_EXPIRES: Final = "1m"
"""How long a worker may reply to a message after receiving it."""


class Rights(NamedTuple):
    """Subject patterns. `answers` also allows one reply to each message received, within `REPLY_EXPIRES`."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    deny_publish: tuple[str, ...] = ()
    answers: bool = False


def site_api(site: str) -> str:
    """The JetStream API of a site, whose domain has its name, as leaf nodes carry it. Raises `InvalidName`."""
    return f"$JS.{token('site', site)}.API.>"


class _Streams(NamedTuple):
    """Names of the streams of a namespace."""

    leases: str
    cards: str
    api_keys: str
    secrets: str
    blobs: str
    requests: str
    stored: str
    videos: str
    pools: tuple[str, ...]

    @property
    def edges_only(self) -> tuple[str, ...]:
        """What edges read, and other clients only with a right of their own."""
        return (self.api_keys, self.secrets, self.stored, self.videos)


def rights(ns: str, kind: Kind, *, name: str = "", pools: tuple[str, ...] = ()) -> Rights:
    """Rights of the client `name` of a kind (empty: of all of that kind), for `pools` (empty: for all).

    Raises `InvalidName`.
    """
    token("namespace", ns)
    client = token(kind, name) if name else ANY
    make = {
        "edge": _edge,
        "router": _router,
        "shadow": _shadow,
        "worker": _worker,
        "operator": _operator,
        "admin": _admin,
        "console": _console,
        "tracer": _tracer,
        "picker": _picker,
    }.get(kind, _observer)
    return make(ns, client, tuple(token("pool", pool) for pool in pools))


def _edge(ns: str, client: str, pools: tuple[str, ...]) -> Rights:
    streams = _streams(ns, pools)
    verbs: tuple[EngineVerb, ...] = ("generate", "cancel", "status", "embed", "encode", "file")
    everything = (
        streams.leases,
        streams.cards,
        streams.blobs,
        streams.requests,
        # Of the stored responses: whose objects fill the store.
        *streams.edges_only,
    )
    return Rights(
        publish=(
            *(subjects.route_query(ns, pool) for pool in pools or (ANY,)),
            *(subjects.route_wait(ns, pool, ANY, ANY) for pool in pools or (ANY,)),
            *(subjects.engine(ns, ANY, ANY, verb) for verb in verbs),
            subjects.request_subject(ns, client),
            subjects.usage(ns, client),
            _lease(ns, "edge", client),
            subjects.table_subject(subjects.secret_bucket(ns), subjects.SALT_KEY),
            subjects.table_subject(subjects.stored_bucket(ns), ">"),
            subjects.table_subject(subjects.video_bucket(ns), ">"),
            *_look_up(*everything),
            *_read(*everything),
            *_reply(ns, "worker", "operator", "observer"),
        ),
        subscribe=(
            _inbox(ns, "edge", client),
            subjects.edge_frames(ns, client),
            subjects.edge_media(ns, client),
            subjects.edge_offer(ns, client),
            subjects.edge_streams(ns, client, ANY),
            subjects.usage(ns, ANY),
            *_services("edge", client),
        ),
    )


def _router(ns: str, client: str, pools: tuple[str, ...]) -> Rights:
    streams = _streams(ns, pools)
    return Rights(
        publish=(
            *_events(ns, pools, ("route", "fleet"), client),
            *(subjects.digests(ns, pool) for pool in pools or (ANY,)),
            subjects.resync(ns, ANY),
            _lease(ns, "router", client),
            subjects.object_subjects(subjects.blob_bucket(ns)),
            _purge(streams.blobs),
            *_look_up(streams.leases, streams.cards, streams.blobs, *streams.pools),
            *_exist(streams.requests, *streams.edges_only),
            *_read(streams.leases, streams.cards, streams.blobs, *streams.pools),
            *_reply(ns, "edge", "picker", "operator", "admin", "observer"),
        ),
        subscribe=(
            _inbox(ns, "router", client),
            *(subjects.route_query(ns, pool) for pool in pools or (ANY,)),
            *(subjects.engine_weights(ns, pool) for pool in pools or (ANY,)),
            *(subjects.traffic_split(ns, pool) for pool in pools or (ANY,)),
            *(subjects.digests(ns, pool) for pool in pools or (ANY,)),
            *(subjects.route_wait(ns, pool, client, ANY) for pool in pools or (ANY,)),
            *_services("router", client),
        ),
        deny_publish=_no_reading(streams.requests, *streams.edges_only),
    )


def _shadow(ns: str, client: str, pools: tuple[str, ...]) -> Rights:
    streams = _streams(ns, pools)
    return Rights(
        publish=(
            # A subject kind of its own, so that it cannot write as a router.
            *_events(ns, pools, ("shadow",), client),
            _lease(ns, "shadow", client),
            *_look_up(streams.leases, streams.cards, streams.blobs, *streams.pools),
            *_exist(streams.requests, *streams.edges_only),
            *_read(streams.leases, streams.cards, streams.blobs, *streams.pools),
            *_reply(ns, "operator", "observer"),
        ),
        subscribe=(_inbox(ns, "shadow", client), *_services("shadow", client)),
        deny_publish=_no_reading(streams.requests, *streams.edges_only),
    )


def _worker(ns: str, client: str, pools: tuple[str, ...]) -> Rights:
    streams = _streams(ns, pools)
    cards = subjects.card_bucket(ns)
    return Rights(
        publish=(
            *_events(ns, pools, ("fleet", "kv", "load"), client),
            subjects.edge_frames(ns, ANY),
            # Images of its requests that it does not have yet.
            subjects.edge_media(ns, ANY),
            subjects.edge_offer(ns, ANY),
            # Whether an edge still receives what it generates.
            subjects.edge_streams(ns, ANY, ANY),
            # A decode worker claims the KV of its prompt from the worker that computed it.
            subjects.engine(ns, ANY, ANY, "claim"),
            # And reads the embeddings of images from the worker that encoded them.
            subjects.engine(ns, ANY, ANY, "offer"),
            _lease(ns, "worker", client),
            *(subjects.table_subject(cards, subjects.card_key(pool)) for pool in pools or (ANY,)),
            *(subjects.table_subject(cards, subjects.lora_key(pool, ANY)) for pool in pools or (ANY,)),
            subjects.object_subjects(subjects.blob_bucket(ns)),
            # Two workers may store the same file at once, and the later one removes the earlier one's bytes.
            # This grants no more than the bucket's subjects do: a roll-up header deletes as well.
            _purge(streams.blobs),
            *_look_up(streams.leases, streams.cards, streams.blobs, *streams.pools),
            # A worker follows the cards: a LoRA adapter that is removed is removed on all workers. And it compares its model with those of
            # the pools that have workers.
            *_read(streams.leases, streams.cards),
            *_exist(streams.requests, *streams.edges_only),
        ),
        subscribe=(
            _inbox(ns, "worker", client),
            subjects.engine_requests(ns, client),
            subjects.worker_requests(ns, client),
            *_services("worker", client),
        ),
        deny_publish=_no_reading(streams.requests, *streams.edges_only),
        # Exact, and affordable only here: the server records every message with a reply subject, and each one
        # read from a stream has one. A worker reads no log, only the few cards.
        answers=True,
    )


def _operator(ns: str, client: str, pools: tuple[str, ...]) -> Rights:
    streams = _streams(ns, pools)
    verbs: tuple[EngineVerb, ...] = ("cancel", "status", "drain")
    return Rights(
        publish=(
            "$JS.API.>",
            # Copies of streams are acknowledged, and sent back, chunk by chunk.
            "$JS.SNAPSHOT.>",
            subjects.table_subject(subjects.lease_bucket(ns), ">"),
            subjects.table_subject(subjects.card_bucket(ns), ">"),
            subjects.table_subject(subjects.api_key_bucket(ns), ">"),
            subjects.table_subject(subjects.secret_bucket(ns), ">"),
            subjects.object_subjects(subjects.blob_bucket(ns)),
            # See headwater.events.jetstream.streams.
            subjects.table_subject(subjects.stored_bucket(ns), PROBE),
            subjects.table_subject(subjects.video_bucket(ns), PROBE),
            subjects.pool_subject(ns, ANY, "load", PROBE),
            subjects.request_subject(ns, PROBE),
            subjects.route_query(ns, ANY),
            *(subjects.engine(ns, ANY, ANY, verb) for verb in verbs),
            subjects.resync(ns, ANY),
            subjects.control(ns, ANY),
            subjects.engine_weights(ns, ANY),
            subjects.traffic_split(ns, ANY),
            "$SRV.>",
        ),
        subscribe=(_inbox(ns, "operator", client), "$JS.EVENT.>"),
        deny_publish=(*_no_reading(streams.secrets), f"$JS.API.STREAM.SNAPSHOT.{streams.secrets}"),
    )


def _admin(ns: str, client: str, pools: tuple[str, ...]) -> Rights:
    streams = _streams(ns, pools)
    return Rights(
        publish=(
            subjects.control(ns, ANY),
            *(subjects.engine_weights(ns, pool) for pool in pools or (ANY,)),
            *_look_up(streams.leases),
            *_read(streams.leases),
            # Whether they exist, which every process checks when it starts.
            *_exist(
                streams.cards,
                streams.blobs,
                streams.requests,
                *streams.edges_only,
            ),
        ),
        subscribe=(_inbox(ns, "admin", client),),
    )


def _console(ns: str, client: str, pools: tuple[str, ...]) -> Rights:
    streams = _streams(ns, pools)
    hidden = (streams.secrets, streams.stored, streams.videos)
    everything = (
        streams.leases,
        streams.cards,
        # With --auth keys it admits who may use an edge: the table has digests of secrets.
        streams.api_keys,
        streams.blobs,
        streams.requests,
        *streams.pools,
    )
    return Rights(
        publish=(
            "$JS.API.STREAM.NAMES",
            *_look_up(*everything),
            *_read(*everything),
            *_exist(*hidden),
        ),
        subscribe=(
            _inbox(ns, "console", client),
            *(subjects.digests(ns, pool) for pool in pools or (ANY,)),
        ),
        deny_publish=_no_reading(*hidden),
    )


def _tracer(ns: str, client: str, pools: tuple[str, ...]) -> Rights:
    streams = _streams(ns, pools)
    hidden = (streams.leases, streams.cards, streams.blobs, *streams.edges_only)
    return Rights(
        publish=(
            "$JS.API.STREAM.NAMES",
            *_look_up(streams.requests, *streams.pools),
            *_read(streams.requests, *streams.pools),
            *_exist(*hidden),
            *_reply(ns, "operator", "observer"),
        ),
        subscribe=(_inbox(ns, "tracer", client), *_services("tracer", client)),
        deny_publish=_no_reading(*hidden),
    )


def _picker(ns: str, client: str, pools: tuple[str, ...]) -> Rights:
    streams = _streams(ns, pools)
    everything = (streams.leases, streams.cards, streams.blobs, streams.api_keys, streams.secrets)
    hidden = (streams.requests, streams.stored, streams.videos)
    return Rights(
        publish=(
            *(subjects.route_query(ns, pool) for pool in pools or (ANY,)),
            *(subjects.route_wait(ns, pool, ANY, ANY) for pool in pools or (ANY,)),
            subjects.table_subject(subjects.secret_bucket(ns), subjects.SALT_KEY),
            *_look_up(*everything),
            *_read(*everything),
            *_exist(*hidden),
            *_reply(ns, "operator", "observer"),
        ),
        subscribe=(_inbox(ns, "picker", client), *_services("picker", client)),
    )


def _observer(ns: str, client: str, pools: tuple[str, ...]) -> Rights:
    streams = _streams(ns, pools)
    everything = (streams.leases, streams.cards, streams.blobs, streams.requests, *streams.pools)
    return Rights(
        publish=(
            "$JS.API.INFO",
            "$JS.API.STREAM.NAMES",
            "$JS.API.STREAM.LIST",
            *_look_up(*everything),
            *_read(*everything),
            *_exist(*streams.edges_only),
            "$SRV.>",
        ),
        subscribe=(_inbox(ns, "observer", client), "$JS.EVENT.>"),
        deny_publish=_no_reading(*streams.edges_only),
    )


def _streams(ns: str, pools: tuple[str, ...]) -> _Streams:
    return _Streams(
        subjects.table_stream(subjects.lease_bucket(ns)),
        subjects.table_stream(subjects.card_bucket(ns)),
        subjects.table_stream(subjects.api_key_bucket(ns)),
        subjects.table_stream(subjects.secret_bucket(ns)),
        subjects.object_stream(subjects.blob_bucket(ns)),
        subjects.request_stream(ns),
        subjects.table_stream(subjects.stored_bucket(ns)),
        subjects.table_stream(subjects.video_bucket(ns)),
        tuple(subjects.pool_stream(ns, pool) for pool in pools) or (ANY,),
    )


def _lease(ns: str, kind: subjects.LeaseKind, client: str) -> str:
    return subjects.table_subject(subjects.lease_bucket(ns), subjects.lease_key(kind, client))


def _inbox(ns: str, kind: InboxKind, client: str) -> str:
    return f"{subjects.inbox_root(ns, kind)}.{client}.>"


def _reply(ns: str, *kinds: InboxKind) -> tuple[str, ...]:
    """Replies to requests of these kinds."""
    return tuple(f"{subjects.inbox_root(ns, kind)}.>" for kind in kinds)


def _services(kind: str, client: str) -> tuple[str, ...]:
    """Return the subjects on which an actor answers service discovery."""
    name = f"headwater-{kind}"
    verbs: tuple[Literal["PING", "INFO", "STATS"], ...] = ("PING", "INFO", "STATS")
    return tuple(subjects.service(verb, *scope) for verb in verbs for scope in ((), (name,), (name, client)))


def _events(ns: str, pools: tuple[str, ...], kinds: tuple[PoolKind, ...], client: str) -> tuple[str, ...]:
    return tuple(subjects.pool_subject(ns, pool, kind, client) for pool in pools or (ANY,) for kind in kinds)


def _info(stream: str) -> str:
    return f"$JS.API.STREAM.INFO.{stream}"


def _exist(*streams: str) -> tuple[str, ...]:
    """Return the subjects to ask whether streams exist, and no more."""
    return tuple(_info(stream) for stream in streams)


def _purge(stream: str) -> str:
    return f"$JS.API.STREAM.PURGE.{stream}"


def _look_up(*streams: str) -> tuple[str, ...]:
    """Return the subjects to ask whether a stream exists, and to read single messages of it: from the leader, and from any replica."""
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
    """Whole streams, by a consumer of the client's own."""
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


def _no_reading(*streams: str) -> tuple[str, ...]:
    """Return what to deny where `*` stands for pools whose names are not known."""
    return tuple(
        right for stream in streams for right in (*_look_up(stream), *_read(stream)) if right != _info(stream)
    )
