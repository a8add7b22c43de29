"""The double's KV events: numbered, with hashes of its own, partial blocks, and those of a second attention window."""

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from headwater.engines.engine import KvEvent, Step
from headwater.engines.sim.engine import SimEngine
from headwater.schemas import hashing
from headwater.schemas.events import BlocksCleared, BlocksRemoved, BlocksStored
from headwater.schemas.inference import GenerateRequest
from tests.support.tensorrt_llm.images import with_keys

WINDOW, SLIDING_WINDOW = 4_096, 512


def its_hash(number: int) -> int:
    """TensorRT-LLM's own hash of a block, here of ours: another number of 64 bits, often above 2**63."""
    return (number * 0x9E3779B97F4A7C15 + 1) % 2**64


class EventBuffer:
    """Events of one rank, at most `size` of them: the oldest are dropped."""

    def __init__(self, rank: int, block_size: int, size: int, *, attention_dp: bool) -> None:
        self._rank = rank
        self._block_size = block_size
        self._attention_dp = attention_dp
        self._sequences: dict[str, tuple[GenerateRequest, list[int]]] = {}
        self._tokens: dict[int, tuple[int, int, list[int], GenerateRequest]] = {}
        self._partial: list[int] = []
        self._number = 0
        self._enabled = size > 0
        self._buffer: deque[dict[str, Any]] = deque(maxlen=size)
        for window in (WINDOW, SLIDING_WINDOW):
            self._add({"type": "created", "num_blocks_per_cache_level": [1, 0]}, window)

    def know(self, request: GenerateRequest) -> None:
        """Remember a prompt: events name tokens."""
        self._sequences[request.request] = (request, hashing.unpack_tokens(request.tokens).tolist())

    def generated(self, request: GenerateRequest, step: Step) -> None:
        """Remember tokens of an answer."""
        self._sequences[request.request][1].extend(step.tokens)

    def take(self) -> list[dict[str, Any]]:
        """All events, once."""
        if not self._sequences:
            return []
        events = list(self._buffer)
        self._buffer.clear()
        return events

    def forget(self) -> None:
        """The cache is gone, without any event."""
        self._partial.clear()

    async def follow(self, engine: SimEngine) -> None:
        """Translate the simulated engine's events."""
        async for events in engine.kv_events():
            for event in events:
                self._translate(event)

    def _translate(self, event: KvEvent) -> None:
        if isinstance(event, BlocksStored):
            self._learn()
            parent = event.parent
            blocks = []
            root: GenerateRequest | None = None
            for number in hashing.unpack_hashes(event.hashes).tolist():
                _, at, tokens, request = self._tokens[number]
                root = root or request
                blocks.append(self._block(its_hash(number), *with_keys(request, at, tokens)))
            is_root = parent not in self._tokens
            # Of a sliding layer, which the reader must not follow.
            self._add({"type": "stored", "parent_hash": None, "blocks": blocks[:1]}, SLIDING_WINDOW)
            partial = its_hash(parent ^ 0xFFFF)
            blocks.append(self._block(partial, [1, 2, 3]))
            self._add({"type": "removed", "block_hashes": self._partial}, WINDOW)
            self._partial = [partial]
            data: dict[str, Any] = {
                "type": "stored",
                "parent_hash": None if is_root else its_hash(parent),
                "blocks": blocks,
            }
            if is_root and root is not None:
                data |= {"lora_name": root.lora_name or None, "cache_salt": root.cache_salt or None}
            self._add(data, WINDOW)
        elif isinstance(event, BlocksRemoved):
            numbers = hashing.unpack_hashes(event.hashes).tolist()
            self._add({"type": "removed", "block_hashes": [its_hash(one) for one in numbers]}, WINDOW)
        else:
            assert isinstance(event, BlocksCleared)

    def _block(self, number: int, tokens: list[int], keys: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        return {
            "type": "stored_block",
            "block_hash": number,
            "tokens": [{"type": "unique_token", "token_id": one, "token_extra_id": 0} for one in tokens],
            "cache_level": 0,
            "priority": 35,
            "mm_keys": list(keys),
        }

    def _learn(self) -> None:
        """The tokens of each block of all prompts and answers so far."""
        size = self._block_size
        for request, tokens in self._sequences.values():
            parent = hashing.seed(request.lora_name, request.cache_salt)
            digests = hashing.media_digests(
                [(item.id, item.start, item.tokens) for item in request.media], size
            )
            hashes = hashing.sequence_hashes(
                np.array(tokens, np.uint32), size, parent=parent, multimodal=digests
            ).tolist()
            for number_in_prompt, number in enumerate(hashes):
                at = number_in_prompt * size
                self._tokens[number] = (parent, at, tokens[at : at + size], request)
                parent = number

    def _add(self, data: dict[str, Any], window: int) -> None:
        if not self._enabled:
            return
        event: dict[str, Any] = {"event_id": self._number, "data": data, "window_size": window}
        if self._attention_dp:
            event["attention_dp_rank"] = self._rank
        self._number += 1
        self._buffer.append(event)
