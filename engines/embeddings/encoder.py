"""The engine of an encode worker, whatever computes: one computation per image, and a cache whose blocks are announced."""

import asyncio
from abc import abstractmethod
from collections.abc import AsyncIterator
from typing import Final

from headwater.engines.embeddings.cache import EmbeddingCache
from headwater.engines.engine import (
    Emit,
    EncodedImage,
    EngineBase,
    EngineLoad,
    KvEvent,
    RequestRejected,
    Transfer,
)
from headwater.schemas.events.kv import BlocksStored
from headwater.schemas.messages.inference import GenerateRequest
from headwater.schemas.messages.media import PromptMedia
from headwater.schemas.tables.capability import Capability

EVENTS_MAX: Final = 256
"""Cache events read at once."""


class ImageEncoder(EngineBase):
    """The part of `headwater.engines.engine.Engine` that all encoders have. `start` calls `_open_cache`."""

    capabilities: frozenset[Capability] = frozenset({"encode", "kv_events", "kv_dump", "clear_kv"})

    def __init__(self) -> None:
        self._blocks = 0
        self._cache = EmbeddingCache(1, 0)
        self._running: dict[str, asyncio.Task[EncodedImage]] = {}
        """By image: several requests that have it wait for one computation."""

    def _open_cache(self, block_size: int, blocks: int) -> None:
        self._blocks = max(1, blocks)
        self._cache = EmbeddingCache(block_size, self._blocks)

    @abstractmethod
    async def _compute(self, item: PromptMedia) -> EncodedImage:
        """The embedding of an image with pixels. Raises `RequestRejected`, and `EngineError` if it cannot be computed."""

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

    def _end(self, item: PromptMedia, done: "asyncio.Task[EncodedImage]") -> None:
        self._running.pop(item.id, None)
        if not done.cancelled() and done.exception() is None:
            self._cache.keep(item, done.result())

    def holds_embedding(self, item: PromptMedia) -> bool:
        """See `Engine.holds_embedding`."""
        return self._cache.find(item) is not None or item.id in self._running

    def submit(self, request: GenerateRequest, emit: Emit, transfer: Transfer | None = None) -> None:
        """See `Engine.submit`: it generates nothing."""
        raise RequestRejected("this worker only encodes media")

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

    def load(self) -> EngineLoad:
        """See `Engine.load`."""
        return EngineLoad(len(self._running), 0, self._cache.used_blocks, self._blocks)

    async def clear_kv(self) -> None:
        """See `Engine.clear_kv`."""
        self._cache.clear()
