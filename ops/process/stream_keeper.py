"""Keeps the streams of a namespace and the logs of its pools in existence, as the operator.

Where users have limited permissions only the operator may create streams.
"""

import asyncio

import structlog

from headwater.actors.runtime.tables import CardTable
from headwater.events.errors import LogError
from headwater.events.jetstream import Connection, JetStreamTable
from headwater.events.jetstream.streams.ensure import ensure_namespace, ensure_pool
from headwater.events.table import STREAM_SIZES, StreamSizes
from headwater.schemas import subjects

RETRY_S = 1.0
KEEP_S = 2.0

_log = structlog.get_logger("headwater.pools")


async def keep_namespace(
    client: Connection, ns: str, replicas: int, sizes: StreamSizes = STREAM_SIZES
) -> None:
    """Recreate the namespace's streams and tables whenever they were deleted. Runs until cancelled."""
    while True:
        await asyncio.sleep(KEEP_S)
        try:
            await ensure_namespace(client, ns, replicas=replicas, sizes=sizes)
        except LogError as error:
            _log.warning("namespace_streams_not_made", reason=str(error))


async def keep_pools(client: Connection, ns: str, replicas: int, sizes: StreamSizes = STREAM_SIZES) -> None:
    """Create the log of every pool that has a model card, and again whenever it was deleted. Runs until cancelled."""
    cards = CardTable(JetStreamTable(client, subjects.card_bucket(ns)))
    known: set[str] = set()
    while True:
        try:
            # Asked again and again: no event reports a log that was deleted, and the cards may be lost with it.
            known |= set(await cards.pools())
            for pool in sorted(known):
                await ensure_pool(client, ns, pool, replicas=replicas, sizes=sizes)
        except LogError as error:
            _log.warning("pool_streams_not_made", reason=str(error))
        await asyncio.sleep(RETRY_S)
