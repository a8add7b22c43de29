"""`headwater pools`: creates what a namespace stores, as the operator: only it may where users have limited rights."""

import asyncio

from headwater.actors.runtime.tables import CardTable
from headwater.events.jetstream import JetStreamTable
from headwater.events.jetstream.streams.ensure import ensure_namespace, ensure_pool, stream_names
from headwater.ops.config.nats import NatsSettings, StreamSettings
from headwater.ops.nats.connect import connected
from headwater.ops.process.stream_keeper import keep_namespace, keep_pools
from headwater.schemas import subjects


async def create_pools(
    nats: NatsSettings, streams: StreamSettings, pool: str, stop: asyncio.Event, *, watch: bool
) -> int:
    """Create the namespace's streams, and the log of `pool` or of every pool with a card; print all streams.

    With `watch` logs of new pools are created as their cards appear, until `stop` is set.
    """
    ns, replicas = nats.namespace, streams.replicas
    async with connected(nats, "operator", "pools") as client:
        await ensure_namespace(client, ns, replicas=replicas, sizes=streams.sizes)
        cards = CardTable(JetStreamTable(client, subjects.card_bucket(ns)))
        for one in [pool] if pool else await cards.pools():
            await ensure_pool(client, ns, one, replicas=replicas, sizes=streams.sizes)
        for name in await stream_names(client, ""):
            print(name)
        if watch:
            keepers = [
                asyncio.create_task(keep_namespace(client, ns, replicas, streams.sizes)),
                asyncio.create_task(keep_pools(client, ns, replicas, streams.sizes)),
            ]
            await stop.wait()
            for task in keepers:
                task.cancel()
    return 0
