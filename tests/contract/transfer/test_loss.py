"""The `Transfer` contract when an owner dies or hangs: an error soon, nothing hung, and the reader's memory comes back."""

import asyncio
import gc
import signal
import threading
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest

from headwater.engines.transfer.local import TransferFault
from headwater.engines.transfer.nixl import NixlTransfer
from headwater.engines.transfer.port import PeerGone, ReadTimedOut, TransferError
from headwater.schemas.media import Offer
from tests.support.ports.transfers import Case, MakeCase, expected, local_case, nixl_case

pytestmark = [pytest.mark.xdist_group("nixl")]

NBYTES = 12 << 20


@pytest.fixture(params=["local", "nixl"])
def make_case(request: pytest.FixtureRequest) -> MakeCase:
    """Makes owner and reader, of each kind."""
    if request.param == "nixl":
        pytest.importorskip("nixl", reason="the extra nixl is not installed")
        return nixl_case
    return local_case


@pytest.fixture
async def case(make_case: MakeCase) -> AsyncIterator[Case]:
    """An owner that the test may kill."""
    async with make_case() as made:
        yield made


async def offered(case: Case, seed: int = 1) -> Offer:
    """A tensor of 12 MiB."""
    offer: Offer = await case.owner.offer(seed, (NBYTES,), "uint8", 60.0)
    return offer


@pytest.mark.parametrize("met", [False, True], ids=["first-contact", "met"])
async def test_an_owner_that_died_before_the_claim_is_gone(case: Case, met: bool) -> None:
    """Here the control messages say it."""
    if met:
        await case.read(await offered(case))
    offer = await offered(case)
    await case.owner.kill()
    with pytest.raises(PeerGone):
        await case.read(offer)
    await case.nothing_is_lost(owner_lives=False)


@pytest.mark.parametrize("met", [False, True], ids=["first-contact", "met"])
async def test_an_owner_that_dies_after_its_grant_is_gone(case: Case, met: bool) -> None:
    """Here NIXL says it: it can not connect, or its connection is lost."""
    if met:
        await case.read(await offered(case))
    offer = await offered(case)
    case.wire.granted = case.owner.kill
    with pytest.raises(PeerGone):
        await case.read(offer)
    await case.nothing_is_lost(owner_lives=False)


