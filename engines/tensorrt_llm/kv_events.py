"""TensorRT-LLM's KV events as ours, for one attention data-parallel rank.

    {"event_id": 7, "window_size": 4096, "attention_dp_rank": 0, "data": {"type": "stored", "parent_hash": …, "blocks": […]}}

Its events are polled from a bounded buffer, and numbered: a missing number means that blocks were stored or removed which
no event will report again. Then its cached blocks are unknown, and those known so far count as gone. Only events of the
largest attention window are followed: those of sliding layers come and go while the prefix stays reusable.
"""

from typing import Any

import numpy as np
import structlog

from headwater.engines.engine import KvEvent
from headwater.engines.tensorrt_llm.sampling import BlockImages, TensorRtImages
from headwater.schemas import hashing
from headwater.schemas.events.kv import CPU, GPU, BlocksCleared, BlocksRemoved, BlocksStored, KvGap

_log = structlog.get_logger("headwater.tensorrt_llm")


class _Block:
    __slots__ = ("hash", "parent", "tier")

    def __init__(self, number: int, parent: int, tier: int) -> None:
        self.hash = number
        self.parent = parent
        self.tier = tier


class EventTranslator:
    """One rank's events in order. `block_size` in tokens; `images` are the engine's, None for a model of text."""

    def __init__(self, block_size: int, images: TensorRtImages | None = None) -> None:
        self._size = block_size
        self._images = images
        self._blocks: dict[int, _Block] = {}
        """The blocks by TensorRT-LLM's hash."""
        self._partial: set[int] = set()
        self._expected: int | None = None
        self._window = 0

    def translate(self, event: dict[str, Any]) -> list[KvEvent]:
        """Our events for one of its."""
        found: list[KvEvent] = []
        number = int(event["event_id"])
        if self._expected is not None and number != self._expected:
            found += self._lost(number - self._expected)
        self._expected = number + 1
        window = int(event.get("window_size") or 0)
        data = event["data"]
        if data["type"] == "created":
            self._window = max(self._window, window)
            return found
        if window and self._window and window != self._window:
            return found
        match data["type"]:
            case "stored":
                found += self._stored(data)
            case "removed":
                found += self._removed(data["block_hashes"])
            case "updated":
                found += self._updated(data)
        return found

    def held(self) -> list[BlocksStored]:
        """All blocks, parents before children."""
        return [_stored(block.parent, [block.hash], block.tier) for block in self._blocks.values()]

    def forget(self) -> None:
        """No block is held any more."""
        self._blocks.clear()
        self._partial.clear()

    def _lost(self, missing: int) -> list[KvEvent]:
        _log.warning("kv_events_lost", missing=missing)
        self.forget()
        return [KvGap(max(missing, 1)), BlocksCleared()]

    def _stored(self, data: dict[str, Any]) -> list[KvEvent]:
        parent_id = data.get("parent_hash")
        if parent_id is None:
            parent = hashing.seed(data.get("lora_name") or "", data.get("cache_salt") or "")
        elif parent_id in self._blocks:
            parent = self._blocks[parent_id].hash
        else:
            # It follows a block from before a gap, or one that is not full.
            return []
        found: list[KvEvent] = []
        run: list[int] = []
        first, tier = parent, GPU
        for block in data["blocks"]:
            tokens = [int(token["token_id"]) for token in block["tokens"]]
            if len(tokens) < self._size:
                self._partial.add(block["block_hash"])
                break
            known = self._blocks.get(block["block_hash"])
            if known is not None:
                # Stored a second time: the run so far ends here.
                found += [_stored(first, run, tier)] if run else []
                parent = first = known.hash
                run = []
                continue
            named = self._resolve(tokens, block)
            if named is None:
                # What follows has no known parent either.
                _log.info("kv_blocks_of_unknown_media", blocks=len(data["blocks"]) - len(run))
                break
            [number] = hashing.sequence_hashes(
                np.array(named.tokens, np.uint32),
                self._size,
                parent=parent,
                multimodal=[(0, hashing.media_digest(image, start)) for image, start, _ in named.images],
            ).tolist()
            tier = CPU if block.get("cache_level") else GPU
            self._blocks[block["block_hash"]] = _Block(number, parent, tier)
            run.append(number)
            parent = number
        return found + ([_stored(first, run, tier)] if run else [])

    def _resolve(self, tokens: list[int], block: dict[str, Any]) -> BlockImages | None:
        """A block's tokens and images as the edge names them; None for images that this engine has no request of."""
        keys = block.get("mm_keys") or ()
        if not keys:
            return BlockImages(tokens, [])
        return self._images.resolve(tokens, keys) if self._images is not None else None

    def _removed(self, hashes: list[int]) -> list[KvEvent]:
        found: list[KvEvent] = []
        for one in hashes:
            if one in self._partial:
                self._partial.discard(one)
                continue
            block = self._blocks.pop(one, None)
            if block is not None:
                found.append(BlocksRemoved(_packed([block.hash]), block.tier))
        return found

    def _updated(self, data: dict[str, Any]) -> list[KvEvent]:
        block = self._blocks.get(data["block_hash"])
        level = data.get("cache_level")
        if block is None or not level:
            return []
        tier = CPU if level["new_value"] else GPU
        if tier == block.tier:
            return []
        before, block.tier = block.tier, tier
        return [_stored(block.parent, [block.hash], tier), BlocksRemoved(_packed([block.hash]), before)]


def _stored(parent: int, hashes: list[int], tier: int) -> BlocksStored:
    return BlocksStored(parent, _packed(hashes), tier)


def _packed(hashes: list[int]) -> bytes:
    return hashing.pack_hashes(np.array(hashes, np.uint64))
