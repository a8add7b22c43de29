"""Speculative cache credit: blocks that workers are expected to hold because prompts were routed to them.

Engines announce a block once it is computed, so the next request of a conversation, or of a burst, would find nothing. A
decision therefore lists a sample of its prompt's hashes (`sample_positions`), which the router credits to the worker. A
hash names its whole prefix, so a few along the prompt suffice. The credit is dropped when the request ends; by
then the engine has announced its blocks.

Workers whose engines publish no KV events keep the credit of their latest prompts: as many as fit into the cache, and none much
older than the newest, which approximates the engine's LRU cache.
"""

from bisect import bisect_left, insort

import msgspec

from headwater.schemas.hashing import unpack_hashes

SAMPLE_MAX = 32
"""A prompt's sample has about this many hashes."""

AGE_NS_MAX = 600_000_000_000
"""Without KV events, prompts routed this long before a worker's newest one are dropped."""


def sample_positions(first: int, blocks: int) -> list[int]:
    """Which of a prompt's blocks `first` to `blocks` - 1 are sampled: the first, the last, and an even grid.

    The grid has a power of two as its step and starts at the beginning of the prompt, so long and short prompts share points.
    """
    if first >= blocks:
        return []
    step = 1
    while (blocks - first) // step > SAMPLE_MAX:
        step *= 2
    grid = range(first + (-(first + 1)) % step, blocks, step)
    return sorted({first, *grid, blocks - 1})


class RoutedPrompt(msgspec.Struct):
    """A prompt routed to a worker without KV events: `blocks` of it were new there."""

    decided_ns: int
    blocks: int
    hashes: bytes


class ExpectedBlocks(msgspec.Struct):
    """Prompts that a worker without KV events is expected to hold; together they take `blocks` blocks."""

    prompts: dict[str, RoutedPrompt] = {}
    order: list[tuple[int, str]] = []
    blocks: int = 0
    evicted: tuple[int, str] = (-1, "")
    """The newest evicted prompt. Older ones are evicted too, in whatever order prompts are added."""

    def add(self, request: str, prompt: RoutedPrompt, room: int) -> list[RoutedPrompt]:
        """Add a prompt; returns the evicted ones. The result does not depend on the order of additions."""
        if (prompt.decided_ns, request) < self.evicted:
            return [prompt]
        self.prompts[request] = prompt
        insort(self.order, (prompt.decided_ns, request))
        self.blocks += prompt.blocks
        evicted: list[RoutedPrompt] = []
        while len(self.order) > 1 and (
            self.blocks > room or self.order[0][0] < self.order[-1][0] - AGE_NS_MAX
        ):
            self.evicted = self.order.pop(0)
            evicted.append(self._take(self.evicted[1]))
        return evicted

    def remove(self, request: str) -> RoutedPrompt | None:
        """Remove a prompt that did not reach its worker; returns it."""
        prompt = self.prompts.get(request)
        if prompt is None:
            return None
        del self.order[bisect_left(self.order, (prompt.decided_ns, request))]
        return self._take(request)

    def _take(self, request: str) -> RoutedPrompt:
        prompt = self.prompts.pop(request)
        self.blocks -= prompt.blocks
        return prompt


class Credit(msgspec.Struct):
    """`holders[hash][worker]`: how many prompts credit the worker with the block and all before it."""

    holders: dict[int, dict[str, int]] = {}

    def add(self, worker: str, hashes: bytes) -> None:
        """Credit `worker` with a prompt's packed hashes."""
        for block in unpack_hashes(hashes).tolist():
            counts = self.holders.setdefault(block, {})
            counts[worker] = counts.get(worker, 0) + 1

    def drop(self, worker: str, hashes: bytes) -> None:
        """Drop that credit."""
        for block in unpack_hashes(hashes).tolist():
            counts = self.holders.get(block, {})
            left = counts.get(worker, 0) - 1
            if left > 0:
                counts[worker] = left
            else:
                counts.pop(worker, None)
                if not counts:
                    self.holders.pop(block, None)

    def depths(self, positions: list[int], hashes: list[int]) -> dict[str, int]:
        """The number of leading blocks credited to each worker, from blocks' ascending positions and their hashes."""
        found: dict[str, int] = {}
        for position, block in zip(positions, hashes, strict=True):
            holders = self.holders.get(block)
            if holders:
                for worker in holders:
                    found[worker] = position + 1
        return found