@pytest.mark.parametrize("met", [False, True], ids=["first-contact", "met"])
async def test_the_error_of_a_reading_is_in_no_cycle(case: Case, met: bool) -> None:
    """What the frames of its traceback hold, a slab perhaps, is freed with it and not by a later collection."""
    if met:
        await case.read(await offered(case))
    offer = await offered(case)
    case.wire.granted = case.owner.kill
    gc.collect()
    gc.disable()
    try:
        with suppress(PeerGone):
            await case.read(offer)
        await asyncio.sleep(0)  # the last future is in the loop's hands until then
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        cyclic = [found for found in gc.garbage if isinstance(found, PeerGone)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert cyclic == []


async def test_all_readings_of_an_owner_that_dies_end(case: Case) -> None:
    """At any moment of several readings at once: each has the right bytes or says that the owner is gone."""
    ended: list[str] = []

    async def read(seed: int, offer: Offer) -> None:
        try:
            array = await case.read(offer)
        except PeerGone:
            ended.append("gone")
        else:
            assert array.tobytes() == expected(seed, (NBYTES,), "uint8").tobytes()
            ended.append("read")

    async def granted() -> None:
        case.wire.granted = None if len(case.wire.claims) >= 3 else granted
        if case.wire.granted is None:
            await case.owner.kill()

    case.wire.granted = granted
    async with asyncio.TaskGroup() as group:
        for seed, offer in [(seed, await offered(case, seed)) for seed in range(6)]:
            group.create_task(read(seed, offer))
    assert len(ended) == 6
    assert "gone" in ended
    await case.nothing_is_lost(owner_lives=False)


@pytest.mark.parametrize(("met", "after_s"), [(False, 0.008), (True, 0.003)], ids=["connecting", "reading"])
async def test_an_owner_killed_in_the_middle_leaves_the_right_bytes_or_is_gone(
    case: Case, met: bool, after_s: float
) -> None:
    """A first reading of 64 MiB takes about 30 ms, a later one 8: somewhere within them."""
    if met:
        await case.read(await offered(case))
    offer = await case.owner.offer(5, (64 << 20,), "uint8", 60.0)
    if case.fabric:
        case.fabric.faults = lambda _owner, _reader: TransferFault(takes_s=after_s, owner_dies=True)
    else:
        case.wire.granted = lambda: _kill_later(case, after_s)
    try:
        array = await case.read(offer)
    except PeerGone:
        pass
    else:
        assert array.tobytes() == expected(5, (64 << 20,), "uint8").tobytes()
    if not case.fabric:
        await case.owner.wait()
    await case.nothing_is_lost(owner_lives=False)


async def test_a_new_life_of_a_dead_owner_is_met_anew(make_case: MakeCase) -> None:
    """Another agent, another address: nothing of the dead one is used."""
    async with make_case(2 * NBYTES) as first, make_case(2 * NBYTES) as second:
        await first.read(await offered(first))
        late = await offered(first)
        await first.owner.kill()
        with pytest.raises(PeerGone):
            await first.read(late)
        array = await second.read(await offered(second, 4))
        assert array.tobytes() == expected(4, (NBYTES,), "uint8").tobytes()


async def test_an_owner_that_hangs_ends_the_reading_in_time(make_case: MakeCase) -> None:
    """The time is the owner's grant. Both buffers rest, since the bytes may still land; then all goes on."""
    async with make_case(claim_s=0.4) as case:
        offer = await offered(case)
        if case.fabric:
            case.fabric.faults = lambda _owner, _reader: TransferFault(takes_s=3.0)
        else:

            async def hang() -> None:
                case.owner.signal(signal.SIGSTOP)
                # The reading is over before this; only then can the owner be told.
                asyncio.get_running_loop().call_later(1.5, case.owner.signal, signal.SIGCONT)

            case.wire.granted = hang
        with pytest.raises(ReadTimedOut):
            await case.read(offer)
        assert case.reader.transfer.stats().quarantined == NBYTES
        assert case.wire.outcomes == ["timed_out"]
        case.wire.granted = None
        if case.fabric:
            case.fabric.faults = lambda _owner, _reader: TransferFault()
            await case.advance(10.0)  # what was given up has landed now
        case.wire.read_within_ms = 10_000  # a busy machine may need more than what the hanging owner grants
        array = await case.read(await offered(case, 2))
        assert array.tobytes() == expected(2, (NBYTES,), "uint8").tobytes()
        await case.nothing_is_lost()


async def test_a_cancelled_reading_is_quarantined() -> None:
    """Cancelled while bytes move, over NIXL: nobody knows when they stop."""
    pytest.importorskip("nixl", reason="the extra nixl is not installed")
    async with nixl_case() as case:
        offer = await offered(case)
        case.wire.granted = lambda: _signal(case, signal.SIGSTOP)
        reading = asyncio.create_task(case.read(offer))
        transfer = case.reader.transfer
        assert isinstance(transfer, NixlTransfer)
        while not transfer._nixl._readings:
            await asyncio.sleep(0.005)
        reading.cancel()
        await asyncio.sleep(0)  # the cancellation is on its way before the bytes can be
        await _signal(case, signal.SIGCONT)
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert case.wire.outcomes == ["failed"]
        assert transfer.stats().quarantined == NBYTES
        assert (await case.owner.stats()).quarantined == NBYTES
        await case.nothing_is_lost()


async def test_deregistered_memory_gives_the_right_bytes_or_an_error(case: Case) -> None:
    """NIXL may read what its owner deregistered: never something else, and never without an end."""
    await case.read(await offered(case))
    offer = await offered(case)
    case.wire.granted = case.owner.close
    try:
        array = await case.read(offer)
    except TransferError:
        pass
    else:
        assert array.tobytes() == expected(1, (NBYTES,), "uint8").tobytes()
    await case.nothing_is_lost()


async def _kill_later(case: Case, after_s: float) -> None:
    # From a thread: the loop may be busy just then.
    threading.Timer(after_s, case.owner.signal, [signal.SIGKILL]).start()


async def _signal(case: Case, number: signal.Signals) -> None:
    case.owner.signal(number)
