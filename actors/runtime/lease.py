"""Leases: which incarnation of an actor is alive, and the epoch that fences what it appends; and messages to those that offer tensors.

A lease lives `TTL_S` and is renewed every `RENEW_S`. Its value contains the holder's epoch, so watchers compare
epochs, never revisions. The epoch is greater than the first revision of the lease and than every epoch in the log
under the actor's name: it rises even if the lease bucket was deleted and created again, which restarts revisions at 1.

A holder that cannot reach the lease store continues: an unreachable store does not end a lease. If a renewal is
rejected and no other incarnation holds the lease, the holder stores it again under the same epoch. A lease is lost
only to another holder: then `hold` returns, and the owner takes a new lease, which starts a new incarnation. An
incarnation that has ended without noticing cannot append to the log, because its epoch is too small.
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec
import structlog

from headwater.actors.runtime.ports import Bus, BusError, Message, Persistence
from headwater.actors.runtime.tables import decode_lease
from headwater.engines.transfer.port import PeerGone, TransferFailed
from headwater.engines.transfer.slab import TensorTransfer
from headwater.events.ports import Log, LogError
from headwater.events.table import Table, TableEntry
from headwater.schemas.clock import Clock
from headwater.schemas.media import ClaimRefused, ClaimReply, Offer, OfferClaim, OfferReleased
from headwater.schemas.subjects import lease_key
from headwater.schemas.tables import Lease, LeaseKind

TTL_S: Final = 3
RENEW_S: Final = 1.0
RETRY_S: Final = 0.25

NewestEpoch = Callable[[], Awaitable[int]]
"""The greatest epoch in the log under a name. Raises `LogError` when the log cannot be read."""

_log = structlog.get_logger("headwater.lease")


class LeaseLost(Exception):
    """Raised by actors whose incarnation ends with their lease."""


async def _no_log() -> int:
    return 0


def newest_epoch(log: Log, *subjects: str) -> NewestEpoch:
    """Reads the greatest epoch among the newest messages of these subjects."""

    async def read() -> int:
        return max([(await log.newest(subject)).epoch for subject in subjects])

    return read


class LeaseHandle:
    """A lease that was taken. Its `epoch` never changes; its revision in the table changes with each renewal.

    `reported` is the lease as it is stored at the next renewal, or by `publish`: the holder replaces it, but for who it is. `persistence`, set by the
    holder, says whether the lease is `stalled`.
    """

    def __init__(
        self,
        table: Table,
        key: str,
        lease: Lease,
        revision: int,
        clock: Clock,
        newest: NewestEpoch | None = None,
    ) -> None:
        self.epoch = lease.epoch
        self.name = lease.name
        self.pool = lease.pool
        self.reported = lease
        self.persistence: Persistence | None = None
        self._table = table
        self._key = key
        self._revision = revision
        self._clock = clock
        self._newest = newest or _no_log
        self._released = False
        # A renewal in progress must not store the lease again after it was released.
        self._renewing = asyncio.Lock()
        self._unanswered_since: float | None = None

    @property
    def stalled_s(self) -> float:
        """Seconds for which the lease store has not answered a renewal."""
        since = self._unanswered_since
        return 0.0 if since is None else self._clock.monotonic_s() - since

    @property
    def _value(self) -> bytes:
        stalled = self.persistence is not None and self.persistence.is_stalled
        return msgspec.json.encode(msgspec.structs.replace(self.reported, stalled=stalled))

    async def hold(self) -> str:
        """Renew until another incarnation holds the lease; returns the reason. Does not return once it was released."""
        pause_s = RENEW_S
        while True:
            await self._clock.sleep(pause_s)
            if self._released:
                # The owner is ending and cancels this task: on a lost lease it would take a new one.
                await asyncio.Event().wait()
            if self._unanswered_since is None:
                self._unanswered_since = self._clock.monotonic_s()
            try:
                async with self._renewing:
                    revision = await self._renew()
            except LogError as error:
                _log.warning("lease_renewal_failed", key=self._key, reason=str(error))
                pause_s = RETRY_S
                continue
            self._unanswered_since = None
            if self._released:
                continue
            if revision is None:
                return "another incarnation holds it"
            self._revision, pause_s = revision, RENEW_S

    async def publish(self) -> None:
        """Renew now, so that readers learn of a change at once. If it fails they learn of it by the next renewal."""
        try:
            async with self._renewing:
                # A lease that was lost in the meantime is noticed by `hold`.
                self._revision = await self._renew() or self._revision
        except LogError as error:
            _log.warning("lease_renewal_failed", key=self._key, reason=str(error))

    async def _renew(self) -> int | None:
        if self._released:
            return None
        revision = await self._table.update(self._key, self._value, revision=self._revision, ttl_s=TTL_S)
        return await self._reclaim() if revision is None else revision

    async def _reclaim(self) -> int | None:
        """Return the revision to continue with after a rejected renewal; None if another incarnation holds the lease.

        An earlier renewal may have been stored although its reply was lost. A lease that lapsed while the store was
        unreachable, or was deleted with its bucket, is stored again, unless another incarnation has written to the log since.
        """
        entry = await self._table.get(self._key)
        if entry is None:
            if await self._newest() > self.epoch:
                # Another incarnation had it, wrote to the log, and is gone: this one cannot write any more.
                return None
            revision = await self._table.create(self._key, self._value, ttl_s=TTL_S)
            if revision is not None:
                _log.warning("lease_reclaimed", key=self._key, epoch=self.epoch)
            return revision
        return entry.revision if entry is not None and self._is_mine(entry) else None

    def _is_mine(self, entry: TableEntry) -> bool:
        held = decode_lease(entry)
        return held is not None and (held.epoch, held.incarnation) == (self.epoch, self.reported.incarnation)

    async def release(self) -> None:
        """Delete the lease at once, so that no reader has to wait for it to lapse."""
        self._released = True
        try:
            async with self._renewing:
                entry = await self._table.get(self._key)
                if entry is not None and self._is_mine(entry):
                    await self._table.delete(self._key)
        except LogError as error:
            _log.info("lease_release_failed", key=self._key, reason=str(error))


async def take(
    table: Table,
    kind: LeaseKind,
    name: str,
    clock: Clock,
    *,
    pool: str = "",
    ids: str = "",
    newest: NewestEpoch = _no_log,
) -> LeaseHandle:
    """Take the lease of (`kind`, `name`), waiting while another incarnation holds it.

    `newest` reads the newest epoch in the log. It is called once the lease is held: from then on no other
    incarnation can start to append.
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
            _log.warning("lease_take_failed", key=key, reason=str(error))
            held = None
        if held is not None:
            return LeaseHandle(table, key, *held, clock, newest)
        if waited and waited % 5 < RETRY_S:
            _log.warning(
                "lease_held_by_another", key=key, waited_s=round(waited, 1), **await _holder(table, key)
            )
        await clock.sleep(RETRY_S)
        waited += RETRY_S


