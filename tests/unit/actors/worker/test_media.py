"""Images between edge and worker: fetched in pieces, once, kept within a bound, and missing ones told."""

import asyncio
import secrets
from functools import partial

import msgspec
import pytest

from headwater.actors import metrics
from headwater.actors.edge.saga.workers import MediaHolder
from headwater.actors.runtime.lease import OfferAnswers
from headwater.actors.runtime.ports import MemoryBus, Message
from headwater.actors.worker.media import OFFERED_BYTES_MIN, PIECE_BYTES, MediaCache, MediaMissing
from headwater.engines.transfer.local import LocalFabric, LocalTransfer, TransferFault
from headwater.engines.transfer.port import HostMemory
from headwater.schemas import subjects
from headwater.schemas.media import LEASE_BYTES, MediaPiece, MediaQuery, PromptMedia
from tests.support.worlds.clock import SkippingClock


def image(id_: str, height: int = 10) -> PromptMedia:
    """An image that is 100 pixels wide, at the start of a prompt."""
    return PromptMedia("image", id_, 0, 4, (height, 100, 3))


def content(item: PromptMedia, seed: int = 0) -> bytes:
    """As many bytes as the image has."""
    return bytes((place + seed) % 251 for place in range(item.size))


class Exchange:
    """An edge that holds images, and counts the queries for them."""

    def __init__(self, bytes_max: int = 1 << 30) -> None:
        self.bus = MemoryBus()
        self.holder = MediaHolder(self.bus)
        self.cache = MediaCache(self.bus, "ns", bytes_max)
        self.queries: list[MediaQuery] = []

    async def open(self) -> None:
        """Subscribe the edge."""
        await self.bus.subscribe(subjects.edge_media("ns", "edge"), self._on_query)

    async def _on_query(self, message: Message) -> None:
        self.queries.append(msgspec.msgpack.decode(message.data, type=MediaQuery))
        await self.holder.on_query(message)


