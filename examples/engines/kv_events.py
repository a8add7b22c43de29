"""An engine with a prefix cache whose contents it announces, so that requests are routed to what is cached.

    headwater up --engine examples/engines/kv_events.py --engine-options '{"blocks": 64}'

The answer repeats the prompt. What stands for KV are the sequence hashes of full blocks: those that an edge computes.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator

import numpy as np

from headwater.engines.custom import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    EngineInfo,
    EngineRequest,
    EngineSetup,
    KvEvent,
    Step,
    hashing,
)


class CachingEcho:
    """Two optional methods, `kv_events` and `clear_kv`, declare what it adds."""

    features = ("cache_salt",)

    async def start(self, setup: EngineSetup) -> EngineInfo:
        """A cache of a few blocks, the least recently used of which is evicted."""
        self.size = setup.block_size
        self.capacity = int(setup.options.get("blocks", 64))
        self.cache: OrderedDict[int, None] = OrderedDict()
        self.events: asyncio.Queue[list[KvEvent]] = asyncio.Queue()
        return setup.info(total_blocks=self.capacity)

    async def generate(self, request: EngineRequest) -> AsyncIterator[Step]:
        """The prompt again and again; the first step says how much of it was cached."""
        tokens = list(request.tokens)
        root = hashing.seed(request.lora_name, request.cache_salt)
        # An engine computes the last token of a prompt in any case.
        cached = self.find(self.hashes(tokens[:-1], root))
        for number in range(request.sampling.max_tokens):
            self.store(self.hashes(tokens, root), root)
            await asyncio.sleep(0.0005)
            token = request.tokens[number % len(request.tokens)]
            tokens.append(token)
            yield Step((token,), cached_tokens=cached * self.size if number == 0 else -1)

    def hashes(self, tokens: list[int], root: int) -> list[int]:
        """Sequence hashes of the full blocks."""
        found: list[int] = hashing.sequence_hashes(
            np.array(tokens, np.uint32), self.size, parent=root
        ).tolist()
        return found

    def find(self, hashes: list[int]) -> int:
        """Number of blocks at the beginning that are cached."""
        return next((number for number, one in enumerate(hashes) if one not in self.cache), len(hashes))

    def store(self, hashes: list[int], root: int) -> None:
        """Cache these blocks, and announce what changed."""
        events: list[KvEvent] = []
        for number, one in enumerate(hashes):
            if one not in self.cache:
                if len(self.cache) >= self.capacity:
                    oldest, _ = self.cache.popitem(last=False)
                    events.append(BlocksRemoved(pack(oldest)))
                self.cache[one] = None
                events.append(BlocksStored(hashes[number - 1] if number else root, pack(one)))
        # The beginning of a prompt counts as used last: it is shared most, and what follows it is evicted first.
        for one in reversed(hashes):
            if one in self.cache:
                self.cache.move_to_end(one)
        if events:
            self.events.put_nowait(events)

    async def clear_kv(self) -> None:
        """Empty the cache."""
        self.cache.clear()
        self.events.put_nowait([BlocksCleared()])

    async def kv_events(self) -> AsyncIterator[list[KvEvent]]:
        """What changed in the cache, in order."""
        while True:
            yield await self.events.get()


def pack(one: int) -> bytes:
    """One hash as events have it."""
    return hashing.pack_hashes(np.array([one], np.uint64))
