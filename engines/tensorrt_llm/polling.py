"""Polls TensorRT-LLM's KV events and iteration statistics, which it keeps in bounded buffers."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

from headwater.engines.engine import KvEvent
from headwater.engines.tensorrt_llm.images import TensorRtImages
from headwater.engines.tensorrt_llm.kv_events import EventTranslator
from headwater.schemas.clock import Clock
from headwater.schemas.events.kv import BlocksCleared, BlocksStored

EVENTS_TIMEOUT_S: Final = 0.0
STATS_TIMEOUT_S: Final = 0.01
EVENTS_PAUSE_S: Final = (0.005, 0.02)
STATS_PAUSE_S: Final = (0.01, 0.1)
"""Shortest and longest pause while nothing comes; each is half as long again as the one before."""
GROWTH: Final = 1.5
BATCH_MAX: Final = 256
"""Events after which other tasks of the loop run."""

Fetch = Callable[[], AsyncIterator[dict[str, Any]]]
Take = Callable[[dict[str, Any]], None]


async def poll_once(fetch: Fetch, take: Take) -> int:
    """Take what there is; returns how much. Raises what TensorRT-LLM raises, but for an empty buffer."""
    count = 0
    try:
        async for item in fetch():
            if item:
                count += 1
                take(item)
            if count % BATCH_MAX == BATCH_MAX - 1:
                await asyncio.sleep(0)
    except (TimeoutError, asyncio.QueueEmpty):
        # Nothing, or nothing more.
        pass
    return count


async def poll(fetch: Fetch, take: Take, pause_s: tuple[float, float], clock: Clock) -> None:
    """Take what there is, again and again. Raises as `poll_once` does."""
    pause = pause_s[0]
    while True:
        count = await poll_once(fetch, take)
        pause = pause_s[0] if count else min(pause * GROWTH, pause_s[1])
        await clock.sleep(pause)


class RankState:
    """One attention data-parallel rank: its KV events, its statistics and its requests."""

    def __init__(
        self, number: int, block_size: int, slots: int, images: TensorRtImages | None = None
    ) -> None:
        self.number = number
        self.block_size = block_size
        self.slots = asyncio.Semaphore(slots)
        self.translator = EventTranslator(block_size, images)
        self.used_blocks = 0
        self.total_blocks = 0
        self._events: list[KvEvent] = []
        self._ready = asyncio.Event()

    def take_event(self, event: dict[str, Any]) -> None:
        """One event of TensorRT-LLM."""
        self._offer(self.translator.translate(event))

    def take_stats(self, stats: dict[str, Any]) -> None:
        """The statistics of one iteration."""
        cache = stats.get("kvCacheStats") or {}
        self.used_blocks = int(cache.get("usedNumBlocks", self.used_blocks))
        self.total_blocks = int(cache.get("maxNumBlocks", self.total_blocks))

    def clear(self) -> None:
        """All blocks are gone."""
        self.translator.forget()
        self._offer([BlocksCleared()])

    def _offer(self, events: list[KvEvent]) -> None:
        if events:
            self._events += events
            self._ready.set()

    async def events(self) -> AsyncIterator[list[KvEvent]]:
        """Our events as they come. One reader."""
        while True:
            await self._ready.wait()
            self._ready.clear()
            events, self._events = self._events, []
            if events:
                yield events

    def held(self) -> list[BlocksStored]:
        """All blocks; pending events are dropped, as their result is included."""
        self._events = []
        return self.translator.held()
