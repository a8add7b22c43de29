"""The caches of the simulated engine: paged KV blocks with reference counts, prefix reuse and LRU eviction; and embeddings of images.

The KV cache contains block identities only, no tensors. Blocks that no sequence uses stay cached until space is needed; then the
least recently used is evicted first, and the tail of a sequence before its head, so that the rest of a prompt is always
a prefix.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from headwater.engines.engine import EngineError, KvEvent
from headwater.schemas.events import BlocksCleared, BlocksRemoved, BlocksStored
from headwater.schemas.hashing import pack_hashes


class PagedCache:
    """`capacity` blocks. A block is free, private to a sequence, or cached under its sequence hash."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.private = 0
        self._users: dict[int, int] = {}
        self._parents: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._events: list[KvEvent] = []

    def __len__(self) -> int:
        """Blocks cached under a hash, in use or not."""
        return len(self._users)

    @property
    def used(self) -> int:
        """Number of blocks in use by sequences, without idle cached ones."""
        return self.private + len(self._users) - len(self._idle)

    @property
    def available(self) -> int:
        """Number of blocks that could be allocated now, including by eviction."""
        return self.capacity - self.used

    def match(self, hashes: list[int]) -> int:
        """Return how many leading blocks are cached."""
        for depth, block in enumerate(hashes):
            if block not in self._users:
                return depth
        return len(hashes)

    def take(self, hashes: list[int]) -> None:
        """Count a use of these cached blocks by a sequence."""
        for block in hashes:
            self._users[block] += 1
            self._idle.pop(block, None)

    def allocate(self, count: int) -> bool:
        """Allocate `count` private blocks, evicting idle ones. False, without any change, if there is no space."""
        if count > self.available:
            return False
        short = self.private + len(self._users) + count - self.capacity
        evicted = [self._idle.popitem(last=False)[0] for _ in range(max(0, short))]
        for block in evicted:
            del self._users[block], self._parents[block]
        if evicted:
            self._events.append(BlocksRemoved(pack_hashes(np.array(evicted, np.uint64))))
        self.private += count
        return True

    def commit(self, parent: int, hashes: list[int]) -> None:
        """Cache full private blocks of a sequence under their hashes, a chain after `parent`.

        Where another sequence cached the same block before, that one is used and the copy is freed.
        """
        run: list[int] = []
        run_parent = parent
        for block in hashes:
            if block in self._users:
                self._users[block] += 1
                self._idle.pop(block, None)
                self._announce(run_parent, run)
                run, run_parent = [], block
            else:
                self._users[block] = 1
                self._parents[block] = parent
                run.append(block)
            parent = block
        self._announce(run_parent, run)
        self.private -= len(hashes)

    def release(self, hashes: list[int], private: int) -> None:
        """Release the blocks of a sequence: cached ones may become idle, private ones are freed."""
        self.private -= private
        for block in reversed(hashes):
            self._users[block] -= 1
            if not self._users[block]:
                self._idle[block] = None

    def clear(self) -> None:
        """Drop every idle block."""
        for block in self._idle:
            del self._users[block], self._parents[block]
        self._idle.clear()
        self._events.append(BlocksCleared())
        # Blocks in use still exist and may be reused: announce them again.
        self._events += self.held()

    def held(self) -> list[KvEvent]:
        """All cached blocks as stored events, parents before children."""
        children: dict[int, list[int]] = {}
        for block, parent in self._parents.items():
            children.setdefault(parent, []).append(block)
        roots = [parent for parent in children if parent not in self._parents]
        events: list[KvEvent] = []
        stack = [(root, child) for root in roots for child in children[root]]
        while stack:
            parent, block = stack.pop()
            run = [block]
            while len(children.get(run[-1], ())) == 1:
                run.append(children[run[-1]][0])
            events.append(BlocksStored(parent, pack_hashes(np.array(run, np.uint64))))
            stack += [(run[-1], child) for child in children.get(run[-1], ())]
        return events

    @property
    def changed(self) -> bool:
        """Are there pending events?"""
        return bool(self._events)

    def take_events(self) -> list[KvEvent]:
        """Events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def _announce(self, parent: int, run: list[int]) -> None:
        if run:
            self._events.append(BlocksStored(parent, pack_hashes(np.array(run, np.uint64))))


# Embeddings of images: those that the engine computed, and those that encode workers did.

COMPUTED_HERE = -1


class _HeldImage(NamedTuple):
    tokens: int
    content: int
    until_s: float


class ImageStore:
    """Up to `tokens_max` tokens, the least recently used image dropped first.

    One that was given is not dropped before a request has used it, or `linger_s` seconds have passed: a request whose image was found
    here comes within that time. `now` is monotonic, in seconds.
    """

    def __init__(self, tokens_max: int, now: Callable[[], float], linger_s: float = 0.0) -> None:
        self.tokens = 0
        self._tokens_max = tokens_max
        self._now = now
        self._linger_s = linger_s
        self._held: OrderedDict[str, _HeldImage] = OrderedDict()

    def __len__(self) -> int:
        """Images at hand."""
        return len(self._held)

    def __contains__(self, image: str) -> bool:
        """Is it here? Nothing is promised."""
        return image in self._held

    @property
    def pinned(self) -> int:
        """Images that were given and may not be dropped yet."""
        now_s = self._now()
        return sum(held.until_s > now_s for held in self._held.values())

    def content(self, image: str) -> int | None:
        """Return what was given with an image, which a request is about to use. None if it is not here."""
        held = self._held.get(image)
        if held is None:
            return None
        if held.content != COMPUTED_HERE:
            self._set(image, held._replace(until_s=self._now() + self._linger_s))
        return held.content

    def use(self, image: str) -> bool:
        """A request uses an image, if it is here."""
        held = self._held.get(image)
        if held is None:
            return False
        self._set(image, held._replace(until_s=0.0))
        return True

    def _set(self, image: str, held: _HeldImage) -> None:
        self._held[image] = held
        self._held.move_to_end(image)

    def keep(self, image: str, tokens: int, content: int = COMPUTED_HERE) -> bool:
        """Add an embedding of `tokens` tokens, computed here or given with its `content`. False: there is no room for it."""
        now_s = self._now()
        until_s = now_s + self._linger_s if content != COMPUTED_HERE else 0.0
        held = self._held.get(image)
        if held is not None:
            self._set(image, _HeldImage(held.tokens, max(held.content, content), max(held.until_s, until_s)))
            return True
        self._make_room(tokens, now_s)
        if self.tokens + tokens > self._tokens_max:
            return False
        self._held[image] = _HeldImage(tokens, content, until_s)
        self.tokens += tokens
        return True

    def _make_room(self, tokens: int, now_s: float) -> None:
        for image, held in list(self._held.items()):
            if self.tokens + tokens <= self._tokens_max:
                return
            if held.until_s <= now_s:
                self.tokens -= self._held.pop(image).tokens


class NoRoomForImage(EngineError):
    """All embeddings that are here are in use."""
