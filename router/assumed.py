"""Blocks that workers will hold: of prompts that they were given and did not announce yet, or never announce.

Engines tell of a block once it is computed, so the next request of a conversation, or of a burst, would find nothing.
A decision therefore names some of its prompt's hashes, and they count as its worker's: since a hash names its whole
prefix, a few along the prompt do (`places`). They count until the request ends, by when the real events are there.

Engines without events never tell. There the last prompts count, as many as fit into the cache and none that is much older than the newest:
an LRU cache seen from outside.
"""

from bisect import bisect_left, insort

import msgspec

from headwater.schemas.hashing import unpack_hashes

PLACES_MAX = 32
"""About so many hashes of a prompt are named."""

AGE_NS_MAX = 600_000_000_000
"""Prompts given to a worker so long before its newest one do not count, where it never tells."""


def places(first: int, blocks: int) -> list[int]:
    """Which of a prompt's blocks `first` to `blocks` - 1 are named: the first, the last, and an even grid.

    The grid's step is a power of two and it begins at the start of the prompt, so long and short prompts meet on it.
    """
    if first >= blocks:
        return []
    step = 1
    while (blocks - first) // step > PLACES_MAX:
        step *= 2
    grid = range(first + (-(first + 1)) % step, blocks, step)
    return sorted({first, *grid, blocks - 1})


class Belief(msgspec.Struct):
    """One prompt given to a worker that does not tell: `blocks` of it were new there."""

    decided_ns: int
    blocks: int
    hashes: bytes


class Beliefs(msgspec.Struct):
    """What a worker that does not tell is thought to hold, newest prompts within `blocks` of room."""

    prompts: dict[str, Belief] = {}
    order: list[tuple[int, str]] = []
    blocks: int = 0
    fallen: tuple[int, str] = (-1, "")
    """The newest that fell out: what is older has no room either, in whatever order they come."""

    def add(self, request: str, belief: Belief, room: int) -> list[Belief]:
        """Take a prompt in; returns those that fall out. The result is the same in whatever order prompts come."""
        if (belief.decided_ns, request) < self.fallen:
            return [belief]
        self.prompts[request] = belief
        insort(self.order, (belief.decided_ns, request))
        self.blocks += belief.blocks
        fallen: list[Belief] = []
        while len(self.order) > 1 and (
            self.blocks > room or self.order[0][0] < self.order[-1][0] - AGE_NS_MAX
        ):
            self.fallen = self.order.pop(0)
            fallen.append(self._take(self.fallen[1]))
        return fallen

    def remove(self, request: str) -> Belief | None:
        """A prompt that never reached its worker."""
        belief = self.prompts.get(request)
        if belief is None:
            return None
        del self.order[bisect_left(self.order, (belief.decided_ns, request))]
        return self._take(request)

    def _take(self, request: str) -> Belief:
        belief = self.prompts.pop(request)
        self.blocks -= belief.blocks
        return belief


class Assumed(msgspec.Struct):
    """`holders[hash][worker]`: by how many prompts the worker is assumed to hold the block and all before it."""

    holders: dict[int, dict[str, int]] = {}

    def add(self, worker: str, hashes: bytes) -> None:
        """One more prompt with these packed hashes is at `worker`."""
        for block in unpack_hashes(hashes).tolist():
            counts = self.holders.setdefault(block, {})
            counts[worker] = counts.get(worker, 0) + 1

    def drop(self, worker: str, hashes: bytes) -> None:
        """One less."""
        for block in unpack_hashes(hashes).tolist():
            counts = self.holders.get(block, {})
            left = counts.get(worker, 0) - 1
            if left > 0:
                counts[worker] = left
            else:
                counts.pop(worker, None)
                if not counts:
                    self.holders.pop(block, None)

    def depths(self, blocks: list[tuple[int, int]]) -> dict[str, int]:
        """How deep each worker is assumed to hold a prompt, from pairs of (place, hash) in ascending order."""
        found: dict[str, int] = {}
        for place, block in blocks:
            for worker in self.holders.get(block, ()):
                found[worker] = place + 1
        return found
