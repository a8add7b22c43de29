"""Building a `World` over a NATS server."""

import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

from headwater.actors.bus import NatsBus
from headwater.actors.world import World
from headwater.events.clock import SystemClock
from headwater.events.jetstream import (
    JetStreamBlobs,
    JetStreamLog,
    JetStreamTable,
    connect,
    ensure_namespace,
    ensure_pool,
)
from headwater.events.log import Log
from headwater.events.snapshot_cache import FolderCache
from headwater.schemas import subjects


def unique_ids() -> Callable[[], str]:
    """Ids of 24 hex digits: random per process, then counted (asking the system for each costs 4 % of an edge)."""
    prefix, numbers = secrets.token_hex(8), count(secrets.randbelow(1 << 31))
    return lambda: f"{prefix}{next(numbers) & 0xFFFFFFFF:08x}"


@asynccontextmanager
async def open_world(
    url: str, ns: str, name: str, *, replicas: int = 1, cache_dir: Path | None = None
) -> AsyncIterator[World]:
    """Connect, make sure that the namespace's streams exist, and close again at the end.

    `cache_dir`: where routers keep the newest snapshot, one folder per namespace in it; None for nowhere. Two connections: tokens never wait behind log traffic in a socket.
    """
    core = await connect(url, f"{name} bus")
    store = await connect(url, f"{name} log")
    try:
        await ensure_namespace(store, ns, replicas=replicas)

        async def pool_log(pool: str) -> Log:
            await ensure_pool(store, ns, pool, replicas=replicas)
            return JetStreamLog(store, subjects.pool_stream(ns, pool))

        yield World(
            ns=ns,
            bus=NatsBus(core),
            leases=JetStreamTable(store, subjects.lease_bucket(ns)),
            cards=JetStreamTable(store, subjects.card_bucket(ns)),
            blobs=JetStreamBlobs(store, subjects.blob_bucket(ns)),
            requests=JetStreamLog(store, subjects.request_stream(ns)),
            pool_log=pool_log,
            clock=SystemClock(),
            ids=unique_ids(),
            cache=FolderCache(cache_dir / ns) if cache_dir else None,
        )
    finally:
        for client in (core, store):
            if not client.is_closed:
                await client.close()
