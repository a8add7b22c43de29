"""Building a `Ports` over a NATS server."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

import structlog

from headwater.actors.bus.core_nats import NatsBus
from headwater.actors.runtime.ports import Ports
from headwater.events.errors import StreamMissing
from headwater.events.jetstream import (
    Connection,
    Credentials,
    JetStreamBlobs,
    JetStreamLog,
    JetStreamTable,
    connect,
)
from headwater.events.jetstream.streams.ensure import ensure_namespace, ensure_pool, stream_names
from headwater.events.log import Log
from headwater.events.snapshots.cache import FolderCache
from headwater.events.table import STREAM_SIZES, StreamSizes
from headwater.ops.nats.server import MAX_PAYLOAD
from headwater.schemas import subjects
from headwater.schemas.clock import SystemClock
from headwater.schemas.subjects import InboxKind

ACTORS = ("edge", "router", "shadow", "worker")

POOL_POLL_S = 1.0

OPERATOR_S = 2.0
"""How long an actor that logs in leaves it to the operator to make a pool's stream, before it tries itself."""

_log = structlog.get_logger("headwater.main")


def unique_ids() -> Callable[[], str]:
    """Ids of 24 hex digits: random per process, then counted (asking the system for each costs 4 % of an edge)."""
    prefix, numbers = secrets.token_hex(8), count(secrets.randbelow(1 << 31))
    return lambda: f"{prefix}{next(numbers) & 0xFFFFFFFF:08x}"


@asynccontextmanager
async def open_ports(
    url: str,
    ns: str,
    name: str,
    *,
    kind: InboxKind = "operator",
    credentials: Credentials | None = None,
    replicas: int = 1,
    sizes: StreamSizes = STREAM_SIZES,
    cache_dir: Path | None = None,
) -> AsyncIterator[Ports]:
    """Connect, make sure that the namespace's streams exist, and close again at the end.

    `cache_dir`: where routers keep the newest snapshot, one folder per namespace in it; None for nowhere.
    Two connections: tokens never wait behind log traffic in a socket. Raises `LogUnavailable`, `AccessDenied`
    and, when streams are missing that this client may not create, `StreamMissing`.
    """
    core = await connect(
        url, f"{name} bus", inbox=subjects.inbox(ns, kind, name, "bus"), credentials=credentials
    )
    clients = [core]
    try:
        store = await connect(
            url, f"{name} log", inbox=subjects.inbox(ns, kind, name, "log"), credentials=credentials
        )
        clients.append(store)
        # Who logs in as an actor may not alter streams, and each try would be a violation in the server's log.
        alter = kind == "operator" or not store.logged_in
        await ensure_namespace(store, ns, replicas=replicas, alter=alter, sizes=sizes)
        _check_payload(store)

        async def pool_log(pool: str) -> Log:
            if kind in ACTORS:
                await _pool_there(store, ns, pool, replicas, sizes)
            else:
                await ensure_pool(store, ns, pool, replicas=replicas, alter=alter, sizes=sizes)
            return JetStreamLog(store, subjects.pool_stream(ns, pool))

        async def pool_logs() -> list[str]:
            prefix = subjects.pool_stream_prefix(ns)
            return [name.removeprefix(prefix) for name in await stream_names(store, prefix)]

        yield Ports(
            ns=ns,
            bus=NatsBus(core),
            leases=JetStreamTable(store, subjects.lease_bucket(ns)),
            cards=JetStreamTable(store, subjects.card_bucket(ns)),
            api_keys=JetStreamTable(store, subjects.api_key_bucket(ns)),
            secrets=JetStreamTable(store, subjects.secret_bucket(ns)),
            blobs=JetStreamBlobs(store, subjects.blob_bucket(ns)),
            stored=JetStreamTable(store, subjects.stored_bucket(ns)),
            videos=JetStreamTable(store, subjects.video_bucket(ns)),
            requests=JetStreamLog(store, subjects.request_stream(ns)),
            pool_log=pool_log,
            clock=SystemClock(),
            ids=unique_ids(),
            cache=FolderCache(cache_dir / ns) if cache_dir else None,
            pool_logs=pool_logs,
        )
    finally:
        for client in clients:
            if not client.is_closed:
                await client.close()


def _check_payload(store: Connection) -> None:
    """Warn of a server that takes smaller messages than Headwater's own: large requests then go in pieces."""
    if store.max_payload < MAX_PAYLOAD:
        _log.warning(
            "nats_messages_small",
            max_payload=store.max_payload,
            reason=f"large requests go in pieces; set max_payload: {MAX_PAYLOAD} in the server's configuration",
        )


async def _pool_there(store: Connection, ns: str, pool: str, replicas: int, sizes: StreamSizes) -> None:
    """Make the pool's stream, or wait for the operator to make it: a worker loaded its model for minutes."""
    logged_in = store.logged_in
    patience_s = OPERATOR_S if logged_in else 0.0
    reported = False
    while True:
        try:
            await ensure_pool(
                store, ns, pool, replicas=replicas, alter=not logged_in, patience_s=patience_s, sizes=sizes
            )
            return
        except StreamMissing as error:
            if not reported:
                _log.error("pool_stream_awaited", pool=pool, reason=str(error))
                reported = True
            await asyncio.sleep(POOL_POLL_S)
