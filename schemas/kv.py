"""KV-cache events of one worker. Stream: pool log, kind `kv`.

Order holds per (worker, rank). Worker and epoch are the batch's writer and epoch. Hashes are sequence hashes
(`schemas.hashing`), packed little-endian u64.
"""

from typing import Final

from headwater.schemas.envelope import Event

GPU: Final = 0
CPU: Final = 1
DISK: Final = 2
EXTERNAL: Final = 3
TIER_NAMES: Final = ("gpu", "cpu", "disk", "external")


class BlocksStored(Event, frozen=True, tag="kv.stored"):
    """A run of consecutive blocks became readable; the first follows `parent` (0: start of a prompt)."""

    parent: int
    hashes: bytes
    tier: int = GPU
    rank: int = 0


class BlocksRemoved(Event, frozen=True, tag="kv.removed"):
    """One copy of each block was evicted from `tier`."""

    hashes: bytes
    tier: int = GPU
    rank: int = 0


class BlocksCleared(Event, frozen=True, tag="kv.cleared"):
    """Every block of the rank is gone, on all tiers. Also opens each epoch."""

    rank: int = 0


class KvGap(Event, frozen=True, tag="kv.gap"):
    """`missing` engine batches were lost and could not be replayed: what follows is incomplete.

    Routers stop claiming cache hits on this rank until the next `BlocksCleared`.
    """

    missing: int
    rank: int = 0
