"""vLLM's KV-cache events into ours. Pure.

VLLM's own block hashes (integers, or bytes by its setting) are opaque here: each block is named anew by our sequence
hash, from the event's tokens, LoRA name and extra keys, so that an edge can compute the same name without knowing
vLLM.

What is told of a block is what is sure:

* Copies are counted per tier; a removal of what is not held is dropped, so no count falls below zero.
* Offloading connectors tell of blocks in host memory or on disk by their hash alone: such a block has the name it
  had on the GPU, as long as that is remembered.
* A model with several cache groups has each block once in each group. The first group of full attention stands for
  all: sliding windows, Mamba states and further groups are left out. vLLM may find less than is claimed then, never
  more.
* A clear that we asked for counts from then on. vLLM tells of it only with its next step, which a sleeping engine
  never makes; until then everything it still tells is from before, and is dropped.
* After a hole that could not be filled nothing is known. From then on it is held what is announced anew, which is
  true but not all: `cold` says that requests should have vLLM announce the cached blocks that they use once more
  (`kv_cache_report_mode`; vLLM has no dump). Copies are not counted in that time, as a copy and a repetition look
  the same. A clear ends it.
"""

from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np

from headwater.engines.engine import KvEvent
from headwater.engines.vllm.kv_wire import multimodal, salt
from headwater.schemas import hashing
from headwater.schemas.kv import (
    CPU,
    DISK,
    GPU,
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    KvGap,
)

TIERS = {"GPU": GPU, "CPU": CPU, "CPU_PINNED": CPU, "STORAGE": DISK, "DISK": DISK}

DENSE_KINDS = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
"""Cache groups whose blocks form a chain from the start of the prompt. Others are not indexed."""

REMEMBERED = 32_768
"""Blocks whose names are kept after their last copy is gone: offloading may tell of them later."""

EngineHash = int | bytes


class _Held(NamedTuple):
    """A block the engine holds: our name, our parent's name, and copies per tier."""

    name: int
    parent: int
    copies: dict[int, int]


class KvTranslator:
    """Keeps what vLLM holds, by its hashes, and turns its events into ours.

    Left out are blocks of another size than `block_size`, and blocks that can not be named: `orphans` counts those
    behind an unknown parent (events were lost), `unnamed` those told by a hash that is not known here.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
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
        """Our events for one batch of vLLM's, published at `at_s` (Unix time)."""
        ours: list[KvEvent] = []
        if self._fenced and at_s > self._asked_s and not any(map(_is_clear, events)):
            # The first batch after a clear tells of it: there was none, and we do not know what is there.
            self._asked, self.cold = self._seen, True
        for event in events:
            if _is_clear(event):
                self._seen += 1
                if self._seen > self._asked:
                    ours += self._cleared()
            elif self._fenced:
                # From before a clear that was told already.
                continue
            elif event.get("type") == "BlockStored":
                ours += self._stored(event)
            elif event.get("type") == "BlockRemoved":
                ours += self._removed(event)
            # A newer engine may tell more than we know; what we know stays true.
        return ours

    @property
    def _fenced(self) -> bool:
        """Is vLLM still to tell of a clear that we asked for?"""
        return self._seen < self._asked

    def clear_begins(self) -> None:
        """We are about to ask vLLM for a clear. One at a time."""
        if not self._fenced:
            self._asked = self._seen

    def clear_done(self, at_s: float) -> list[KvEvent]:
        """VLLM did it by `at_s` (Unix time), and will say so with its next batch: it is so from now on."""
        self._asked += 1
        self._asked_s = at_s
        return self._cleared() if self._fenced else []

    def lost(self, missing: int) -> list[KvEvent]:
        """Batches were lost for good: what was held is not known any more, and held is what is told from now on."""
        # The clear that is waited for may have been among them.
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
        """All blocks held, parents before children, as runs per tier."""
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
                # An equal hash has an equal name, also where the event tells less than the first one did.
                held = _Held(*(self._gone.pop(engine_hash, None) or (name, parent)), {})
                self._held[engine_hash] = held
            if self.cold and held.copies.get(tier):
                continue
            held.copies[tier] = held.copies.get(tier, 0) + 1
            ours.append(BlocksStored(held.parent, held.name.to_bytes(hashing.HASH_BYTES, "little"), tier))
        return list(_joined(ours))

    def _by_hash(self, hashes: list[EngineHash]) -> list[tuple[EngineHash, int, int]]:
        """(hash, name, parent) of those that are held somewhere or were."""
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
        """(hash, name, parent) of a run of blocks; empty if that can not be known."""
        extra = event.get("extra_keys") or []
        parent_hash: EngineHash | None = event.get("parent_block_hash")
        if parent_hash is None:
            lora = event.get("lora_name") or ""
            parent = hashing.seed(lora, salt(extra[0] if extra else None, lora))
        else:
            known = self._held.get(parent_hash)
            if known is None:
                self.orphans += len(hashes)
                return []
            parent = known.name
        tokens: list[int] = event["token_ids"]
        if len(tokens) < len(hashes) * self._block_size:
            return []
        names: list[int] = hashing.sequence_hashes(
            np.array(tokens[: len(hashes) * self._block_size], np.uint32),
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
        """Is it of the one group that is indexed? The first dense one is."""
        kind, group = event.get("kv_cache_spec_kind"), event.get("group_idx")
        if kind is not None and kind not in DENSE_KINDS:
            return False
        if group is None:
            return True
        if self._group is None and kind is not None:
            self._group = group
        return self._group is None or group == self._group


def _is_clear(event: dict[str, Any]) -> bool:
    return event.get("type") == "AllBlocksCleared"


def _joined(events: list[BlocksStored]) -> list[BlocksStored]:
    """Neighbours that continue each other as one event: a third of the bytes per block."""
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
