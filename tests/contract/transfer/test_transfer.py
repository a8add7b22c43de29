"""The `Transfer` contract: what is read is what was offered, once, or the error says why not; and nothing is lost.

Over the in-process twin, over shared memory, and over NIXL with the owner in a process of its own.
"""

import asyncio
import random
from collections.abc import AsyncIterator

import numpy as np
import pytest
import pytest_asyncio

from headwater.engines.transfer.port import (
    ChecksumMismatch,
    OfferConsumed,
    OfferExpired,
    OfferVoid,
    PeerGone,
    SlabFull,
    TransferClosed,
    TransferFailed,
)
from headwater.schemas.media import ClaimRefused, Offer, OfferClaim, OfferReleased
from tests.support.ports.transfers import (
    CLAIM_S,
    QUARANTINE_S,
    SLAB,
    Case,
    MakeCase,
    Wire,
    expected,
    local_case,
    nixl_case,
    shared_memory_case,
)

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.xdist_group("nixl")]

SHAPE = (300, 1000)
NBYTES = 600_000


@pytest.fixture(scope="module", params=["local", "shared memory", "nixl"])
def make_case(request: pytest.FixtureRequest) -> MakeCase:
    """Makes owner and reader, of each kind."""
    if request.param == "nixl":
        pytest.importorskip("nixl", reason="the extra nixl is not installed")
        return nixl_case
    return local_case if request.param == "local" else shared_memory_case


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_case(make_case: MakeCase) -> AsyncIterator[Case]:
    """One owner and reader for the tests of this module that leave both alive."""
    async with make_case() as case:
        yield case


@pytest_asyncio.fixture(loop_scope="module")
async def case(shared_case: Case) -> AsyncIterator[Case]:
    """The shared one with a wire of the test's own; after each test all bytes are back."""
    shared_case.wire = Wire(shared_case.owner)
    yield shared_case
    await shared_case.nothing_is_lost()


async def offered(case: Case, seed: int = 1, ttl_s: float = 60.0) -> Offer:
    """A float16 tensor of 600 kB."""
    offer: Offer = await case.owner.offer(seed, SHAPE, "float16", ttl_s)
    return offer


async def test_a_tensor_arrives_as_it_was_offered(case: Case) -> None:
    """Bytes, shape and type; the offer names its owner and life, and its memory is free again afterwards."""
    offer = await offered(case)
    assert (offer.owner, offer.epoch, offer.dtype, offer.shape, offer.nbytes) == (
        "owner",
        3,
        "float16",
        SHAPE,
        NBYTES,
    )
    array = await case.read(offer)
    want = expected(1, SHAPE, "float16")
    assert (array.dtype, array.shape) == (want.dtype, want.shape)
    assert array.tobytes() == want.tobytes()
    assert case.wire.outcomes == ["read"]
    assert (await case.owner.stats()).free == SLAB
    assert case.reader.transfer.stats().free == SLAB


async def test_metadata_is_asked_for_at_the_first_contact_only(case: Case) -> None:
    """Whoever has met the owner's agent asks no more."""
    await case.read(await offered(case))
    await case.read(await offered(case))
    assert not case.wire.claims[1].needs_metadata


