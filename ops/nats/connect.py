"""Connections and ports of a process, from its NATS settings."""

import contextlib
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from headwater.actors.runtime.ports import Ports
from headwater.events.jetstream import Connection, connect
from headwater.ops.config.nats import NatsSettings, StreamSettings
from headwater.ops.nats.credentials import credentials, reader_kind
from headwater.ops.nats.open_ports import open_ports
from headwater.schemas import subjects
from headwater.schemas.subjects import InboxKind

DEFAULT_STREAMS = StreamSettings()


def operator_ports(nats: NatsSettings, name: str) -> AbstractAsyncContextManager[Ports]:
    """Ports of a command that reads: as the operator, or as an observer if only an observer's key is there."""
    return ports_of(nats, reader_kind(nats), name)


def ports_of(
    nats: NatsSettings,
    kind: InboxKind,
    name: str,
    *,
    streams: StreamSettings = DEFAULT_STREAMS,
    cache_dir: Path | None = None,
) -> AbstractAsyncContextManager[Ports]:
    """Ports with the permissions of a kind of client, and missing streams created. `cache_dir`: where routers keep their newest snapshot."""
    return open_ports(
        nats.address,
        nats.namespace,
        name,
        kind=kind,
        credentials=credentials(nats, kind, name),
        replicas=streams.replicas,
        sizes=streams.sizes,
        cache_dir=cache_dir,
    )


async def open_connection(
    nats: NatsSettings, kind: InboxKind, name: str, *, inbox: str = "log", wait_s: float = 10.0
) -> Connection:
    """One connection with the permissions of a kind of client. Raises `LogUnavailable` and `AccessDenied`."""
    return await connect(
        nats.address,
        name,
        inbox=subjects.inbox(nats.namespace, kind, name, inbox),
        credentials=credentials(nats, kind, name),
        wait_s=wait_s,
    )


@contextlib.asynccontextmanager
async def connected(nats: NatsSettings, kind: InboxKind, name: str) -> AsyncIterator[Connection]:
    """`open_connection` until the block ends."""
    client = await open_connection(nats, kind, name)
    try:
        yield client
    finally:
        await client.close()