async def _holder(table: Table, key: str) -> dict[str, Any]:
    """Return the host and pid of the process that holds a lease, for the log."""
    with contextlib.suppress(LogError, msgspec.DecodeError):
        entry = await table.get(key)
        held = decode_lease(entry) if entry is not None else None
        if held is not None:
            return {"host": held.host, "pid": held.pid}
    return {}


async def _try_to_take(table: Table, key: str, claim: Lease, newest: NewestEpoch) -> tuple[Lease, int] | None:
    """The lease and its revision; None if another incarnation holds it or has taken it in the meantime."""
    unnumbered = msgspec.json.encode(claim)
    revision = await table.create(key, unnumbered, ttl_s=TTL_S)
    if revision is None:
        entry = await table.get(key)
        if entry is None or entry.value != unnumbered:
            return None
        # An earlier attempt of this incarnation got this far.
        revision = entry.revision
    lease = msgspec.structs.replace(claim, epoch=max(revision, await newest() + 1))
    revision = await table.update(key, msgspec.json.encode(lease), revision=revision, ttl_s=TTL_S)
    return None if revision is None else (lease, revision)


# Claims and releases of offered tensors, sent over the bus to the actor that made the offer.

CLAIM_TIMEOUT_S: Final = 2.0

_encode = msgspec.msgpack.Encoder().encode
_message: msgspec.msgpack.Decoder[OfferClaim | OfferReleased] = msgspec.msgpack.Decoder(
    OfferClaim | OfferReleased
)
_reply: msgspec.msgpack.Decoder[ClaimReply] = msgspec.msgpack.Decoder(ClaimReply)


class OwnerChannel:
    """A reader's channel to the owner of an offer: see `headwater.engines.transfer.port.Control`. `subject` is where the owner answers."""

    def __init__(self, bus: Bus, subject: str) -> None:
        self._bus = bus
        self._subject = subject

    async def claim(self, offer: Offer, claim: OfferClaim) -> ClaimReply:
        """See `Control.claim`."""
        try:
            reply = await self._bus.request(self._subject, _encode(claim), timeout_s=CLAIM_TIMEOUT_S)
            return _reply.decode(reply)
        except BusError as error:
            raise PeerGone(f"{offer.owner} did not answer: {error}") from error
        except msgspec.DecodeError as error:
            raise TransferFailed(f"{offer.owner} sent an invalid reply: {error}") from error

    async def release(self, offer: Offer, released: OfferReleased) -> None:
        """See `Control.release`."""
        await self._bus.publish(self._subject, _encode(released))


class OfferAnswers:
    """The owner's side."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self.transfer: TensorTransfer | None = None

    async def on_offer(self, message: Message) -> None:
        """Grant or reject a claim, or note that a reader is done."""
        received = _message.decode(message.data)
        if isinstance(received, OfferReleased):
            if self.transfer is not None:
                self.transfer.released(received)
            return
        reply: ClaimReply = ClaimRefused(received.lease, "unknown")
        if self.transfer is not None:
            reply = self.transfer.answer(received)
        await self._bus.publish(message.reply, _encode(reply))
