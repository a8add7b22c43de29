"""Revokes the lease of a process that is known to be dead, so that its pool need not wait for it to expire."""

import socket

import structlog

from headwater.actors.runtime.tables import LeaseTable
from headwater.events.errors import LogError
from headwater.events.table import Table
from headwater.schemas.tables.lease import LeaseKind

_log = structlog.get_logger("headwater.leases")


async def revoke_leases_of(leases: Table, kind: LeaseKind, name: str, pid: int) -> bool:
    """Delete the lease of (`kind`, `name`) if process `pid` of this machine held it. True if it did."""
    try:
        table = LeaseTable(leases)
        held = await table.get(kind, name)
        if held is None or (held.host, held.pid) != (socket.gethostname(), pid):
            return False
        await table.delete(kind, name)
    except LogError as error:
        _log.warning("lease_not_revoked", kind=kind, name=name, reason=str(error))
        return False
    _log.info("lease_revoked", kind=kind, name=name, pid=pid)
    return True
