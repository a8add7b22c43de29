"""vLLM's KV-cache events into ours. Pure.

vLLM publishes msgpack `[ts, [event, …], rank]`. Events are maps with a `type` key since June 2026, positional
arrays with the tag first before that; both are read. Its own block hashes are opaque here: each block is
named anew by our sequence hash, from the event's tokens, LoRA name and extra keys, so that an edge can compute
the same name without knowing vLLM.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec
import numpy as np

from headwater.engines.engine import KvEvent
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

_STORED_FIELDS = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
)
_REMOVED_FIELDS = ("block_hashes", "medium", "group_idx")

EngineHash = int | bytes


class _Held(NamedTuple):
    """A block the engine holds: our name, our parent's name, and copies per tier."""

    name: int
    parent: int
    copies: dict[int, int]


def decode(payload: bytes) -> list[dict[str, Any]]:
    """Events of one published batch as maps. Raises `msgspec.DecodeError` or ValueError for anything else."""
    batch = msgspec.msgpack.decode(payload)
    if not isinstance(batch, list) or len(batch) < 2 or not isinstance(batch[1], list):
        raise ValueError("not an event batch")
    return [_as_map(event) for event in batch[1]]


def _as_map(event: Any) -> dict[str, Any]:
    if isinstance(event, dict):
        return event
    if not isinstance(event, list) or not event:
        raise ValueError(f"not an event: {event!r}")
    tag, *values = event
    fields = {"BlockStored": _STORED_FIELDS, "BlockRemoved": _REMOVED_FIELDS}.get(tag, ())
    return {"type": tag, **dict(zip(fields, values, strict=False))}


class KvTranslator:
    """Keeps what vLLM holds, by its hashes, and turns its events into ours.

    Blocks of a block size other than `block_size`, and of cache groups that are no prefix chains, are left
    out. A block whose parent is unknown (events were lost) can not be named: it is left out too, and
    counted in `orphans`.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._held: dict[EngineHash, _Held] = {}
        self._groups: set[int] = set()
        self.orphans = 0

    def __len__(self) -> int:
        return len(self._held)

    def translate(self, events: Iterable[dict[str, Any]]) -> list[KvEvent]:
        """Our events for one batch of vLLM's."""
        ours: list[KvEvent] = []
        for event in events:
            match event.get("type"):
                case "BlockStored":
                    ours += self._stored(event)
                case "BlockRemoved":
                    ours += self._removed(event)
                case "AllBlocksCleared":
                    self._held.clear()
                    ours.append(BlocksCleared())
                case _:
                    # A newer engine may tell more than we know; what we know stays true.
                    pass
        return ours

    def lost(self, missing: int) -> list[KvEvent]:
        """Batches were lost for good: what is held is not known any more."""
        self._held.clear()
        return [KvGap(missing)]

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
        if event.get("block_size") != self._block_size or not self._dense(event):
            return []
        hashes: list[EngineHash] = event["block_hashes"]
        parent_hash: EngineHash | None = event.get("parent_block_hash")
        extra = event.get("extra_keys") or []
        lora = event.get("lora_name") or ""
        if parent_hash is None:
            salt = _salt(extra[0] if extra else None, lora)
            parent = hashing.seed(lora, salt)
        else:
            known = self._held.get(parent_hash)
            if known is None:
                self.orphans += len(hashes)
                return []
            parent = known.name
        tokens: list[int] = event["token_ids"]
        if len(tokens) < len(hashes) * self._block_size:
            return []
        names = hashing.sequence_hashes(
            np.array(tokens[: len(hashes) * self._block_size], np.uint32),
            self._block_size,
            parent=parent,
            multimodal=_multimodal(extra),
        )
        tier = TIERS.get(event.get("medium") or "GPU", GPU)
        run_parent = parent
        for engine_hash, name in zip(hashes, names.tolist(), strict=True):
            held = self._held.setdefault(engine_hash, _Held(name, run_parent, {}))
            held.copies[tier] = held.copies.get(tier, 0) + 1
            run_parent = name
        return [BlocksStored(parent, hashing.pack_hashes(names), tier)]

    def _removed(self, event: dict[str, Any]) -> list[KvEvent]:
        group = event.get("group_idx")
        if group is not None and self._groups and group not in self._groups:
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
        return [BlocksRemoved(hashing.pack_hashes(np.array(names, np.uint64)), tier)] if names else []

    def _dense(self, event: dict[str, Any]) -> bool:
        kind, group = event.get("kv_cache_spec_kind"), event.get("group_idx")
        dense = kind is None or kind in DENSE_KINDS
        if dense and group is not None:
            self._groups.add(group)
        return dense


def _salt(keys: Any, lora: str) -> str:
    """The cache salt among a first block's extra keys: the text that is not the LoRA name, which comes first."""
    texts = [key for key in keys or () if isinstance(key, str)]
    if lora and lora in texts:
        texts.remove(lora)
    return texts[0] if texts else ""


def _multimodal(extra: list[Any]) -> list[hashing.MultimodalDigest]:
    """(block, digest) of the multimodal items: pairs of item id and offset among the extra keys."""
    found: list[hashing.MultimodalDigest] = []
    for block, keys in enumerate(extra):
        for key in keys or ():
            if isinstance(key, list | tuple) and key and isinstance(key[0], str):
                text = key[0].encode()
                found.append((block, hashing.seed(text.hex())))
    return found


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
