"""A made-up fleet's log on a real server, with a snapshot within it, for tests of commands that read one."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from headwater.actors.runtime.ports import Ports
from headwater.events.ports import Log
from headwater.events.snapshot_store import SnapshotStore
from headwater.ops.config.sections import NatsSettings
from headwater.ops.nats.server import open_ports
from headwater.schemas.clock import SystemClock
from tests.bench.large_log import POOL, MadeUpFleet, write
from tests.support.servers.nats import NatsServer


class MadeUpLog(NamedTuple):
    """A pool's log, and the position of the snapshot in it."""

    nats: NatsSettings
    ports: Ports
    log: Log
    fleet: MadeUpFleet
    snapshot: int


@asynccontextmanager
async def made_up_log(
    server: NatsServer, namespace: str, before: int, behind: int
) -> AsyncIterator[MadeUpLog]:
    """So many events before the snapshot, and behind it."""
    async with open_ports(server.url, namespace, "test") as ports:
        fleet = MadeUpFleet(namespace, SystemClock())
        log: Any = await ports.pool_log(POOL)
        await write(log._client, fleet, before, print)
        fleet.state.log = await log.identity()
        await SnapshotStore(ports.blobs, POOL).save(fleet.state.snapshot(made_ns=ports.clock.wall_ns()))
        snapshot = fleet.state.position
        await write(log._client, fleet, behind, print)
        yield MadeUpLog(NatsSettings(server.url, namespace=namespace), ports, log, fleet, snapshot)
