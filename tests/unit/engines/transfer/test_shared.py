"""Shared memory between processes: of one that ended, or that is another one by now, nothing is read."""

import os
import secrets
from collections.abc import AsyncIterator

import msgspec
import pytest
import pytest_asyncio

from headwater.engines.transfer.local import SharedMemory, SharedTransfer
from headwater.engines.transfer.port import PeerGone, TransferFailed
from headwater.schemas.media import Offer, SharedPlace
from tests.support.ports.transfers import Case, new_lease, shared_memory_case
from tests.support.worlds.clock import SkippingClock

SLAB = 1 << 20


@pytest_asyncio.fixture
async def case() -> AsyncIterator[Case]:
    """An owner and a reader."""
    async with shared_memory_case(SLAB) as made:
        yield made


def moved(offer: Offer, **changes: int | str) -> Offer:
    """The offer with another place."""
    return msgspec.structs.replace(offer, place=msgspec.structs.replace(offer.place, **changes))


def offer_of_child() -> Offer:
    """The place of memory in a process that has ended since."""
    readable, writable = os.pipe()
    child = os.fork()
    if not child:
        memory = SharedMemory(SLAB, "child")
        os.write(writable, b"%d" % memory.fd)
        os._exit(0)
    os.waitpid(child, 0)
    fd = int(os.read(readable, 16))
    os.close(readable)
    os.close(writable)
    place = SharedPlace("child", child, fd, 0)
    return Offer(bytes(16), "owner", 3, "uint8", (1,), 1, 0, 0, place)


async def test_a_process_that_ended_is_gone(case: Case) -> None:
    """Also one whose number or descriptor is another's now: its memory's name shows that."""
    offer = await case.owner.offer(1, (1000,), "uint8", 60.0)
    gone = offer_of_child().place
    with pytest.raises(PeerGone, match="has ended"):
        await case.read(msgspec.structs.replace(offer, place=gone))
    other = await case.owner.offer(1, (1000,), "uint8", 60.0)
    with pytest.raises(PeerGone, match="not the one"):
        await case.read(moved(other, agent="owner.of-long-ago"))
    await case.nothing_is_lost()


async def test_what_ends_before_the_offer_does_is_not_read(case: Case) -> None:
    """A place beyond the slab."""
    offer = await case.owner.offer(1, (1000,), "uint8", 60.0)
    with pytest.raises(TransferFailed, match="ends before"):
        await case.read(moved(offer, offset=SLAB - 999))
    await case.nothing_is_lost()


async def test_closed_memory_cannot_be_opened() -> None:
    """And closing it again closes no other file."""
    transfer = SharedTransfer(
        "owner", 3, SharedMemory(SLAB, secrets.token_hex(6)), SkippingClock(), new_lease
    )
    before = len(os.listdir("/proc/self/fd"))
    await transfer.close()
    await transfer.close()
    assert len(os.listdir("/proc/self/fd")) == before - 1
