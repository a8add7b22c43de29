"""Leases: which actors are alive, and the epoch of each. KV bucket, one key per actor."""

from collections.abc import Set as AbstractSet
from typing import Literal

import msgspec

from headwater.schemas.media_kind import PromptMediaKind

LeaseKind = Literal["worker", "router", "edge", "shadow"]

ServedPart = Literal["", "whole", "prefill", "decode", "encode"]
"""What a worker takes at present: nothing, whole requests (and legs), only legs of this kind, or media to encode."""


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """Value of a lease. Stored as JSON, so that people can read it with the stock `nats` tool.

    `epoch` numbers the holder's incarnation. It does not change when the lease is renewed, nor when the holder
    reclaims a lapsed lease that is still free; 0 until the holder has determined it, before it serves anything.
    `incarnation` is unique to the holder. `stalled`: the log does not accept what the holder appends. `serves` is a
    worker's: nothing before it has joined its pool, and while it drains, is paused or sleeps. `reads_embeddings`: the worker
    takes media that an encode worker has encoded. `encodes`: the kinds that an encode worker encodes. `embedding_format` names what that worker computes, and an encode worker's what it
    computes itself: only with equal ones do they exchange embeddings.
    """

    kind: str
    name: str
    pool: str = ""
    host: str = ""
    pid: int = 0
    epoch: int = 0
    incarnation: str = ""
    stalled: bool = False
    serves: ServedPart = ""
    reads_embeddings: bool = False
    embedding_format: str = ""
    encodes: tuple[PromptMediaKind, ...] = ("image",)

    def encodes_in(self, pool: str, kinds: AbstractSet[PromptMediaKind]) -> bool:
        """Does it encode media of these kinds for the workers of this pool now?"""
        return self.serves == "encode" and self.pool == pool and kinds <= set(self.encodes)
