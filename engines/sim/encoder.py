"""The simulated engine of an encode worker: images in, embeddings out, one image after the other."""

import asyncio

from headwater.engines.embeddings.encoder import ImageEncoder
from headwater.engines.engine import EncodedImage, EngineInfo, EngineUnavailable
from headwater.engines.sim.embedding import embedding_of
from headwater.engines.sim.sequence import SimSettings
from headwater.schemas.clock import Clock
from headwater.schemas.events.kv import BlocksStored
from headwater.schemas.messages.media import PromptMedia


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
