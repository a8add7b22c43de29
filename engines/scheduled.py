"""What the simulated engine's scheduler knows of one request: lengths and block hashes, no tokens.

The engine derives its own kind with tokens; a replay on virtual time has prompts of which only the hashes are known.
"""

from abc import abstractmethod

import msgspec


class Scheduled(msgspec.Struct, eq=False):
    """One sequence of `length` tokens by now: its prompt and what was generated behind it.

    `hashes` are those of its first blocks, a chain behind `root`: as many as were asked for by now. `blocks` are cached
    under their hash, `private` are not (yet). `computed` tokens have their KV here; up to `target` they count as a prompt:
    after a preemption that includes tokens generated before. `cached` tokens were found when it first began, -1
    before. `arrived`: so many tokens' KV came from another engine.
    """

    length: int
    target: int
    root: int = 0
    hashes: list[int] = []
    blocks: list[int] = []
    private: int = 0
    computed: int = 0
    produced: int = 0
    cached: int = -1
    arrived: int = 0
    waiting: bool = True
    ended: bool = False

    @abstractmethod
    def hash_blocks(self, count: int, size: int) -> None:
        """Make `hashes` those of at least the first `count` blocks of `size` tokens, all of which are full."""
