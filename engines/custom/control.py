"""LoRA adapters, sleep, pause and embeddings of an engine in one file: the rules around the class's methods."""

import asyncio
from abc import abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import numpy as np

from headwater.engines.custom.api import PoolingRequest
from headwater.engines.engine import (
    EmitFile,
    EngineBase,
    EngineInfo,
    LoraAdapter,
    PauseMode,
    check_adapter,
    check_loaded,
    check_pooling,
    check_sleep,
    check_text_only,
)
from headwater.schemas import hashing
from headwater.schemas.inference import EmbedRequest, ImageRequest, VideoRequest

T = TypeVar("T")


class CustomControl(EngineBase):
    """Base of `CustomEngine`: what it does around the class's optional methods."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._info = EngineInfo("", 1, 0, 1, 0)
        self._loras: set[str] = set()
        self._asleep = False
        self._open = asyncio.Event()
        """Are new requests started?"""
        self._open.set()
        self._going = asyncio.Event()
        """Do running requests continue?"""
        self._going.set()
        self._drained = asyncio.Event()
        """Set whenever a request has left."""
        self._paused = False

    async def embed(self, request: EmbedRequest) -> tuple[bytes, ...]:
        """See `Engine.embed`."""
        self._require("embed")
        check_text_only(request)
        check_loaded(request.lora_name, self._loras)
        prompts = tuple(tuple(hashing.unpack_tokens(packed).tolist()) for packed in request.prompts)
        check_pooling(self._info, request.task, tuple(map(len, prompts)))
        pooling = PoolingRequest(
            request.request, prompts, request.task, request.lora_name, request.dimensions
        )
        vectors = await self._call(self._engine.embed, pooling)
        return tuple(np.asarray(vector, "<f4").tobytes() for vector in vectors)

    async def generate_images(self, request: ImageRequest, emit: EmitFile) -> None:
        """See `Engine.generate_images`."""
        self._require("image_generation")
        await self._call(self._engine.generate_images, request, emit)

    async def generate_video(self, request: VideoRequest, emit: EmitFile) -> None:
        """See `Engine.generate_video`."""
        self._require("video_generation")
        await self._call(self._engine.generate_video, request, emit)

    async def load_lora(self, adapter: LoraAdapter) -> None:
        """See `Engine.load_lora`."""
        self._require("lora")
        if adapter.name in self._loras:
            return
        check_adapter(adapter, self._loras, self._info.lora_slots, self._info.lora_rank_max)
        await self._call(self._engine.load_lora, adapter)
        self._loras.add(adapter.name)

    async def unload_lora(self, name: str) -> None:
        """See `Engine.unload_lora`."""
        self._require("lora")
        if name in self._loras:
            self._loras.remove(name)
            await self._call(self._engine.unload_lora, name)

    async def sleep(self, level: int) -> None:
        """See `Engine.sleep`."""
        self._require("sleep")
        check_sleep(level, asleep=self._asleep, busy=self._busy())
        self._asleep = True
        self._hold()
        await self._call(self._engine.sleep, level)

    async def wake(self) -> None:
        """See `Engine.wake`."""
        self._require("sleep")
        await self._call(self._engine.wake)
        self._asleep = False
        self._hold()

    async def pause(self, mode: PauseMode) -> None:
        """See `Engine.pause`. The class's `pause` is called once no request runs, or all are suspended."""
        self._require("pause")
        self._paused = True
        self._hold()
        if mode == "abort":
            self._abort_all()
        elif mode == "keep":
            self._going.clear()
        while mode != "keep" and self._busy():
            self._drained.clear()
            await self._drained.wait()
        await self._call(self._engine.pause)

    async def resume(self) -> None:
        """See `Engine.resume`."""
        self._require("pause")
        await self._call(self._engine.resume)
        self._paused = False
        self._going.set()
        self._hold()

    async def profile(self, *, on: bool) -> None:
        """See `Engine.profile`."""
        self._require("profile")
        await self._call(self._engine.profile, on=on)

    def _hold(self) -> None:
        """Start new requests, or keep them waiting."""
        if self._asleep or self._paused:
            self._open.clear()
        else:
            self._open.set()

    async def _unsuspended(self) -> None:
        """Wait until running requests continue."""
        if not self._going.is_set():
            await self._going.wait()

    @abstractmethod
    async def _call(self, method: Callable[..., Awaitable[T]], *arguments: Any, **named: Any) -> T:
        """Call a method of the class."""

    @abstractmethod
    def _abort_all(self) -> None:
        """Abort all requests."""

    @abstractmethod
    def _busy(self) -> int:
        """Number of requests that the class has, or gets without waiting for `_open` again."""
