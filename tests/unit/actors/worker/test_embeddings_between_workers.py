"""An image's embedding from the worker that encodes it to the one that serves the request, and every way in which that fails."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Coroutine
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest
import pytest_asyncio

from headwater.actors.edge.saga.workers import MediaHolder
from headwater.actors.runtime.lease import OfferAnswers
from headwater.actors.runtime.ports import MemoryBus
from headwater.actors.worker.encoding import OFFER_S, EmbeddingReader, EncodeRequests
from headwater.actors.worker.handoffs import Handoffs
from headwater.actors.worker.inflight import Inflight, WorkerStatus
from headwater.actors.worker.media import MediaCache
from headwater.actors.worker.settings import WorkerProfile
from headwater.engines.engine import EncodedImage, EngineError, EngineLoad, RequestRejected
from headwater.engines.transfer.local import LocalFabric, LocalTransfer
from headwater.engines.transfer.port import HostMemory
from headwater.schemas import subjects
from headwater.schemas.encode_requests import Declined, Encoded, EncodeReply, EncodeRequest
from headwater.schemas.inference import Refused, WaitingEdge
from headwater.schemas.media import PromptMedia
from tests.support.worlds.clock import SkippingClock

_reply: msgspec.msgpack.Decoder[EncodeReply] = msgspec.msgpack.Decoder(EncodeReply)

EPOCH = 3
PIXELS = bytes(28 * 28 * 3)
ITEM = PromptMedia("image", "a" * 32, 5, 4, (28, 28, 3))
VALUES = np.arange(16, dtype=np.float32).reshape(4, 4)


class Engine:
    """Encodes and takes embeddings, as it is told."""

    name = "test"

    def __init__(self) -> None:
        self.held: dict[str, EncodedImage] = {}
        self.computed = 0
        self.failure: Exception | None = None
        self.gate, self.begun = asyncio.Event(), asyncio.Event()
        self.gate.set()

    def load(self) -> EngineLoad:
        """Idle."""
        return EngineLoad(0, 0, 0, 1)

    def is_waiting(self, request: str) -> bool:
        """Never."""
        return False

    def holds_embedding(self, item: PromptMedia) -> bool:
        """Is it here?"""
        return item.id in self.held

    async def encode(self, item: PromptMedia) -> EncodedImage:
        """Of the pixels, which must have come."""
        if self.failure is not None:
            raise self.failure
        self.begun.set()
        await self.gate.wait()
        if item.id in self.held:
            return self.held[item.id]._replace(cached=True)
        assert item.data == PIXELS
        self.computed += 1
        self.held[item.id] = EncodedImage(VALUES, "float32", b'{"grid":[1,2,2]}')
        return self.held[item.id]

    async def put_embedding(self, item: PromptMedia, image: EncodedImage) -> None:
        """Take it."""
        if self.failure is not None:
            raise self.failure
        self.held[item.id] = image


class Two:
    """An encode worker, the worker that serves a request, and the edge that has its image."""

    def __init__(self) -> None:
        self.bus, self.clock = MemoryBus(), SkippingClock()
        self.fabric = LocalFabric(self.clock)
        self.encoder, self.server = Engine(), Engine()
        self.tasks: set[asyncio.Task[None]] = set()
        status = WorkerStatus("encode-0", WorkerProfile("encode"), asyncio.Event())
        self.status = status
        inflight = Inflight(self.clock, self.encoder, Handoffs("encode-0", self.clock, "returned"))
        self.inflight = inflight
        media = MediaCache(self.bus, "ns")
        encoder: Any = self.encoder
        server: Any = self.server
        self.requests = EncodeRequests(self.bus, encoder, self.spawn, status, inflight, media)
        self.requests.epoch = EPOCH
        self.offers = OfferAnswers(self.bus)
        self.owner = self.transfer("encode-0", 1 << 20)
        self.requests.transfer = self.offers.transfer = self.owner
        self.reader = EmbeddingReader(self.bus, "ns", server, self.clock)
        self.reader.transfer = self.transfer("worker-0", 1 << 20)
        self.holder = MediaHolder(self.bus)

    def transfer(self, owner: str, nbytes: int) -> LocalTransfer:
        """A slab."""
        lease = partial(secrets.token_bytes, 16)
        return LocalTransfer(self.fabric, owner, 9, HostMemory(nbytes), self.clock, lease)

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> "asyncio.Task[None]":
        """As an actor does."""
        task = asyncio.create_task(work, name=name)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    async def open(self) -> None:
        """Subscribe all."""
        for verb, handler in (("encode", self.requests.on_request), ("offer", self.offers.on_offer)):
            await self.bus.subscribe(subjects.engine("ns", "encode-0", EPOCH, verb), handler)  # type: ignore[arg-type]
        await self.bus.subscribe(subjects.edge_media("ns", "edge"), self.holder.on_query)

    async def encode(
        self,
        request: str = "r-0-1-e0-0",
        item: PromptMedia = ITEM,
        ahead_max: int = 0,
        waiter: WaitingEdge | None = None,
    ) -> EncodeReply:
        """Ask the encode worker."""
        data = msgspec.msgpack.encode(EncodeRequest(request, "edge", item, ahead_max, waiter))
        with self.holder.hold([(item.id, memoryview(PIXELS))]):
            reply = await self.bus.request(
                subjects.engine("ns", "encode-0", EPOCH, "encode"), data, timeout_s=10
            )
        await asyncio.sleep(0)
        return _reply.decode(reply)

    async def offered(self) -> PromptMedia:
        """The image with its embedding on offer."""
        reply = await self.encode(secrets.token_hex(4))
        assert isinstance(reply, Encoded)
        return msgspec.structs.replace(ITEM, embedding=reply.embedding)


@pytest_asyncio.fixture
async def two() -> AsyncIterator[Two]:
    """The two, open. In the end nothing is in flight, and no memory is held."""
    made = Two()
    await made.open()
    yield made
    await asyncio.gather(*made.tasks, return_exceptions=True)
    assert not len(made.inflight)


async def test_an_embedding_is_computed_once_and_read(two: Two) -> None:
    """Byte for byte, with its fields; the reader then needs no pixels."""
    item = await two.offered()
    assert await two.reader.read([item])
    held = two.server.held[ITEM.id]
    assert np.array_equal(held.values, VALUES)
    assert held.fields == b'{"grid":[1,2,2]}'
    assert two.owner.stats().ended == {"read": 1}
    again = await two.encode("second")
    assert isinstance(again, Encoded)
    assert again.cached
    assert two.encoder.computed == 1
    progress = two.inflight.take_progress()
    assert progress.accepted == progress.finished
    assert progress.cached == (0, ITEM.tokens)


async def test_an_image_that_no_edge_waits_for_is_not_encoded_further(two: Two) -> None:
    """The worker states which edge it has it from; once it is aborted, nothing is in flight."""
    two.encoder.gate.clear()
    asked = asyncio.create_task(two.encode("r", waiter=WaitingEdge("edge", 7, 9)))
    await two.encoder.begun.wait()
    assert two.requests.requests_by_edge() == {("edge", 7): {9: "r"}}
    two.requests.abort(["r", "nobody's"])
    await asyncio.gather(*two.tasks, return_exceptions=True)
    assert (two.requests.requests_by_edge(), len(two.inflight), two.encoder.computed) == ({}, 0, 0)
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)


async def test_an_offer_that_nobody_reads_expires(two: Two) -> None:
    """A reader that has the embedding claims nothing; one that comes too late does without."""
    item = await two.offered()
    two.server.held[ITEM.id] = EncodedImage(VALUES, "float32")
    assert await two.reader.read([item])
    await two.clock.sleep(OFFER_S + 1)
    two.server.held.clear()
    assert not await two.reader.read([item])
    stats = two.owner.stats()
    assert stats.free == stats.capacity


async def test_each_offer_has_one_reader(two: Two) -> None:
    """Another attempt of the request gets an offer of its own."""
    item = await two.offered()
    assert await two.reader.read([item])
    two.server.held.clear()
    assert not await two.reader.read([item])
    assert await two.reader.read([await two.offered()])


async def test_requests_with_the_same_image_read_it_once(two: Two) -> None:
    """The offers that are not needed expire."""
    items = [await two.offered() for _ in range(3)]
    assert await asyncio.gather(*(two.reader.read([item]) for item in items)) == [True] * 3
    assert two.owner.stats().ended == {"read": 1}


async def test_a_dead_encode_worker_is_noticed(two: Two) -> None:
    """Before its answer to a claim, or between that and the bytes."""
    item = await two.offered()
    two.owner.kill()
    assert not await two.reader.read([item])
    assert item.embedding is not None
    gone = msgspec.structs.replace(item.embedding, epoch=EPOCH - 1)
    assert not await two.reader.read([msgspec.structs.replace(item, embedding=gone)])


@pytest.mark.parametrize("failure", [EngineError("all in use"), ZeroDivisionError()])
async def test_an_engine_that_takes_no_more_costs_nothing(two: Two, failure: Exception) -> None:
    """The image is then encoded where it is served; a fault of its integration ends no worker."""
    two.server.failure = failure
    assert not await two.reader.read([await two.offered()])


async def test_one_missing_embedding_means_pixels_for_all(two: Two) -> None:
    """An engine takes all images of a prompt in one form."""
    other = PromptMedia("image", "b" * 32, 20, 4, (28, 28, 3))
    assert not await two.reader.read([await two.offered(), other])
    assert ITEM.id in two.server.held


@pytest.mark.parametrize(
    ("failure", "retryable", "fatal"),
    [
        (RequestRejected("bad image"), False, False),
        (EngineError("it failed"), True, False),
        (ZeroDivisionError(), True, False),
    ],
)
async def test_failures_of_an_engine_are_told(
    two: Two, failure: Exception, retryable: bool, fatal: bool
) -> None:
    """Each request is answered, once."""
    two.encoder.failure = failure
    reply = await two.encode()
    assert isinstance(reply, Refused)
    assert (reply.retryable, reply.fatal) == (retryable, fatal)


async def test_a_full_slab_and_a_missing_image_are_refusals(two: Two) -> None:
    """Another encode worker may have room, or the pixels in its cache."""
    two.requests.transfer = two.transfer("small", 64 * 1024)
    two.encoder.held[ITEM.id] = EncodedImage(np.zeros((200, 200), np.float32), "float32")
    reply = await two.encode()
    assert isinstance(reply, Refused)
    assert reply.retryable
    data = msgspec.msgpack.encode(EncodeRequest("r", "edge", msgspec.structs.replace(ITEM, id="c" * 32), 0))
    subject = subjects.engine("ns", "encode-0", EPOCH, "encode")
    missing = msgspec.msgpack.decode(await two.bus.request(subject, data, timeout_s=10))
    assert missing[0] == "no"
    assert "no longer has image" in missing[1]


async def test_an_image_is_declined_while_too_much_is_ahead_of_it(two: Two) -> None:
    """Not one that is at hand or being encoded; and what was declined is not in flight."""
    two.encoder.gate.clear()
    first = asyncio.ensure_future(two.encode("first"))
    await two.encoder.begun.wait()
    other = msgspec.structs.replace(ITEM, id="d" * 32)
    assert await two.encode("second", other, ahead_max=3) == Declined(4)
    assert two.inflight.names == ["first"]
    same = asyncio.ensure_future(two.encode("third"))
    fits = asyncio.ensure_future(two.encode("fourth", other, ahead_max=4))
    two.encoder.gate.set()
    replies = await asyncio.gather(first, same, fits)
    assert [type(reply) for reply in replies] == [Encoded] * 3
    progress = two.inflight.take_progress()
    assert sorted(progress.accepted) == sorted(progress.finished)


async def test_an_image_is_ahead_of_others_until_the_last_request_for_it_has_left(two: Two) -> None:
    """Also where one of several that wait for it is cancelled."""
    two.encoder.gate.clear()
    first = asyncio.ensure_future(two.encode("first"))
    await two.encoder.begun.wait()
    second = asyncio.ensure_future(two.encode("second"))
    while len(two.requests._running) < 2:
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    leaves = two.requests._running["second"].task
    leaves.cancel()
    await asyncio.gather(leaves, return_exceptions=True)
    second.cancel()
    other = msgspec.structs.replace(ITEM, id="d" * 32)
    async with asyncio.timeout(5):
        assert await two.encode("third", other, ahead_max=3) == Declined(4)
    two.encoder.gate.set()
    assert isinstance(await first, Encoded)
    assert isinstance(await two.encode("fourth", other), Encoded)
    await asyncio.gather(second, return_exceptions=True)


async def test_a_copy_of_a_message_counts_for_nothing(two: Two) -> None:
    """However late: a router would count a second one for ever."""
    assert isinstance(await two.encode("first"), Encoded)
    copy = asyncio.ensure_future(two.encode("first"))
    for _ in range(20):
        await asyncio.sleep(0)
    copy.cancel()
    await asyncio.gather(copy, return_exceptions=True)
    progress = two.inflight.take_progress()
    assert progress.accepted == progress.finished == ("first",)
    assert two.owner.stats().offered < 2 * 4096


async def test_a_draining_worker_refuses(two: Two) -> None:
    """As for any other request."""
    two.status.set_state("draining")
    reply = await two.encode()
    assert isinstance(reply, Refused)
    assert reply.retryable
