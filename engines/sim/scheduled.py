"""The simulated scheduler's view of one request: lengths and block hashes, no tokens.

The engine derives a subclass with tokens; in a what-if replay only the hashes of prompts are known.
"""

from abc import abstractmethod
from typing import NamedTuple

import msgspec

from headwater.schemas.media_kind import PromptMediaKind


class MediaSpan(NamedTuple):
    """An item of media in a prompt: `tokens` tokens from `start` on. Equal ids are equal content."""

    id: str
    start: int
    tokens: int
    kind: PromptMediaKind = "image"


class Scheduled(msgspec.Struct, eq=False):
    """One sequence with `length` tokens so far: its prompt and the generated tokens.

    `hashes` are those of its first blocks, a chain after `root`, as many as were requested so far. `blocks` are cached
    under their hash, `private` are not (yet). `computed` tokens have KV; up to `target` they count as a prompt, which after
    a preemption includes tokens generated before. `cached` tokens were found when it first started, -1 before that.
    `arrived`: number of tokens whose KV was handed off from another engine. `media` are in order; the first `encoded` of them need no
    embedding any more.
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
    media: tuple[MediaSpan, ...] = ()
    encoded: int = 0
    waiting: bool = True
    ended: bool = False

    @abstractmethod
    def hash_blocks(self, count: int, size: int) -> None:
        """Extend `hashes` to at least the first `count` blocks of `size` tokens, all of which are full."""