async def test_200_transfers_of_mixed_sizes_are_equal_byte_for_byte(case: Case) -> None:
    """From one byte to two megabytes, eight at a time."""
    chance = random.Random(5)
    many = asyncio.Semaphore(8)

    async def one(seed: int) -> None:
        dtype = chance.choice(["uint8", "float16", "float32", "int64", "bool"])
        nbytes = int(2 ** chance.uniform(0, 21))
        shape = (max(1, nbytes // np.dtype(dtype).itemsize),)
        async with many:
            offer = await case.owner.offer(seed, shape, dtype, 60.0)
            array = await case.read(offer)
        assert array.tobytes() == expected(seed, shape, dtype).tobytes()

    async with asyncio.TaskGroup() as group:
        for seed in range(200):
            group.create_task(one(seed))
    assert case.wire.outcomes == ["read"] * 200


async def test_an_offer_is_read_once(case: Case) -> None:
    """A second reading is refused, with the same attempt and with another, during the first and after it."""
    offer = await offered(case)
    claim = OfferClaim(offer.lease, offer.epoch, "reader", 1)

    async def again() -> None:
        assert await case.owner.answer(claim) == ClaimRefused(offer.lease, "consumed")

    case.wire.granted = again
    await case.read(offer)
    case.wire.granted = None
    for attempt in (1, 2):
        with pytest.raises(OfferConsumed, match="owner granted the offer to a reader before"):
            await case.read(offer, attempt)
    assert case.wire.outcomes == ["read"], "nothing to release where nothing was granted"


async def test_expired_and_withdrawn_offers_are_refused(case: Case) -> None:
    """And their memory is free at once: nobody was ever let in."""
    expired, withdrawn = await offered(case, ttl_s=5.0), await offered(case, ttl_s=50.0)
    await case.advance(5.0)
    await case.owner.withdraw(withdrawn.lease)
    assert (await case.owner.stats()).free == SLAB
    for offer in (expired, withdrawn):
        with pytest.raises(OfferExpired):
            await case.read(offer)


async def test_a_lease_of_another_epoch_is_void(case: Case) -> None:
    """As is one that the owner never gave."""
    offer = await offered(case)
    old = Offer(offer.lease, "owner", 2, *[getattr(offer, name) for name in offer.__struct_fields__[3:]])
    unknown = Offer(bytes(16), "owner", 3, *[getattr(offer, name) for name in offer.__struct_fields__[3:]])
    for void in (old, unknown):
        with pytest.raises(OfferVoid):
            await case.read(void)
    assert (await case.read(offer)).nbytes == NBYTES, "the true one is untouched"


async def test_a_buffer_overwritten_before_it_is_read_is_noticed(case: Case) -> None:
    """NIXL reads whatever is there."""
    offer = await offered(case)
    case.wire.granted = lambda: case.owner.overwrite(offer)
    with pytest.raises(ChecksumMismatch):
        await case.read(offer)
    assert case.wire.outcomes == ["checksum_mismatch"]
    assert (await case.owner.stats()).free == SLAB, "the reading has ended, so its buffer is free"


async def test_a_buffer_overwritten_while_it_is_read_is_noticed(case: Case) -> None:
    """64 MiB under a writer that never stops."""
    offer = await case.owner.offer(3, (64 << 20,), "uint8", 60.0)
    case.wire.granted = lambda: case.owner.scribble(offer, True)
    try:
        with pytest.raises(ChecksumMismatch):
            await case.read(offer)
    finally:
        await case.owner.scribble(offer, False)


async def test_a_full_slab_is_an_error_at_once(case: Case) -> None:
    """On the owner's side; offers that were there stay good, and room comes back with the first reading."""
    half = SLAB // 2
    first, second = [await case.owner.offer(seed, (half,), "uint8", 60.0) for seed in (1, 2)]
    with pytest.raises(SlabFull, match="0 are free"):
        await case.owner.offer(3, (1,), "uint8", 60.0)
    await case.read(first)
    third = await case.owner.offer(3, (1000,), "uint8", 60.0)
    for offer, size, seed in ((second, half, 2), (third, 1000, 3)):
        assert np.array_equal(await case.read(offer), expected(seed, (size,), "uint8"))


async def test_a_reader_without_room_does_not_use_up_the_offer(case: Case) -> None:
    """It takes its room before it claims."""
    offer = await offered(case)
    in_the_way = await case.reader.offer(1, (SLAB,), "uint8", 60.0)
    with pytest.raises(SlabFull):
        await case.read(offer)
    assert case.wire.claims == []
    await case.reader.withdraw(in_the_way.lease)
    assert (await case.read(offer)).nbytes == NBYTES


async def test_a_claim_without_a_word_is_quarantined(case: Case) -> None:
    """The reader died, say: its buffer rests for the stated time and is nobody's meanwhile."""
    offer = await offered(case)
    await case.owner.answer(OfferClaim(offer.lease, offer.epoch, "dead", 1))
    await case.advance(CLAIM_S)
    assert (await case.owner.stats()).quarantined >= NBYTES
    await case.advance(QUARANTINE_S)
    assert (await case.owner.stats()).free == SLAB


async def test_only_the_reader_can_release(case: Case) -> None:
    """A word of anyone else has no effect."""
    offer = await offered(case)
    await case.owner.answer(OfferClaim(offer.lease, offer.epoch, "reader", 1))
    for consumer, attempt in (("another", 1), ("reader", 2)):
        assert not await case.owner.released(OfferReleased(offer.lease, 3, consumer, attempt, "read"))
    assert (await case.owner.stats()).claimed >= NBYTES
    assert await case.owner.released(OfferReleased(offer.lease, 3, "reader", 1, "unused"))
    assert (await case.owner.stats()).free == SLAB


async def test_a_cancelled_reading_leaves_both_buffers_in_quarantine(case: Case) -> None:
    """Before the grant nothing was begun, so nothing rests; the same memory is good afterwards."""
    offer = await offered(case)
    stopped = asyncio.Event()

    async def stop() -> None:
        stopped.set()
        await asyncio.Event().wait()

    case.wire.granted = stop
    reading = asyncio.create_task(case.read(offer))
    await stopped.wait()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert case.wire.outcomes == ["unused"]
    assert case.reader.transfer.stats().free == SLAB
    assert (await case.owner.stats()).free == SLAB


async def test_an_offer_that_contradicts_itself_is_refused(case: Case) -> None:
    """Its shape is another size than its bytes."""
    offer = await offered(case)
    fields = {name: getattr(offer, name) for name in offer.__struct_fields__}
    with pytest.raises(TransferFailed, match="is inconsistent"):
        await case.read(Offer(**{**fields, "shape": (300, 1001)}))
    assert case.wire.claims == []


async def test_an_end_that_can_not_be_told_is_not_the_readings_error(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner's time-outs take the buffer back."""
    offer = await offered(case)

    async def lost(_offer: Offer, _released: OfferReleased) -> None:
        raise PeerGone("no way")

    monkeypatch.setattr(case.wire, "release", lost)
    assert (await case.read(offer)).nbytes == NBYTES
    assert (await case.owner.stats()).claimed >= NBYTES


async def test_a_side_can_read_its_own_offer(case: Case) -> None:
    """Two actors of one process may share a slab."""
    offer = await case.reader.offer(9, SHAPE, "float16", 60.0)
    array = await case.reader.transfer.read(offer, Wire(case.reader))
    assert array.tobytes() == expected(9, SHAPE, "float16").tobytes()


async def test_a_borrowed_tensor_holds_its_room_until_the_block_ends(case: Case) -> None:
    """Checked like a copy; the owner is told at once, for its own buffer is not needed any more."""
    offer = await offered(case)
    async with case.reader.transfer.borrow(offer, case.wire) as array:
        assert array.tobytes() == expected(1, SHAPE, "float16").tobytes()
        assert case.reader.transfer.stats().held >= NBYTES
        assert case.wire.outcomes == ["read"]
        assert (await case.owner.stats()).free == SLAB
    assert case.reader.transfer.stats().free == SLAB
    offer = await offered(case)
    case.wire.granted = lambda: case.owner.overwrite(offer)
    with pytest.raises(ChecksumMismatch):
        async with case.reader.transfer.borrow(offer, case.wire):
            raise AssertionError("lent what is not right")


async def test_after_close_everything_is_refused(make_case: MakeCase) -> None:
    """Claims by name; offers and readings by an error of this side. Closing twice is fine."""
    async with make_case(1 << 20) as case:
        offer = await offered(case)
        await case.reader.close()
        await case.reader.close()
        with pytest.raises(TransferClosed):
            await case.read(offer)
        with pytest.raises(TransferClosed):
            await case.reader.offer(1, (1,), "uint8", 1.0)
        await case.owner.close()
        claim = OfferClaim(offer.lease, offer.epoch, "reader", 1)
        assert await case.owner.answer(claim) == ClaimRefused(offer.lease, "closing")
