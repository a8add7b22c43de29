"""Revoking the lease of a process that is known to be dead, so that nobody waits for it to lapse."""

import structlog

from headwater.actors.lease import Kind, decode_lease
from headwater.events.errors import LogError
from headwater.events.table import Table
from headwater.schemas.subjects import lease_key

_log = structlog.get_logger("headwater.bury")


async def bury(leases: Table, kind: Kind, name: str, pid: int) -> bool:
    """Delete the lease of (`kind`, `name`) if process `pid` of this machine held it. Tells whether it did."""
    try:
        entry = await leases.get(lease_key(kind, name))
        held = decode_lease(entry) if entry is not None else None
        if held is None or held.pid != pid:
            return False
        await leases.delete(lease_key(kind, name))
    except LogError as error:
        _log.warning("lease_not_revoked", kind=kind, name=name, reason=str(error))
        return False
    _log.info("lease_revoked", kind=kind, name=name, pid=pid)
    return True
