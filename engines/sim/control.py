"""Operations of the simulated engine other than generation: LoRA, sleep, pause, embeddings.

A LoRA adapter is only a name: each has its own answers and cached blocks. Sleep and pause both stop the scheduler; sleep
also drops the cache. Vectors depend only on the tokens and on what the media show, and take the time of a prefill.
"""

import asyncio
from abc import abstractmethod

import numpy as np

from headwater.engines.control_rules import check_adapter, check_loaded, check_sleep
from headwater.engines.engine import EngineBase, LoraAdapter, PauseMode, RequestRejected
from headwater.engines.media.prompt import check_media
from headwater.engines.sim.embedding import content_of, embedding_of
from headwater.engines.sim.sequence import SimSettings
from headwater.schemas import hashing
from headwater.schemas.clock import Clock
from headwater.schemas.messages.inference import EmbedRequest
from headwater.schemas.messages.media import PromptMedia

DIMENSIONS = 64
TOKEN_BYTES = 4


class SimControl(EngineBase):
    """Base of `SimEngine`, which owns the scheduler and the cache."""

    def __init__(self, settings: SimSettings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._pooling = 0
        """Pooling requests that have not ended."""
        self._pooling_turn = asyncio.Lock()
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
        """See `Engine.embed`. Vectors of length 1. One request after the other, next to what the scheduler runs."""
        if request.task != "embed":
            raise RequestRejected(f"{request.task!r} is not supported by this model; supported: embed")
        check_loaded(request.lora_name, self._loras)
        media = request.media or ((),) * len(request.prompts)
        pairs = zip(request.prompts, media, strict=True)
        vectors = tuple(self._vector(packed, items, request) for packed, items in pairs)
        tokens = sum(len(packed) for packed in request.prompts) // TOKEN_BYTES
        self._pooling += 1
        try:
            async with self._pooling_turn:
                await self._clock.sleep(self._settings.step_time.seconds(tokens, 0.0, decoding=False))
        finally:
            self._pooling -= 1
        return vectors

    def _vector(self, packed: bytes, media: tuple[PromptMedia, ...], request: EmbedRequest) -> bytes:
        tokens = hashing.unpack_tokens(packed)
        check_media(tokens.tolist(), media, self._settings.media)
        if not 0 < len(tokens) <= self._settings.context_length:
            raise RequestRejected(f"{len(tokens)} tokens; 1 to {self._settings.context_length} are possible")
        root = hashing.seed(request.lora_name)
        [state] = hashing.sequence_hashes(tokens, len(tokens), parent=root).tolist()
        shown = [content_of(embedding_of(item)) for item in media]
        vector = np.random.default_rng([state, *shown]).standard_normal(request.dimensions or DIMENSIONS)
        return (vector / np.linalg.norm(vector)).astype("<f4").tobytes()
