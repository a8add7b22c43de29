"""Revoking the lease of a process that is known to be dead, so that nobody waits for it to lapse."""

import msgspec
import structlog

from headwater.actors.lease import Kind
from headwater.events.errors import LogError
from headwater.events.table import Table
from headwater.schemas.card import Lease
from headwater.schemas.subjects import lease_key

_log = structlog.get_logger("headwater.bury")


async def bury(leases: Table, kind: Kind, name: str, pid: int) -> bool:
    """Delete the lease of (`kind`, `name`) if process `pid` of this machine held it. Tells whether it did."""
    try:
        entry = await leases.get(lease_key(kind, name))
        if entry is None or entry.value is None:
            return False
        if msgspec.json.decode(entry.value, type=Lease).pid != pid:
            return False
        await leases.delete(lease_key(kind, name))
    except LogError as error:
        _log.warning("lease_not_revoked", kind=kind, name=name, reason=str(error))
        return False
    _log.info("lease_revoked", kind=kind, name=name, pid=pid)
    return True
