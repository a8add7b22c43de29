"""Embeddings of a request's images, read from the workers that encoded them.

Whatever fails, the request continues: its images are then fetched from the edge, and the engine encodes them itself.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import numpy as np
import structlog
from msgspec.structs import replace

from headwater.actors import metrics
from headwater.actors.bus.port import Bus
from headwater.actors.runtime.offers import OwnerChannel
from headwater.engines.engine import EncodedImage, EngineError
from headwater.engines.transfer.port import TensorTransfer
from headwater.schemas import subjects
from headwater.schemas.clock import Clock
from headwater.schemas.failure import failure_place
from headwater.schemas.messages.media import ClientEmbedding, ImageEmbedding, PromptMedia

READ_S_MAX: Final = 2.0
"""That all embeddings of a request may take: there is time left to fetch the images before the edge stops waiting."""

_log = structlog.get_logger("headwater.worker.embeddings")


class EmbeddingEngine(Protocol):
    """The part of an engine that takes embeddings: see `Engine`."""

    def holds_embedding(self, item: PromptMedia) -> bool:
        """See `Engine.holds_embedding`."""
        ...

    async def put_embedding(self, item: PromptMedia, image: EncodedImage) -> None:
        """See `Engine.put_embedding`."""
        ...


class EmbeddingReader:
    """One per worker. `transfer` is None for a worker that reads none."""

    def __init__(self, bus: Bus, ns: str, engine: EmbeddingEngine, clock: Clock) -> None:
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


def given_image(item: PromptMedia, given: ClientEmbedding) -> EncodedImage:
    """An embedding that a client sent, as engines take them."""
    dtype = np.dtype(np.uint16 if given.dtype == "bfloat16" else given.dtype)
    values = np.frombuffer(item.data, dtype).reshape(item.tokens, given.width)
    return EncodedImage(values, given.dtype, given.fields)