async def test_an_image_is_fetched_in_pieces_and_kept() -> None:
    """The second request with it, of whatever edge, fetches nothing."""
    made = Exchange()
    await made.open()
    large = image("a", height=2 * PIECE_BYTES // 300 + 100)
    data = content(large)
    with made.holder.hold([("a", memoryview(data))]):
        [loaded] = await made.cache.load("edge", [large])
    assert loaded.data == data
    assert [query.offset for query in made.queries] == [0, PIECE_BYTES, 2 * PIECE_BYTES]
    cached = metrics.MEDIA_LOADS.labels("cache")
    before = cached._value.get()
    [again] = await made.cache.load("another", [large])
    assert again.data == data
    assert cached._value.get() == before + 1
    assert len(made.queries) == 3


async def test_requests_with_the_same_image_fetch_it_once() -> None:
    """Also while it is on its way."""
    made = Exchange()
    await made.open()
    one = image("a")
    with made.holder.hold([("a", memoryview(content(one)))]):
        loaded = await asyncio.gather(*(made.cache.load("edge", [one]) for _ in range(3)))
    assert [item.data for [item] in loaded] == [content(one)] * 3
    assert len(made.queries) == 1


async def test_the_least_recently_used_image_makes_room() -> None:
    """Of three that do not fit together."""
    one, two, three = image("a"), image("b"), image("c")
    made = Exchange(bytes_max=2 * one.size)
    await made.open()
    with made.holder.hold([(item.id, memoryview(content(item))) for item in (one, two, three)]):
        for item in (one, two, one, three, one, two):
            await made.cache.load("edge", [item])
    assert [query.id for query in made.queries] == ["a", "b", "c", "b"]


async def test_what_cannot_be_fetched_is_named() -> None:
    """An edge that is gone, one whose request has ended, and a size that the edge does not have."""
    made = Exchange()
    one = image("a")
    with pytest.raises(MediaMissing, match="image a from edge edge failed"):
        await made.cache.load("edge", [one])
    await made.open()
    with made.holder.hold([("a", memoryview(content(one)))]):
        pass
    with pytest.raises(MediaMissing, match="no longer has image a"):
        await made.cache.load("edge", [one])
    with made.holder.hold([("a", memoryview(b"short"))]), pytest.raises(MediaMissing, match="no longer has"):
        await made.cache.load("edge", [one])


async def test_an_image_is_held_as_long_as_any_request_has_it() -> None:
    """The first of two that ends does not take it from the other; no query reads beyond it."""
    made = Exchange()
    await made.open()
    one = image("a")
    data = memoryview(content(one))

    async def ask(offset: int, count: int) -> MediaPiece:
        query = msgspec.msgpack.encode(MediaQuery("a", offset, count))
        reply = await made.bus.request(subjects.edge_media("ns", "edge"), query, timeout_s=1)
        return msgspec.msgpack.decode(reply, type=MediaPiece)

    with made.holder.hold([("a", data)]):
        with made.holder.hold([("a", data), ("a", data)]):
            assert (await ask(0, 10)).data == bytes(data[:10])
        assert (await ask(5, 10)).data == bytes(data[5:15])
        assert (await ask(one.size - 5, 10)).data == bytes(data[-5:])
        for offset, count in ((-1, 10), (0, 0), (0, 1 << 30)):
            assert not (await ask(offset, count)).known
    assert not (await ask(0, 10)).known


class Transfers:
    """An exchange whose two sides have a slab of this many bytes each."""

    def __init__(self, owner: int, reader: int) -> None:
        self.exchange = Exchange()
        self.clock = SkippingClock()
        self.fabric = LocalFabric(self.clock)
        self.owner = self._transfer("edge", owner)
        self.reader = self._transfer("worker", reader)
        self.exchange.holder.transfer = self.owner
        self.exchange.cache.transfer = self.reader
        self.answers = OfferAnswers(self.exchange.bus)
        self.answers.transfer = self.owner

    def _transfer(self, name: str, nbytes: int) -> LocalTransfer:
        new_lease = partial(secrets.token_bytes, LEASE_BYTES)
        return LocalTransfer(self.fabric, name, 1, HostMemory(nbytes), self.clock, new_lease)

    async def load(self, item: PromptMedia, data: bytes) -> bytes:
        """What the worker gets of an item that the edge holds."""
        await self.exchange.open()
        await self.exchange.bus.subscribe(subjects.edge_offer("ns", "edge"), self.answers.on_offer)
        with self.exchange.holder.hold([(item.id, memoryview(data))]):
            [loaded] = await self.exchange.cache.load("edge", [item])
        return loaded.data

    @property
    def pieces(self) -> int:
        """How many pieces were asked for."""
        return sum(not query.as_offer for query in self.exchange.queries)

    def nothing_is_held(self) -> bool:
        """Both slabs are free."""
        return all(stats.free == stats.capacity for stats in (self.owner.stats(), self.reader.stats()))


LARGE = image("a", height=OFFERED_BYTES_MIN // 300 + 1)


async def test_a_large_image_is_read_from_an_offer() -> None:
    """In one query; nothing stays in the slabs, and the next request has it."""
    made = Transfers(2 << 20, 2 << 20)
    data = content(LARGE)
    assert await made.load(LARGE, data) == data
    assert [query.as_offer for query in made.exchange.queries] == [True]
    assert made.nothing_is_held()
    [again] = await made.exchange.cache.load("another", [LARGE])
    assert again.data == data


async def test_a_small_image_is_asked_for_at_once() -> None:
    """A message is as fast."""
    made = Transfers(2 << 20, 2 << 20)
    small = image("a")
    assert await made.load(small, content(small)) == content(small)
    assert [query.as_offer for query in made.exchange.queries] == [False]


@pytest.mark.parametrize(("owner", "reader"), [(1 << 16, 2 << 20), (2 << 20, 1 << 16)])
async def test_an_image_without_room_comes_in_pieces(owner: int, reader: int) -> None:
    """On either side."""
    made = Transfers(owner, reader)
    assert await made.load(LARGE, content(LARGE)) == content(LARGE)
    assert made.pieces == 2
    made.clock.now_s += 100.0
    assert made.nothing_is_held()


async def test_an_edge_without_a_transfer_sends_pieces() -> None:
    """Also one of an earlier release, which sends the bytes that the query names."""
    made = Transfers(2 << 20, 2 << 20)
    made.exchange.holder.transfer = None
    assert await made.load(LARGE, content(LARGE)) == content(LARGE)
    assert made.pieces == 2


@pytest.mark.parametrize(
    "fault", [TransferFault(overwritten=True), TransferFault(takes_s=1e6), TransferFault(owner_dies=True)]
)
async def test_a_reading_that_fails_is_made_up_by_pieces(fault: TransferFault) -> None:
    """Lost, corrupted, or too late: the image is right."""
    made = Transfers(2 << 20, 2 << 20)
    made.fabric.faults = lambda _owner, _reader: fault
    assert await made.load(LARGE, content(LARGE)) == content(LARGE)
    assert made.pieces == 2
    made.clock.now_s += 1e7
    assert made.nothing_is_held()


async def test_an_offer_of_another_size_is_not_read() -> None:
    """An edge that holds something else under the id: its pieces are not those asked for either."""
    made = Transfers(2 << 20, 2 << 20)
    with pytest.raises(MediaMissing, match="no longer has"):
        await made.load(LARGE, content(LARGE)[:-1])


async def test_an_edge_that_does_not_reply_with_an_offer_is_asked_for_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its copy takes too long, or fails unexpectedly."""
    monkeypatch.setattr("headwater.actors.worker.media.PIECE_TIMEOUT_S", 0.2)
    made = Transfers(2 << 20, 2 << 20)

    async def fail(*_: object, **__: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(made.owner, "offer", fail)
    assert await made.load(LARGE, content(LARGE)) == content(LARGE)
    assert made.pieces == 2
    for task in made.exchange.holder._offering:
        task.cancel()
