"""The simulated engine of an encode worker: images in, embeddings out, one image after the other."""

import asyncio
from collections.abc import AsyncIterator

from headwater.engines.engine import (
    Emit,
    EncodedImage,
    EngineBase,
    EngineInfo,
    EngineLoad,
    EngineUnavailable,
    KvEvent,
    RequestRejected,
    Transfer,
)
from headwater.engines.images.embedding_cache import EmbeddingCache
from headwater.engines.sim.embedding import embedding_of
from headwater.engines.sim.sequence import SimSettings
from headwater.schemas.clock import Clock
from headwater.schemas.events.kv import BlocksStored
from headwater.schemas.messages.inference import GenerateRequest
from headwater.schemas.messages.media import PromptMedia
from headwater.schemas.tables.capability import Capability

EVENTS_MAX = 256
"""Cache events read at once."""


class SimEncoder(EngineBase):
    """See `headwater.engines.engine.Engine`. Its cache has room for `settings.embedding_tokens`."""

    name = "sim"
    capabilities: frozenset[Capability] = frozenset({"encode", "kv_events", "kv_dump", "clear_kv"})

    def __init__(self, settings: SimSettings, clock: Clock) -> None:
        self.computed = 0
        """Images encoded so far."""
        self._settings = settings
        self._clock = clock
        self._blocks = max(1, settings.embedding_tokens // settings.block_size)
        self._cache = EmbeddingCache(settings.block_size, self._blocks)
        self._running: dict[str, asyncio.Task[EncodedImage]] = {}
        """By image: several requests that have it wait for one computation."""
        self._turn = asyncio.Lock()

    async def start(self) -> EngineInfo:
        """See `Engine.start`. Raises `EngineUnavailable` for a model without images."""
        settings = self._settings
        if settings.images is None:
            raise EngineUnavailable(f"{settings.model} takes no images that could be encoded apart from it")
        return EngineInfo(
            settings.model,
            settings.block_size,
            self._blocks,
            settings.sequences_max,
            settings.context_length,
            images=settings.images,
        )

    async def encode(self, item: PromptMedia) -> EncodedImage:
        """See `Engine.encode`."""
        found = self._cache.find(item)
        if found is not None:
            return found._replace(cached=True)
        running = self._running.get(item.id)
        joins = running is not None
        if running is None:
            running = asyncio.get_running_loop().create_task(self._compute(item), name="encode")
            self._running[item.id] = running
            running.add_done_callback(lambda done: self._end(item, done))
        # A request that leaves does not stop it for the others.
        return (await asyncio.shield(running))._replace(cached=joins)

    async def _compute(self, item: PromptMedia) -> EncodedImage:
        values = embedding_of(item)
        async with self._turn:
            await self._clock.sleep(self._settings.step_time.encode_seconds([item.tokens]))
        self.computed += 1
        return EncodedImage(values, "float32")

    def _end(self, item: PromptMedia, done: "asyncio.Task[EncodedImage]") -> None:
        self._running.pop(item.id, None)
        if not done.cancelled() and done.exception() is None:
            self._cache.keep(item, done.result())

    def holds_embedding(self, item: PromptMedia) -> bool:
        """See `Engine.holds_embedding`."""
        return self._cache.find(item) is not None or item.id in self._running

    def submit(self, request: GenerateRequest, emit: Emit, transfer: Transfer | None = None) -> None:
        """See `Engine.submit`: it generates nothing."""
        raise RequestRejected("this worker only encodes images")

    def abort(self, request: str) -> None:
        """See `Engine.abort`."""

    async def kv_events(self) -> AsyncIterator[list[KvEvent]]:
        """See `Engine.kv_events`."""
        while True:
            events = [await self._cache.events.get()]
            while not self._cache.events.empty() and len(events) < EVENTS_MAX:
                events.append(self._cache.events.get_nowait())
            yield events

    def held_blocks(self) -> list[BlocksStored]:
        """See `Engine.held_blocks`."""
        return self._cache.held_blocks()

    def cached_blocks(self) -> list[BlocksStored]:
        """The blocks of `held_blocks`, without removing pending events."""
        return self._cache.blocks()

    def load(self) -> EngineLoad:
        """See `Engine.load`."""
        return EngineLoad(len(self._running), 0, self._cache.used_blocks, self._blocks)

    async def clear_kv(self) -> None:
        """See `Engine.clear_kv`."""
        self._cache.clear()

    async def check(self) -> None:
        """See `Engine.check`."""

    async def stop(self) -> None:
        """See `Engine.stop`."""
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
