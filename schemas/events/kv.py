"""KV-cache events of one worker. Stream: pool log, kind `kv`.

Order holds per (worker, rank). Worker and epoch are the batch's writer and epoch. Hashes are sequence hashes
(`schemas.hashing`), packed little-endian u64.
"""

from typing import Annotated, Final

import msgspec

from headwater.schemas.events import Event

Hash = Annotated[int, msgspec.Meta(ge=0)]
Tier = Annotated[int, msgspec.Meta(ge=0, le=3)]
Rank = Annotated[int, msgspec.Meta(ge=0)]

GPU: Final = 0
CPU: Final = 1
DISK: Final = 2
TIER_NAMES: Final = ("gpu", "cpu", "disk", "external")


class BlocksStored(Event, frozen=True, tag="kv.stored"):
    """A run of consecutive blocks was stored; the first follows `parent` (0: start of a prompt)."""

    parent: Hash
    hashes: bytes
    tier: Tier = GPU
    rank: Rank = 0


class BlocksRemoved(Event, frozen=True, tag="kv.removed"):
    """One copy of each block was evicted from `tier`."""

    hashes: bytes
    tier: Tier = GPU
    rank: Rank = 0


class BlocksCleared(Event, frozen=True, tag="kv.cleared"):
    """All blocks of the rank were removed, on all tiers. Also the first event of each epoch."""

    rank: Rank = 0


class KvGap(Event, frozen=True, tag="kv.gap"):
    """`missing` engine batches were lost and could not be replayed: the following events are incomplete.

    Routers count no cache hits on this rank until the next `BlocksCleared`.
    """

    missing: Annotated[int, msgspec.Meta(ge=0)]
    rank: Rank = 0
