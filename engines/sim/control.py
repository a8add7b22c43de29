"""Operations of the simulated engine other than generation: LoRA, sleep, pause, embeddings.

A LoRA adapter is only a name: each has its own answers and cached blocks. Sleep and pause both stop the scheduler; sleep
also drops the cache. Vectors depend only on the tokens.
"""

import asyncio
from abc import abstractmethod

import numpy as np

from headwater.engines.control_rules import check_adapter, check_loaded, check_sleep
from headwater.engines.engine import EngineBase, LoraAdapter, PauseMode, RequestRejected
from headwater.engines.sim.sequence import SimSettings
from headwater.schemas import hashing
from headwater.schemas.messages.inference import EmbedRequest

DIMENSIONS = 64


class SimControl(EngineBase):
    """Base of `SimEngine`, which owns the scheduler and the cache."""

    def __init__(self, settings: SimSettings) -> None:
        self._settings = settings
        self._loras: dict[str, LoraAdapter] = {}
        self._asleep = False
        self._paused: PauseMode | None = None
        self._awake = asyncio.Event()
        self._awake.set()
        self._drained = asyncio.Event()
        self._still = asyncio.Event()

    @property
    def _admits(self) -> bool:
        """May the scheduler start waiting requests?"""
        return self._paused is None and not self._asleep

    @abstractmethod
    def _busy(self) -> int:
        """Number of requests that were started and did not end."""

    @abstractmethod
    def _abort_all(self) -> None:
        """Abort all requests."""

    @abstractmethod
    async def clear_kv(self) -> None:
        """See `Engine.clear_kv`."""

    async def load_lora(self, adapter: LoraAdapter) -> None:
        """See `Engine.load_lora`. The folder is not read."""
        settings = self._settings
        check_adapter(adapter, self._loras, settings.lora_slots, settings.lora_rank_max)
        self._loras[adapter.name] = adapter

    async def unload_lora(self, name: str) -> None:
        """See `Engine.unload_lora`. Unknown names are fine."""
        self._loras.pop(name, None)

    async def sleep(self, level: int) -> None:
        """See `Engine.sleep`."""
        check_sleep(level, asleep=self._asleep, busy=self._busy())
        self._asleep = True
        await self.clear_kv()
        self._hold()

    async def wake(self) -> None:
        """See `Engine.wake`."""
        self._asleep = False
        self._hold()

    async def pause(self, mode: PauseMode) -> None:
        """See `Engine.pause`."""
        self._paused = mode
        if mode == "abort":
            self._abort_all()
        elif mode == "wait":
            while self._busy():
                self._drained.clear()
                await self._drained.wait()
        self._hold()
        if mode == "keep" and self._busy():
            await self._still.wait()

    async def resume(self) -> None:
        """See `Engine.resume`."""
        self._paused = None
        self._hold()

    def _hold(self) -> None:
        """Run the scheduler, or stop it before its next step."""
        if self._admits:
            self._awake.set()
        else:
            self._awake.clear()

    async def _held_back(self) -> None:
        """Called before each step of the scheduler: waits while it is stopped."""
        if not self._awake.is_set():
            self._still.set()
            await self._awake.wait()
            self._still.clear()

    async def embed(self, request: EmbedRequest) -> tuple[bytes, ...]:
        """See `Engine.embed`. Vectors of length 1."""
        if request.task != "embed":
            raise RequestRejected(f"{request.task!r} is not supported by this model; supported: embed")
        check_loaded(request.lora_name, self._loras)
        return tuple(self._vector(packed, request) for packed in request.prompts)

    def _vector(self, packed: bytes, request: EmbedRequest) -> bytes:
        tokens = hashing.unpack_tokens(packed)
        if not 0 < len(tokens) <= self._settings.context_length:
            raise RequestRejected(f"{len(tokens)} tokens; 1 to {self._settings.context_length} are possible")
        root = hashing.seed(request.lora_name)
        [state] = hashing.sequence_hashes(tokens, len(tokens), parent=root).tolist()
        vector = np.random.default_rng(state).standard_normal(request.dimensions or DIMENSIONS)
        return (vector / np.linalg.norm(vector)).astype("<f4").tobytes()
