"""The embeddings that an encode worker keeps, the least recently used dropped first, and the events that announce them.

For routers an embedding is a chain of blocks in the worker's cache (`embedding_hashes`), so they send an image to where it is encoded
already, count what a worker would have to compute, and credit a worker with what it computes now.
"""

import asyncio
from collections import OrderedDict

from headwater.engines.engine import EncodedImage, KvEvent
from headwater.schemas.events.kv import BlocksCleared, BlocksRemoved, BlocksStored
from headwater.schemas.hashing import ROOT, pack_hashes
from headwater.schemas.messages.encode import embedding_blocks, embedding_hashes
from headwater.schemas.messages.media import PromptMedia


class EmbeddingCache:
    """Up to `blocks_max` blocks of `block_size` tokens. Events wait in `events` until they are read."""

    def __init__(self, block_size: int, blocks_max: int) -> None:
        self.events: asyncio.Queue[KvEvent] = asyncio.Queue()
        self.used_blocks = 0
        self._block_size = block_size
        self._blocks_max = blocks_max
        self._held: OrderedDict[str, tuple[PromptMedia, EncodedImage]] = OrderedDict()

    def __len__(self) -> int:
        """Embeddings held."""
        return len(self._held)

    def find(self, item: PromptMedia) -> EncodedImage | None:
        """The embedding of an image, now the most recently used one."""
        found = self._held.get(item.id)
        # Ids are hashes of the content; the number of tokens comes with the message.
        if found is None or found[0].tokens != item.tokens:
            return None
        self._held.move_to_end(item.id)
        return found[1]

    def keep(self, item: PromptMedia, image: EncodedImage) -> None:
        """Add an embedding, unless it alone is larger than the cache. Not its pixels."""
        blocks = embedding_blocks(item, self._block_size)
        if blocks > self._blocks_max or item.id in self._held:
            return
        while self.used_blocks + blocks > self._blocks_max:
            _, (dropped, _) = self._held.popitem(last=False)
            self.used_blocks -= embedding_blocks(dropped, self._block_size)
            self.events.put_nowait(BlocksRemoved(self._hashes(dropped)))
        bare = PromptMedia(item.kind, item.id, 0, item.tokens, item.shape)
        self._held[item.id] = bare, image
        self.used_blocks += blocks
        self.events.put_nowait(self._stored(bare))

    def held_blocks(self) -> list[BlocksStored]:
        """All that is held, as events; those that wait are dropped."""
        self._drop_events()
        return self.blocks()

    def blocks(self) -> list[BlocksStored]:
        """All that is held, as events."""
        return [self._stored(item) for item, _ in self._held.values()]

    def clear(self) -> None:
        """Drop everything."""
        self._drop_events()
        self._held.clear()
        self.used_blocks = 0
        self.events.put_nowait(BlocksCleared())

    def _drop_events(self) -> None:
        while not self.events.empty():
            self.events.get_nowait()

    def _stored(self, item: PromptMedia) -> BlocksStored:
        return BlocksStored(ROOT, self._hashes(item))

    def _hashes(self, item: PromptMedia) -> bytes:
        return pack_hashes(embedding_hashes(item, self._block_size))
