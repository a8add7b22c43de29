"""Translation of the KV-cache events that vLLM and SGLang publish to events of the log. Pure.

An engine's own block hashes (integers, or bytes by a setting of vLLM) are opaque: each block is identified by its sequence
hash, computed from the event's tokens, LoRA name, salt and extra keys, so that an edge can compute the same hash
independently of the engine.

Only certain facts are published:

* Copies are counted per tier; the removal of an unknown block is ignored, so no count falls below zero.
* Offloading connectors report blocks in host memory or on disk by vLLM's hash alone: such a block has the sequence hash that
  it had on the GPU, as long as that is recorded.
* A model with several cache groups has each block once in each group. The first group of full attention represents all:
  sliding windows, Mamba states and further groups are ignored. vLLM may then have fewer cache hits than the index says.
* A requested clear takes effect at once. An engine reports it only with its next step, which a sleeping one does not make;
  events received until then are older, and are ignored.
* After an unrecoverable gap the cache's content is unknown. From then on only blocks that are announced count, which is
  correct but incomplete: `cold` says that requests should make vLLM announce reused cached blocks
  (`kv_cache_report_mode`; neither engine has a dump, and SGLang announces a block once). Copies are not counted in this
  state, as a copy and a repetition are indistinguishable. A clear ends it.
* SGLang replaces the tokens of images by numbers above any token id: such blocks, and what follows them, have no name here.
"""

from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np

from headwater.engines.engine import KvEvent
from headwater.engines.kv_events.wire import multimodal, salt
from headwater.schemas import hashing
from headwater.schemas.events.kv import (
    CPU,
    DISK,
    GPU,
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    KvGap,
)

TOKEN_MAX = (1 << 32) - 1

TIERS = {"GPU": GPU, "CPU": CPU, "CPU_PINNED": CPU, "STORAGE": DISK, "DISK": DISK, "EXTERNAL": DISK}

DENSE_KINDS = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
"""Kinds of cache groups whose blocks form a chain from the start of the prompt. Others are not indexed."""

REMEMBERED = 32_768
"""Bound on recorded hashes of removed blocks: offloading may report these blocks later."""

EngineHash = int | bytes


class _Held(NamedTuple):
    """A cached block: its sequence hash, its parent's, and copies per tier."""

    name: int
    parent: int
    copies: dict[int, int]


