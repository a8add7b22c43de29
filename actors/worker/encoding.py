"""Embeddings of images at a worker: an encode worker computes and offers them, and the worker that serves the request reads them.

An encode worker fetches an image's pixels from the edge, and keeps the embedding for one reader. Whatever fails, the request
continues: its images are then fetched from the edge, and the engine encodes them itself.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import numpy as np
import structlog
from msgspec.structs import replace

from headwater.actors import metrics
from headwater.actors.runtime.actor import Spawn
from headwater.actors.runtime.lease import OwnerChannel
from headwater.actors.runtime.ports import Bus
from headwater.actors.worker.inflight import Inflight, WorkerStatus
from headwater.actors.worker.jobs import ReplyServer
from headwater.actors.worker.media import MediaCache
from headwater.actors.worker.requests import refusal_of
from headwater.engines.engine import EncodedImage, Engine, EngineError
from headwater.engines.logs import failure_place
from headwater.engines.transfer.port import TransferError
from headwater.engines.transfer.slab import TensorTransfer
from headwater.schemas import subjects
from headwater.schemas.clock import Clock
from headwater.schemas.encode_requests import Declined, Encoded, EncodeReply, EncodeRequest
from headwater.schemas.inference import Refused
from headwater.schemas.media import ClientEmbedding, ImageEmbedding, PromptMedia

OFFER_S: Final = 15.0
"""How long an offer waits for its reader, which is sent the request at once."""


class EncodeRequests(ReplyServer[EncodeRequest]):
    """The requests of one encode worker. `transfer` is set before the first one arrives."""

    decoder = msgspec.msgpack.Decoder(EncodeRequest)
    kind = "encode"

    def __init__(
        self,
        bus: Bus,
        engine: Engine,
        spawn: Spawn,
        status: WorkerStatus,
        inflight: Inflight,
        media: MediaCache,
    ) -> None:
        super().__init__(bus, engine, spawn, status, inflight, media)
        self.epoch = 0
        self.transfer: TensorTransfer | None = None
        self._wanted: dict[str, tuple[int, int]] = {}
        """The images that are being encoded, by id: their tokens, and how many requests wait for them."""

    def accept(self, request: EncodeRequest) -> Declined | None:
        """See `ReplyServer.accept`. Too many images before this one decline it: the report ends what the router counted for its decision."""
        self._inflight.accept_encoding(request.request, request.item.tokens)
        ahead = self._ahead(request)
        if ahead <= request.ahead_max:
            return None
        metrics.IMAGES_ENCODED.labels("declined").inc()
        return Declined(ahead)

    def finish(self, request: str) -> None:
        """See `ReplyServer.finish`."""
        self._inflight.finish_encoding(request)

    async def compute(self, request: EncodeRequest) -> EncodeReply:
        """See `ReplyServer.compute`."""
        reply: EncodeReply
        try:
            reply = await self._encoded(request, self.epoch)
        except TransferError as error:
            reply = Refused(str(error), True)
        except Exception as error:
            reply = refusal_of(error, request.request, self._status)
        outcome = ("cached" if reply.cached else "computed") if isinstance(reply, Encoded) else "refused"
        metrics.IMAGES_ENCODED.labels(outcome).inc()
        return reply

    def _ahead(self, request: EncodeRequest) -> int:
        """Tokens of images that are encoded before this one; 0 if it is at hand, or one of them."""
        if self._engine.holds_embedding(request.item) or request.item.id in self._wanted:
            return 0
        return sum(tokens for tokens, _ in self._wanted.values())

    async def _encoded(self, request: EncodeRequest, epoch: int) -> EncodeReply:
        item = request.item
        if self.transfer is None:
            return Refused("it has no transport for embeddings", True)
        _, waiting = self._wanted.get(item.id, (0, 0))
        is_computed = not self._engine.holds_embedding(item) or waiting > 0
        if is_computed:
            self._wanted[item.id] = item.tokens, waiting + 1
        try:
            if not self._engine.holds_embedding(item):
                (item,) = await self._media.load(request.edge, [item])
            image = await self._engine.encode(item)
        finally:
            if is_computed:
                self._leave(item)
        self._inflight.note_encoded(request.request, item.tokens if image.cached else 0)
        offer = await self.transfer.offer(image.values, ttl_s=OFFER_S, dtype=image.dtype)
        if epoch != self.epoch:
            self.transfer.withdraw(offer.lease)
            return Refused("it started a new incarnation", True)
        return Encoded(ImageEmbedding(offer, epoch, image.fields), image.cached)

    def _leave(self, item: PromptMedia) -> None:
        """A request no longer waits for this image. The others do, and it is ahead of later ones until the last has left."""
        tokens, waiting = self._wanted.pop(item.id)
        if waiting > 1:
            self._wanted[item.id] = tokens, waiting - 1


# Embeddings of a request's images, read from the workers that encoded them.

READ_S_MAX: Final = 2.0
"""The longest time that reading all embeddings of a request may take; it leaves time to fetch the images before the edge stops waiting."""

_log = structlog.get_logger("headwater.worker.embeddings")


class EmbeddingReader:
    """The reader of one worker. `transfer` is None for a worker that reads none."""

    def __init__(self, bus: Bus, ns: str, engine: Engine, clock: Clock) -> None:
        self.transfer: TensorTransfer | None = None
        self._bus = bus
        self._ns = ns
        self._engine = engine
        self._clock = clock
        self.on_read: Callable[[int, float], None] = lambda tokens, seconds: None
        """Called with an image's tokens, and how long it took from the claim until the engine had the embedding."""
        self._reading: dict[str, asyncio.Future[None]] = {}

    async def read(self, media: Sequence[PromptMedia]) -> bool:
        """Read the embeddings on offer; returns whether the engine needs no pixels of these images."""
        if self.transfer is None:
            return False
        try:
            async with asyncio.timeout(READ_S_MAX):
                await asyncio.gather(*(self._read(self.transfer, item) for item in media))
        except (EngineError, TimeoutError) as error:
            # A reading that was cancelled has reported so to the owner.
            metrics.EMBEDDINGS_READ.labels("failed").inc()
            _log.warning("embedding_not_read", reason=str(error) or "it took too long")
        except Exception as error:
            # A bug in an engine's integration costs time, not the worker.
            metrics.EMBEDDINGS_READ.labels("failed").inc()
            _log.error("embedding_read_failed", failure=failure_place(error))
            _log.debug("embedding_read_failure", exc_info=True)
        return all(self._engine.holds_embedding(item) for item in media)

    async def put_given(self, media: tuple[PromptMedia, ...]) -> tuple[PromptMedia, ...]:
        """Give the engine the embeddings that a client sent; returns the media without those. Raises `EngineError`."""
        for item in media:
            if item.given is not None and not self._engine.holds_embedding(item):
                await self._engine.put_embedding(item, given_image(item, item.given))
        return tuple([item if item.given is None else replace(item, data=b"") for item in media])

    async def _read(self, transfer: TensorTransfer, item: PromptMedia) -> None:
        embedding = item.embedding
        if embedding is None or self._engine.holds_embedding(item):
            # An offer that is not claimed expires at its owner.
            return
        reading = self._reading.get(item.id)
        if reading is not None:
            await asyncio.wait({reading})
            if self._engine.holds_embedding(item):
                return
        reading = asyncio.ensure_future(self._fetch(transfer, item, embedding))
        self._reading[item.id] = reading
        try:
            await reading
        finally:
            if self._reading.get(item.id) is reading:
                del self._reading[item.id]

    async def _fetch(self, transfer: TensorTransfer, item: PromptMedia, embedding: ImageEmbedding) -> None:
        # Of a later incarnation of the worker there is nothing under this subject.
        subject = subjects.engine(self._ns, embedding.offer.owner, embedding.epoch, "offer")
        channel = OwnerChannel(self._bus, subject)
        began_s = self._clock.monotonic_s()
        values = await transfer.read(embedding.offer, channel)
        await self._engine.put_embedding(item, EncodedImage(values, embedding.offer.dtype, embedding.fields))
        self.on_read(item.tokens, self._clock.monotonic_s() - began_s)
        metrics.EMBEDDINGS_READ.labels("read").inc()
        metrics.EMBEDDING_BYTES.inc(embedding.offer.nbytes)


def given_image(item: PromptMedia, embedding: ClientEmbedding) -> EncodedImage:
    """An embedding that a client sent, as engines take them."""
    dtype = np.dtype(np.uint16 if embedding.dtype == "bfloat16" else embedding.dtype)
    values = np.frombuffer(item.data, dtype).reshape(item.tokens, embedding.width)
    return EncodedImage(values, embedding.dtype, embedding.fields)
