"""The simulated engine of an encode worker: images in, embeddings out, one image after the other."""

import asyncio
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from headwater.engines.embeddings import ImageEncoder, ModelEmbeddings
from headwater.engines.engine import EncodedImage, EngineInfo, EngineUnavailable
from headwater.engines.media import check_data
from headwater.engines.sim.defaults import EMBEDDING_WIDTH
from headwater.engines.sim.scheduler import SimSettings
from headwater.engines.transfer.port import checksum
from headwater.schemas.clock import Clock
from headwater.schemas.events.kv import BlocksStored
from headwater.schemas.messages.media import PromptMedia

FORM = ModelEmbeddings(EMBEDDING_WIDTH, "float32")
"""The form of all embeddings."""


def embedding_of(item: PromptMedia) -> NDArray[np.float32]:
    """The embedding of an item of media, float32 of shape (its tokens, `EMBEDDING_WIDTH`), the same on every worker.

    Raises `RequestRejected` if its data is not all there.
    """
    check_data(item)
    drawn = np.random.default_rng([checksum(np.frombuffer(item.data, np.uint8)), *item.shape])
    return drawn.standard_normal((item.tokens, EMBEDDING_WIDTH), np.float32)


def content_of(embedding: NDArray[Any]) -> int:
    """A number of 32 bits for what an embedding shows."""
    return crc32(np.ascontiguousarray(embedding).tobytes())


# The engine.


class SimEncoder(ImageEncoder):
    """See `headwater.engines.engine.Engine`. Its cache has room for `settings.embedding_tokens`."""

    name = "sim"

    def __init__(self, settings: SimSettings, clock: Clock) -> None:
        super().__init__()
        self.capabilities |= settings.media.capabilities
        self.computed = 0
        """Images encoded so far."""
        self._settings = settings
        self._clock = clock
        self._open_cache(settings.block_size, settings.embedding_tokens // settings.block_size)
        self._turn = asyncio.Lock()

    async def start(self) -> EngineInfo:
        """See `Engine.start`. Raises `EngineUnavailable` for a model without images."""
        settings = self._settings
        if settings.media.images is None:
            raise EngineUnavailable(f"{settings.model} takes no images that could be encoded apart from it")
        return EngineInfo(
            settings.model,
            settings.block_size,
            self._blocks,
            settings.sequences_max,
            settings.context_length,
            media=settings.media,
        )

    async def _compute(self, item: PromptMedia) -> EncodedImage:
        values = embedding_of(item)
        async with self._turn:
            await self._clock.sleep(self._settings.step_time.encode_seconds([item.tokens]))
        self.computed += 1
        return EncodedImage(values, "float32")

    def cached_blocks(self) -> list[BlocksStored]:
        """The blocks of `held_blocks`, without removing pending events."""
        return self._cache.blocks()

    async def check(self) -> None:
        """See `Engine.check`."""

    async def stop(self) -> None:
        """See `Engine.stop`."""
