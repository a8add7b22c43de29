"""`headwater pools`: make what a namespace stores, as the operator, who alone may where users have rights."""

import asyncio

import structlog

from headwater.events.errors import LogError
from headwater.events.jetstream import (
    Connection,
    JetStreamTable,
    connect,
    ensure_namespace,
    ensure_pool,
    stream_names,
)
from headwater.ops.access import credentials
from headwater.ops.config import Settings
from headwater.ops.run_actor import nats_url
from headwater.schemas import subjects

RETRY_S = 1.0
KEEP_S = 2.0

_log = structlog.get_logger("headwater.pools")


async def pools(settings: Settings, stop: asyncio.Event, *, watch: bool) -> int:
    """Make the namespace's streams, and the log of `--pool` or of every pool with a card; print them all.

    With `watch` it goes on making the logs of pools as their cards come, until stopped.
    """
    ns, replicas = settings.namespace, settings.replicas
    client = await connect(
        nats_url(settings),
        "pools",
        inbox=subjects.inbox(ns, "operator", "pools", "log"),
        credentials=credentials(settings, "operator", "pools"),
    )
    try:
        await ensure_namespace(client, ns, replicas=replicas)
        for pool in [settings.pool] if settings.pool else await _pools(client, ns):
            await ensure_pool(client, ns, pool, replicas=replicas)
        for name in await stream_names(client, ""):
            print(name)
        if watch:
            keeping = [
                asyncio.create_task(keep_namespace(client, ns, replicas)),
                asyncio.create_task(keep_pools(client, ns, replicas)),
            ]
            await stop.wait()
            for task in keeping:
                task.cancel()
    finally:
        await client.close()
    return 0


async def keep_namespace(client: Connection, ns: str, replicas: int) -> None:
    """Make what every process of the namespace needs again whenever it was deleted, for ever."""
    while True:
        await asyncio.sleep(KEEP_S)
        try:
            await ensure_namespace(client, ns, replicas=replicas)
        except LogError as error:
            _log.warning("namespace_streams_not_made", reason=str(error))


async def keep_pools(client: Connection, ns: str, replicas: int) -> None:
    """Make the log of every pool that has a model card, for ever."""
    cards = JetStreamTable(client, subjects.card_bucket(ns))
    while True:
        try:
            async for entries in cards.watch():
                for entry in entries:
                    if entry.value is not None and subjects.card_pool(entry.key):
                        await ensure_pool(client, ns, entry.key, replicas=replicas)
        except LogError as error:
            _log.warning("pool_streams_not_made", reason=str(error))
        await asyncio.sleep(RETRY_S)


async def _pools(client: Connection, ns: str) -> list[str]:
    async for entries in JetStreamTable(client, subjects.card_bucket(ns)).watch():
        return sorted(
            entry.key for entry in entries if entry.value is not None and subjects.card_pool(entry.key)
        )
    return []
