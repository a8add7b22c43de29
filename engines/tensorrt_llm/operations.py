"""LoRA adapters and sleep of TensorRT-LLM, and what its engine and these share."""

import asyncio
from abc import abstractmethod
from itertools import count
from typing import Any, ClassVar, Final

import structlog

from headwater.engines.control_rules import check_adapter, check_loaded, check_sleep
from headwater.engines.engine import EngineBase, EngineError, EngineInfo, LoraAdapter
from headwater.engines.tensorrt_llm.polling import RankState
from headwater.schemas.tables.capability import Capability

TAGS: Final = ("kv_cache", "model_weights")
"""Memory that `sleep` releases: level 1 the KV cache, level 2 the weights as well."""

_log = structlog.get_logger("headwater.tensorrt_llm")


class TensorRtControl(EngineBase):
    """Base of `TensorRtEngine`: the optional part of the protocol."""

    name = "tensorrt_llm"
    packages = ("tensorrt-llm",)
    remark = (
        "written from its documented API and tested with a double of it; it has not run on hardware. "
        "Its wheels are for Python 3.10 and 3.12: use 3.12"
    )
    possible: ClassVar[frozenset[Capability]] = frozenset(
        {
            "generate",
            "logprobs",
            "prompt_logprobs",
            "logit_bias",
            "allowed_tokens",
            "bad_words",
            "seed",
            "priority",
            "cache_salt",
            "guide",
            "processors",
            "lora",
            "handoff",
            "sleep",
            "kv_events",
            "kv_dump",
        }
    )
    # Until it is started; then set from its configuration and release.
    capabilities: frozenset[Capability] = frozenset()

    def __init__(self) -> None:
        self._api: Any = None
        self._llm: Any = None
        self._info = EngineInfo("", 1, 0, 1, 0)
        self._ranks: list[RankState] = []
        self._loras: dict[str, Any] = {}
        self._lora_ids = count(1)
        self._asleep = 0
        self._open = asyncio.Event()
        """Are requests started?"""
        self._open.set()

    async def load_lora(self, adapter: LoraAdapter) -> None:
        """See `Engine.load_lora`. TensorRT-LLM loads it with the first request that names it: the table is ours."""
        self._require("lora")
        if adapter.name in self._loras:
            return
        check_adapter(adapter, self._loras, self._info.lora_slots, self._info.lora_rank_max)
        # A number of its own each time: TensorRT-LLM caches weights by it, and has no call to unload them.
        self._loras[adapter.name] = self._api.LoRARequest(adapter.name, next(self._lora_ids), adapter.folder)

    async def unload_lora(self, name: str) -> None:
        """See `Engine.unload_lora`."""
        self._require("lora")
        self._loras.pop(name, None)

    async def sleep(self, level: int) -> None:
        """See `Engine.sleep`. Rolled back if a part of it fails."""
        self._require("sleep")
        check_sleep(level, asleep=bool(self._asleep), busy=self._busy())
        self._asleep = level
        self._open.clear()
        try:
            await self._collective("sleep", level)
        except Exception as error:
            await self._collective("wakeup", level)
            self._asleep = 0
            self._open.set()
            raise EngineError(f"TensorRT-LLM cannot sleep: {error}") from error
        for rank in self._ranks:
            rank.clear()

    async def wake(self) -> None:
        """See `Engine.wake`."""
        self._require("sleep")
        await self._collective("wakeup", self._asleep)
        self._asleep = 0
        self._open.set()

    async def _collective(self, method: str, level: int) -> None:
        # In a thread: it waits for every rank.
        await asyncio.to_thread(self._llm._collective_rpc, method, (list(TAGS[:level]),))

    async def release(self, request: str, params: bytes) -> None:
        """See `Engine.release`. TensorRT-LLM has no call for it: the KV is freed after `kv_transfer_timeout_ms`.

        It looks for such KV only when the next prompt arrives (TensorRT-LLM 12313); the idle canary is one.
        """
        self._require("handoff")

    def _check_lora(self, name: str) -> None:
        check_loaded(name, self._loras)

    def _require(self, capability: Capability) -> None:
        if capability not in self.capabilities:
            self._reject(capability)

    @abstractmethod
    def _busy(self) -> int:
        """Number of requests that it runs."""
