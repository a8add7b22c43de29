"""Leases: who an actor is, and the epoch that fences everything it writes.

A lease lives `TTL_S` and is renewed every `RENEW_S`. Its value holds the epoch of the incarnation that holds it, so
that watchers compare epochs, never revisions. The epoch is greater than the lease's first revision and than every
epoch that the log holds for the name: it rises although a lease bucket that was deleted and made anew counts its
revisions from 1.

A holder that cannot reach the lease store goes on: an unreachable store is no loss. When a renewal is refused and
nobody else holds the lease, the holder stores it again under the same epoch. Only a lease that somebody else holds
is lost: `hold` returns, and the owner takes a new lease, which begins a new incarnation. An incarnation that is
over and does not know it yet cannot append to the log; its epoch is too small.
"""

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable
from typing import Final, Literal

import msgspec
import structlog

from headwater.events.errors import LogError
from headwater.events.log import Log
from headwater.events.table import Entry, Table
from headwater.schemas.card import Lease
from headwater.schemas.clock import Clock
from headwater.schemas.subjects import lease_key

TTL_S: Final = 3
RENEW_S: Final = 1.0
RETRY_S: Final = 0.25

Kind = Literal["worker", "router", "edge", "shadow"]

NewestEpoch = Callable[[], Awaitable[int]]
"""The greatest epoch that the log holds for a name. Raises `LogError` when the log cannot be read."""

_log = structlog.get_logger("headwater.lease")


class LeaseLost(Exception):
    """Raised by actors whose incarnation ends with their lease."""


def decode_lease(entry: Entry) -> Lease | None:
    """The lease that an entry of the lease table holds; None where the key was deleted or expired."""
    return None if entry.value is None else msgspec.json.decode(entry.value, type=Lease)


async def _no_log() -> int:
    return 0


def newest_epoch(log: Log, *subjects: str) -> NewestEpoch:
    """The greatest epoch among the newest messages of these subjects."""

    async def read() -> int:
        return max([(await log.newest(subject)).epoch for subject in subjects])

    return read


class LeaseHandle:
    """A lease that was taken. `epoch` never changes; its revision in the table does with each renewal."""

    def __init__(self, table: Table, key: str, lease: Lease, revision: int, clock: Clock) -> None:
        self.epoch = lease.epoch
        self.is_stalled: Callable[[], bool] = lambda: False
        """Whether the log does not take what the holder appends; set by the holder."""
        self._table = table
        self._key = key
        self._lease = lease
        self._revision = revision
        self._clock = clock
        self._released = False
        # A renewal under way must not store again what is released meanwhile.
        self._renewing = asyncio.Lock()
        self._trying_since: float | None = None

    @property
    def stalled_s(self) -> float:
        """Seconds for which the lease store has not answered a renewal."""
        return 0.0 if self._trying_since is None else self._clock.monotonic_s() - self._trying_since

    @property
    def _value(self) -> bytes:
        return msgspec.json.encode(msgspec.structs.replace(self._lease, stalled=self.is_stalled()))

    async def hold(self) -> str:
        """Renew until somebody else holds the lease; returns why. For a lease that was released it never returns."""
        pause_s = RENEW_S
        while True:
            await self._clock.sleep(pause_s)
            if self._released:
                # The owner ends, and this with it: a lost lease would have it take another one.
                await asyncio.Event().wait()
            if self._trying_since is None:
                self._trying_since = self._clock.monotonic_s()
            try:
                async with self._renewing:
                    revision = await self._renew()
            except LogError as error:
                _log.warning("lease_renewal_failed", key=self._key, reason=str(error))
                pause_s = RETRY_S
                continue
            self._trying_since = None
            if self._released:
                continue
            if revision is None:
                return "another incarnation holds it"
            self._revision, pause_s = revision, RENEW_S

    async def _renew(self) -> int | None:
        if self._released:
            return None
        revision = await self._table.update(self._key, self._value, revision=self._revision, ttl_s=TTL_S)
        return await self._reclaim() if revision is None else revision

    async def _reclaim(self) -> int | None:
        """After a refused renewal, the revision to go on with; None where somebody else holds the lease.

        An earlier renewal may have been stored although its answer was lost. A lease that lapsed while the store was
        away, or that went with its bucket, is stored again.
        """
        entry = await self._table.get(self._key)
        if entry is None:
            revision = await self._table.create(self._key, self._value, ttl_s=TTL_S)
            if revision is not None:
                _log.warning("lease_reclaimed", key=self._key, epoch=self.epoch)
            return revision
        return entry.revision if entry is not None and self._is_mine(entry) else None

    def _is_mine(self, entry: Entry) -> bool:
        held = decode_lease(entry)
        return held is not None and (held.epoch, held.incarnation) == (self.epoch, self._lease.incarnation)

    async def release(self) -> None:
        """Give the lease back at once, so that nobody waits for it to lapse."""
        self._released = True
        try:
            async with self._renewing:
                entry = await self._table.get(self._key)
                if entry is not None and self._is_mine(entry):
                    await self._table.delete(self._key)
        except LogError as error:
            _log.info("lease_not_released", key=self._key, reason=str(error))


async def take(
    table: Table,
    kind: Kind,
    name: str,
    clock: Clock,
    *,
    pool: str = "",
    ids: str = "",
    newest: NewestEpoch = _no_log,
) -> LeaseHandle:
    """Take the lease of (`kind`, `name`), waiting while another incarnation holds it.

    `newest` reads the log. It is asked once the lease is held: then no other incarnation can begin to write.
    """
    key = lease_key(kind, name)
    claim = Lease(
        kind=kind, name=name, pool=pool, host=socket.gethostname(), pid=os.getpid(), incarnation=ids
    )
    waited = 0.0
    while True:
        try:
            held = await _try_to_take(table, key, claim, newest)
        except LogError as error:
            _log.warning("lease_not_taken", key=key, reason=str(error))
            held = None
        if held is not None:
            return LeaseHandle(table, key, *held, clock)
        if waited and waited % 5 < RETRY_S:
            _log.warning("lease_held_by_another", key=key, waited_s=round(waited, 1))
        await clock.sleep(RETRY_S)
        waited += RETRY_S


async def _try_to_take(table: Table, key: str, claim: Lease, newest: NewestEpoch) -> tuple[Lease, int] | None:
    """The lease and its revision; None where somebody holds it, or took it meanwhile."""
    unnumbered = msgspec.json.encode(claim)
    revision = await table.create(key, unnumbered, ttl_s=TTL_S)
    if revision is None:
        entry = await table.get(key)
        if entry is None or entry.value != unnumbered:
            return None
        # An earlier try of ours got this far.
        revision = entry.revision
    lease = msgspec.structs.replace(claim, epoch=max(revision, await newest() + 1))
    revision = await table.update(key, msgspec.json.encode(lease), revision=revision, ttl_s=TTL_S)
    return None if revision is None else (lease, revision)
