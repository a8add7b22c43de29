"""The twin's own: bytes that land late, and an end that waits for readers."""

import asyncio
from itertools import count

import numpy as np
import pytest

from headwater.engines.transfer.local import NONE, LocalFabric, LocalTransfer, TransferFault
from headwater.engines.transfer.port import ChecksumMismatch, HostMemory, ReadTimedOut, SlabFull
from headwater.schemas.media import ClaimRefused, ClaimReply, Offer, OfferClaim, OfferReleased
from tests.support.worlds.clock import ManualClock, SkippingClock

PAGE = 4096


class Direct:
    """Control messages without a way."""

    def __init__(self, owner: LocalTransfer) -> None:
        self.owner = owner

    async def claim(self, offer: Offer, claim: OfferClaim) -> ClaimReply:
        """See `Control.claim`."""
        return self.owner.answer(claim)

    async def release(self, offer: Offer, released: OfferReleased) -> None:
        """See `Control.release`."""
        self.owner.released(released)


def side(fabric: LocalFabric, name: str, pages: int, quarantine_s: float = 60.0) -> LocalTransfer:
    """One side."""
    numbers = count(1)

    def new_lease() -> bytes:
        return next(numbers).to_bytes(16, "big")

    memory = HostMemory(pages * PAGE)
    return LocalTransfer(
        fabric, name, 1, memory, fabric.clock, new_lease, claim_s=5.0, quarantine_s=quarantine_s
    )


def tensor(value: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """A page of one value."""
    return np.full(PAGE, value, np.uint8)


@pytest.mark.parametrize("quarantine_s", [60.0, 0.0], ids=["quarantine", "without"])
async def test_quarantine_is_what_keeps_a_late_reading_from_the_next(quarantine_s: float) -> None:
    """A reading that was given up lands after eight seconds. Its room is nobody's then, or the next one is spoilt."""
    clock = SkippingClock()
    fabric = LocalFabric(clock)
    owner, reader = side(fabric, "owner", 2), side(fabric, "reader", 1, quarantine_s)
    late, other = await owner.offer(tensor(1), ttl_s=100.0), await owner.offer(tensor(2), ttl_s=100.0)
    faults = iter([TransferFault(takes_s=8.0), TransferFault(takes_s=4.0)])
    fabric.faults = lambda _owner, _reader: next(faults, NONE)
    with pytest.raises(ReadTimedOut):
        await reader.read(late, Direct(owner))
    if quarantine_s:
        with pytest.raises(SlabFull):
            await reader.read(other, Direct(owner))
        clock.now_s += quarantine_s
        assert (await reader.read(other, Direct(owner)) == 2).all()
    else:
        with pytest.raises(ChecksumMismatch):
            await reader.read(other, Direct(owner))


async def test_close_waits_for_readers_and_lets_no_more_in() -> None:
    """Until the last has said that it is done, or the time is over."""
    clock = ManualClock()
    owner = side(LocalFabric(clock), "owner", 2)
    read, unread = await owner.offer(tensor(1), ttl_s=100.0), await owner.offer(tensor(2), ttl_s=100.0)
    owner.answer(OfferClaim(read.lease, 1, "reader", 1))
    closing = asyncio.create_task(owner.close(drain_s=4.0))
    await clock.advance(1.0)
    assert not closing.done()
    assert owner.answer(OfferClaim(unread.lease, 1, "reader", 1)) == ClaimRefused(unread.lease, "closing")
    owner.released(OfferReleased(read.lease, 1, "reader", 1, "read"))
    await clock.advance(0.1)
    assert closing.done()


async def test_close_does_not_wait_longer_than_told() -> None:
    """A reader that never says anything holds nobody up."""
    clock = ManualClock()
    owner = side(LocalFabric(clock), "owner", 1)
    offer = await owner.offer(tensor(1), ttl_s=100.0)
    owner.answer(OfferClaim(offer.lease, 1, "reader", 1))
    closing = asyncio.create_task(owner.close(drain_s=2.0))
    await clock.advance(2.1)
    assert closing.done()
