"""The blocks that an engine holds, folded from its KV events: for engines that announce blocks but cannot list them."""

from collections import Counter, defaultdict

import numpy as np

from headwater.engines.engine import KvEvent
from headwater.schemas import hashing
from headwater.schemas.events.kv import BlocksCleared, BlocksRemoved, BlocksStored

FORGOTTEN_MAX = 1024
"""Parents of blocks that are gone are removed once there are more of them than this and than the blocks held."""

Place = tuple[int, int]
"""Rank and tier."""


class HeldBlocks:
    """Copies of each block by place, and the parent of each."""

    def __init__(self) -> None:
        self._copies: dict[Place, Counter[int]] = defaultdict(Counter)
        self._parents: dict[int, int] = {}

    def __len__(self) -> int:
        """Copies of blocks on the fastest tier."""
        return sum(sum(copies.values()) for (_, tier), copies in self._copies.items() if tier == 0)

    def apply(self, event: KvEvent) -> None:
        """Fold one event."""
        if isinstance(event, BlocksStored):
            parent = event.parent
            for number in hashing.unpack_hashes(event.hashes).tolist():
                self._copies[event.rank, event.tier][number] += 1
                self._parents[number] = parent
                parent = number
        elif isinstance(event, BlocksRemoved):
            copies = self._copies[event.rank, event.tier]
            for number in hashing.unpack_hashes(event.hashes).tolist():
                copies[number] -= 1
                if copies[number] <= 0:
                    del copies[number]
        elif isinstance(event, BlocksCleared):
            for place in [place for place in self._copies if place[0] == event.rank]:
                del self._copies[place]
        if len(self._parents) > 2 * sum(map(len, self._copies.values())) + FORGOTTEN_MAX:
            held = {number for copies in self._copies.values() for number in copies}
            self._parents = {number: parent for number, parent in self._parents.items() if number in held}

    def stored(self) -> list[BlocksStored]:
        """All blocks, parents before children: one event per run."""
        return [
            _stored(self._parents[run[0]], run, place)
            for place, copies in self._copies.items()
            for run in self._runs(copies)
        ]

    def _runs(self, copies: Counter[int]) -> list[list[int]]:
        """Runs of blocks, each after those that it follows; a block with several copies is in as many runs."""
        runs: list[list[int]] = []
        listed: set[int] = set()
        for number in copies:
            chain: list[int] = []
            while number in copies and number not in listed:
                chain.append(number)
                listed.add(number)
                number = self._parents[number]
            if chain:
                runs.append(chain[::-1])
        return runs + [[number] for number, count in copies.items() for _ in range(count - 1)]


def _stored(parent: int, run: list[int], place: Place) -> BlocksStored:
    rank, tier = place
    return BlocksStored(parent, hashing.pack_hashes(np.array(run, np.uint64)), tier, rank)