class KvTranslator:
    """Records an engine's cached blocks by the engine's hashes, and translates its events.

    Blocks of another size than `block_size` are ignored, as are blocks without a sequence hash: `orphans` counts those
    after an unknown parent (events were lost), `unnamed` those reported by an unknown hash, or with parts of images where
    the engine has numbers for these among its tokens (`sentinels`).
    """

    def __init__(self, block_size: int, *, sentinels: bool = False) -> None:
        self._block_size = block_size
        self._sentinels = sentinels
        self._held: dict[EngineHash, _Held] = {}
        self._gone: OrderedDict[EngineHash, tuple[int, int]] = OrderedDict()
        self._group: int | None = None
        self._seen = 0
        self._asked = 0
        self._asked_s = 0.0
        self.cold = False
        self.orphans = 0
        self.unnamed = 0

    def __len__(self) -> int:
        return len(self._held)

    def translate(self, events: list[dict[str, Any]], at_s: float = 0.0) -> list[KvEvent]:
        """Events for one batch of the engine, published at `at_s` (Unix time)."""
        ours: list[KvEvent] = []
        if self._fenced and at_s > self._asked_s and not any(map(_is_clear, events)):
            # The first batch after a clear reports it: this one does not, so the cache's content is unknown.
            self._asked, self.cold = self._seen, True
        for event in events:
            if _is_clear(event):
                self._seen += 1
                if self._seen > self._asked:
                    ours += self._cleared()
            elif self._fenced:
                # From before a clear that was already published.
                continue
            elif event.get("type") == "BlockStored":
                ours += self._stored(event)
            elif event.get("type") == "BlockRemoved":
                ours += self._removed(event)
            # A newer engine may send unknown events; known ones stay valid.
        return ours

    @property
    def _fenced(self) -> bool:
        """Is a requested clear not yet reported by the engine?"""
        return self._seen < self._asked

    def expect_clear(self) -> None:
        """Call before requesting a clear from the engine. One at a time."""
        if not self._fenced:
            self._asked = self._seen

    def confirm_clear(self, at_s: float) -> list[KvEvent]:
        """The clear was completed by `at_s` (Unix time): the events for it. The engine reports it with its next batch."""
        self._asked += 1
        self._asked_s = at_s
        return self._cleared() if self._fenced else []

    def lost(self, missing: int) -> list[KvEvent]:
        """Batches were lost permanently: forget all blocks; only those announced from now on count."""
        # The pending clear may have been among them.
        self._asked = self._seen
        ours: list[KvEvent] = [KvGap(missing), *self._cleared()]
        self.cold = True
        return ours

    def _cleared(self) -> list[KvEvent]:
        self._held.clear()
        self._gone.clear()
        self.cold = False
        return [BlocksCleared()]

    def held(self) -> list[BlocksStored]:
        """All cached blocks, parents before children, as runs per tier."""
        by_name = {held.name: held for held in self._held.values()}
        order: list[_Held] = []
        placed: set[int] = set()
        for held in by_name.values():
            chain = []
            at: _Held | None = held
            while at is not None and at.name not in placed:
                placed.add(at.name)
                chain.append(at)
                at = by_name.get(at.parent)
            order += reversed(chain)
        events: list[BlocksStored] = []
        for held in order:
            for tier, copies in held.copies.items():
                events += [BlocksStored(held.parent, held.name.to_bytes(8, "little"), tier)] * copies
        return _joined(events)

    def _stored(self, event: dict[str, Any]) -> list[KvEvent]:
        if not self._indexed(event):
            return []
        hashes: list[EngineHash] = event["block_hashes"]
        tier = TIERS.get(event.get("medium") or "GPU", GPU)
        if not event["token_ids"] or not event["block_size"]:
            named = self._by_hash(hashes)
        elif event["block_size"] == self._block_size:
            named = self._by_tokens(event, hashes)
        else:
            return []
        ours: list[BlocksStored] = []
        for engine_hash, name, parent in named:
            held = self._held.get(engine_hash)
            if held is None:
                # Equal hashes mean equal blocks, also where the event has fewer fields than the first one.
                held = _Held(*(self._gone.pop(engine_hash, None) or (name, parent)), {})
                self._held[engine_hash] = held
            if self.cold and held.copies.get(tier):
                continue
            held.copies[tier] = held.copies.get(tier, 0) + 1
            ours.append(BlocksStored(held.parent, held.name.to_bytes(hashing.HASH_BYTES, "little"), tier))
        return list(_joined(ours))

    def _by_hash(self, hashes: list[EngineHash]) -> list[tuple[EngineHash, int, int]]:
        """(engine's hash, sequence hash, parent) of blocks that are or were cached."""
        found: list[tuple[EngineHash, int, int]] = []
        for engine_hash in hashes:
            held = self._held.get(engine_hash)
            known = (held.name, held.parent) if held else self._gone.get(engine_hash)
            if known is None:
                self.unnamed += 1
            else:
                found.append((engine_hash, *known))
        return found

    def _by_tokens(
        self, event: dict[str, Any], hashes: list[EngineHash]
    ) -> list[tuple[EngineHash, int, int]]:
        """(engine's hash, sequence hash, parent) of a run of blocks; empty where unknown."""
        extra = event.get("extra_keys") or []
        parent_hash: EngineHash | None = event.get("parent_block_hash")
        if parent_hash is None:
            lora = event.get("lora_name") or ""
            own = event.get("cache_salt") or salt(extra[0] if extra else None, lora)
            parent = hashing.seed(lora, own)
        else:
            known = self._held.get(parent_hash)
            if known is None:
                self.orphans += len(hashes)
                return []
            parent = known.name
        tokens = _token_ids(event["token_ids"])
        if len(tokens) < len(hashes) * self._block_size:
            return []
        named = min(len(hashes), _text_tokens(tokens) // self._block_size) if self._sentinels else len(hashes)
        self.unnamed += len(hashes) - named
        if not named:
            return []
        names: list[int] = hashing.sequence_hashes(
            np.array(tokens[: named * self._block_size], np.uint32),
            self._block_size,
            parent=parent,
            multimodal=multimodal(extra),
        ).tolist()
        return list(zip(hashes, names, [parent, *names], strict=False))

    def _removed(self, event: dict[str, Any]) -> list[KvEvent]:
        group = event.get("group_idx")
        if group is not None and self._group is not None and group != self._group:
            return []
        tier = TIERS.get(event.get("medium") or "GPU", GPU)
        names: list[int] = []
        for engine_hash in event["block_hashes"]:
            held = self._held.get(engine_hash)
            if held is None or not held.copies.get(tier):
                continue
            names.append(held.name)
            held.copies[tier] -= 1
            if not held.copies[tier]:
                del held.copies[tier]
            if not held.copies:
                del self._held[engine_hash]
                self._remember(engine_hash, held)
        return [BlocksRemoved(hashing.pack_hashes(np.array(names, np.uint64)), tier)] if names else []

    def _remember(self, engine_hash: EngineHash, held: _Held) -> None:
        self._gone[engine_hash] = (held.name, held.parent)
        if len(self._gone) > REMEMBERED:
            self._gone.popitem(last=False)

    def _indexed(self, event: dict[str, Any]) -> bool:
        """Does it belong to the indexed group, the first dense one?"""
        kind, group = event.get("kv_cache_spec_kind"), event.get("group_idx")
        if kind is not None and kind not in DENSE_KINDS:
            return False
        if group is None:
            return True
        if self._group is None and kind is not None:
            self._group = group
        return self._group is None or group == self._group


def _token_ids(given: list[Any]) -> list[int]:
    """Token ids of an event. Under SGLang's EAGLE each is a pair with the following token."""
    return [one[0] for one in given] if given and isinstance(given[0], list | tuple) else given


def _text_tokens(tokens: list[int]) -> int:
    """How many of them precede the first that is no token id, but stands for a part of an image."""
    return next((number for number, token in enumerate(tokens) if token > TOKEN_MAX), len(tokens))


def _is_clear(event: dict[str, Any]) -> bool:
    return event.get("type") == "AllBlocksCleared"


def _joined(events: list[BlocksStored]) -> list[BlocksStored]:
    """Merge events of consecutive blocks: a third of the bytes per block."""
    joined: list[BlocksStored] = []
    for event in events:
        last = joined[-1] if joined else None
        if (
            last is not None
            and last.tier == event.tier
            and int.from_bytes(last.hashes[-8:], "little") == event.parent
        ):
            joined[-1] = BlocksStored(last.parent, last.hashes + event.hashes, last.tier)
        else:
            joined.append(event)
    return joined
