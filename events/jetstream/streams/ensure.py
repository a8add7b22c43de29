"""Creates the streams of a namespace and of a pool where they are missing, as every process does at its start."""

import asyncio

from nats.aio.client import Client

from headwater.events.errors import StreamMissing
from headwater.events.jetstream.api import api
from headwater.events.jetstream.streams.reconcile import ensure
from headwater.events.jetstream.streams.spec import (
    namespace_streams,
    pool_log_stream,
)
from headwater.events.table import STREAM_SIZES, StreamSizes
from headwater.schemas import subjects

POLL_S = 0.1


async def ensure_namespace(
    client: Client,
    ns: str,
    *,
    replicas: int = 1,
    alter: bool = True,
    sizes: StreamSizes = STREAM_SIZES,
) -> None:
    """Ensure the streams and buckets that every process of a namespace needs. See `ensure`."""
    for spec in namespace_streams(ns, replicas, sizes):
        await ensure(client, spec, alter=alter)


async def ensure_pool(
    client: Client,
    ns: str,
    pool: str,
    *,
    replicas: int = 1,
    alter: bool = True,
    patience_s: float = 0.0,
    sizes: StreamSizes = STREAM_SIZES,
) -> None:
    """Ensure the log of one pool. See `ensure`. Waits up to `patience_s` for the operator to create it first."""
    await _wait_for(client, subjects.pool_stream(ns, pool), patience_s)
    await ensure(client, pool_log_stream(ns, pool, replicas, sizes), alter=alter)


async def _wait_for(client: Client, name: str, patience_s: float) -> None:
    """Return once the stream exists, or after `patience_s`."""
    loop = asyncio.get_running_loop()
    end = loop.time() + patience_s
    while loop.time() < end:
        try:
            await api(client, f"STREAM.INFO.{name}")
            return
        except StreamMissing:
            await asyncio.sleep(POLL_S)


async def stream_names(client: Client, prefix: str) -> list[str]:
    """Names of the streams that start with `prefix`, sorted."""
    found: list[str] = []
    while True:
        answer = await api(client, "STREAM.NAMES", {"offset": len(found)})
        page = answer.get("streams") or []
        found += page
        if len(found) >= int(answer.get("total", 0)) or not page:
            return sorted(name for name in found if name.startswith(prefix))
