"""Restores a router's state from the newest snapshot of a pool: for routers, and for shadow routers."""

import asyncio

import msgspec
import structlog

from headwater.actors.runtime.ports import Ports
from headwater.events.errors import LogError
from headwater.events.log import Log
from headwater.events.snapshots.store import SnapshotStore, continues
from headwater.router.fold.state import RouterState
from headwater.router.index.pack import prepare


class SnapshotReader:
    """Restores the snapshots of one pool."""

    def __init__(self, ports: Ports, pool: str) -> None:
        self._ports = ports
        self._store = SnapshotStore(ports.blobs, pool, cache=ports.cache, ids=ports.ids, prepare=prepare)
        self._log = structlog.get_logger("headwater.router").bind(pool=pool)

    async def restore(self, log: Log) -> RouterState | None:
        """The state of the newest snapshot from which the log continues; None to fold the log from its start.

        Also None if the snapshot cannot be read, which is logged: the log still holds what retention has not cut.
        """
        bounds = await log.bounds()
        try:
            snapshot = await self._store.newest(lambda position: continues(position, bounds))
        except LogError as error:
            self._log.warning("snapshots_unavailable", reason=str(error))
            return None
        if snapshot is None:
            return None
        if snapshot.facts.get("log", "") not in ("", await log.identity()):
            self._log.error("snapshot_of_another_log", log_position=snapshot.position)
            return None
        try:
            # In a thread: the event loop must renew the lease.
            return await asyncio.to_thread(RouterState.restore, snapshot)
        except (msgspec.ValidationError, LookupError, TypeError, ValueError) as error:
            # Written by another release.
            self._log.error("snapshot_unusable", log_position=snapshot.position, reason=repr(error))
            return None
