"""A lease: who an actor is, and the epoch that fences everything it writes.

A lease lives `TTL_S` and is renewed every `RENEW_S`. Its revision at creation is the epoch. Losing it is a
normal result: `hold` returns, and the owner takes a new lease, which is a new life.
"""

import os
import socket
from typing import Literal

import msgspec
import structlog

from headwater.events.errors import LogError
from headwater.events.table import Table
from headwater.schemas.card import Lease
from headwater.schemas.clock import Clock
from headwater.schemas.subjects import lease_key

TTL_S = 3
RENEW_S = 1.0
RETRY_S = 0.25

Kind = Literal["worker", "router", "edge", "shadow"]

_log = structlog.get_logger("headwater.lease")


class LeaseLost(Exception):
    """Raised by actors for which a lost lease ends their life."""


class LeaseHandle:
    """A lease that was taken. `epoch` never changes; `revision` does with each renewal."""

    def __init__(self, table: Table, key: str, value: bytes, epoch: int, clock: Clock) -> None:
        self.epoch = epoch
        self._table = table
        self._key = key
        self._value = value
        self._revision = epoch
        self._clock = clock

    async def hold(self) -> str:
        """Renew until the lease is lost; returns why.

        An unreachable server is no loss by itself: the lease may still be there when it comes back. Only
        the server's answer decides.
        """
        pause_s = RENEW_S
        while True:
            await self._clock.sleep(pause_s)
            try:
                revision = await self._table.update(
                    self._key, self._value, revision=self._revision, ttl_s=TTL_S
                )
                if revision is None and not await self._reclaim():
                    return "it lapsed or somebody else took it"
            except LogError as error:
                _log.warning("lease_renewal_failed", key=self._key, reason=str(error))
                pause_s = RETRY_S
                continue
            pause_s = RENEW_S
            if revision is not None:
                self._revision = revision

    async def _reclaim(self) -> bool:
        """After a refused renewal: did an earlier try get through although its answer was lost?"""
        entry = await self._table.get(self._key)
        if entry is None or entry.value != self._value:
            return False
        self._revision = entry.revision
        return True

    async def release(self) -> None:
        """Give the lease back at once, so that nobody waits for it to lapse."""
        try:
            entry = await self._table.get(self._key)
            if entry is not None and entry.value == self._value:
                await self._table.delete(self._key)
        except LogError as error:
            _log.info("lease_not_released", key=self._key, reason=str(error))


async def take(
    table: Table, kind: Kind, name: str, clock: Clock, *, pool: str = "", ids: str = ""
) -> LeaseHandle:
    """Take the lease of (`kind`, `name`), waiting while another life of it still holds it."""
    key = lease_key(kind, name)
    value = msgspec.json.encode(
        {
            **msgspec.to_builtins(
                Lease(kind=kind, name=name, pool=pool, host=socket.gethostname(), pid=os.getpid())
            ),
            "incarnation": ids,
        }
    )
    waited = 0.0
    while True:
        try:
            epoch = await table.create(key, value, ttl_s=TTL_S)
        except LogError as error:
            _log.warning("lease_not_taken", key=key, reason=str(error))
            epoch = None
        if epoch is not None:
            return LeaseHandle(table, key, value, epoch, clock)
        if waited and waited % 5 < RETRY_S:
            _log.warning("lease_held_by_another", key=key, waited_s=round(waited, 1))
        await clock.sleep(RETRY_S)
        waited += RETRY_S
