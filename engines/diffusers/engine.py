"""The engine of a diffusers pipeline. It generates one image at a time, in a thread; requests wait by priority.

It has no KV cache and no tokens: what concerns these is rejected, or empty.
"""

import asyncio
import heapq
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from importlib import metadata
from itertools import count
from pathlib import Path
from typing import ClassVar

from headwater.engines.diffusers.options import DiffusersOptions
from headwater.engines.diffusers.pipeline import TextToImage
from headwater.engines.engine import (
    Emit,
    EmitImage,
    EngineBase,
    EngineInfo,
    EngineLoad,
    ImageStep,
    KvEvent,
    Transfer,
)
from headwater.schemas.events.kv import BlocksStored
from headwater.schemas.messages.image_generation import ImageRequest
from headwater.schemas.messages.inference import GenerateRequest
from headwater.schemas.tables.capability import Capability

BLOCK_SIZE = 16
TOTAL_BLOCKS = 4_096
"""Not used: the events by which a worker joins its pool have sizes of a KV cache."""


class DiffusersEngine(EngineBase):
    """See the module. `folder` has the pipeline, `name` is that of the model."""

    name = "diffusers"
    capabilities: frozenset[Capability] = frozenset({"image_generation", "priority", "seed"})
    packages: ClassVar[tuple[str, ...]] = ("diffusers",)
    remark: ClassVar[str] = "generates images from text; one request at a time"

    def __init__(self, folder: Path, name: str, context_length: int, options: DiffusersOptions) -> None:
        self._folder = folder
        self._model = name
        self._context_length = context_length
        self._options = options
        self._pipeline: TextToImage | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="diffusers")
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._numbers = count()
        self._running = 0
        self._stops: set[threading.Event] = set()

    async def start(self) -> EngineInfo:
        """See `Engine.start`."""
        loop = asyncio.get_running_loop()
        self._pipeline = await loop.run_in_executor(self._thread, TextToImage, self._folder, self._options)
        return EngineInfo(
            self._model,
            BLOCK_SIZE,
            TOTAL_BLOCKS,
            1,
            self._context_length,
            version=metadata.version("diffusers"),
            image_generation=self._pipeline.support,
        )

    async def generate_images(self, request: ImageRequest, emit: EmitImage) -> None:
        """See `Engine.generate_images`."""
        assert self._pipeline is not None
        self._pipeline.check(request)
        loop = asyncio.get_running_loop()
        stopped = threading.Event()

        def emit_from_thread(step: ImageStep) -> None:
            if not stopped.is_set():
                loop.call_soon_threadsafe(emit, step)

        async with self._turn(request.priority):
            self._stops.add(stopped)
            try:
                await loop.run_in_executor(
                    self._thread, self._pipeline.generate, request, emit_from_thread, stopped
                )
            finally:
                # If this was cancelled the thread ends with its step, and the next request begins after it.
                stopped.set()
                self._stops.discard(stopped)

    @asynccontextmanager
    async def _turn(self, priority: int) -> AsyncIterator[None]:
        """Wait until no request runs and none that waits has a lower number as its priority, or came before."""
        if self._running:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiting, (priority, next(self._numbers), turn))
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._pass_on()
                raise
        self._running = 1
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        """Let the next request run; `_running` stays set for it, so that no other begins in between."""
        while self._waiting:
            _, _, turn = heapq.heappop(self._waiting)
            if not turn.done():
                turn.set_result(None)
                return
        self._running = 0

    def submit(self, request: GenerateRequest, emit: Emit, transfer: Transfer | None = None) -> None:
        """See `Engine.submit`: there are no tokens."""
        self._reject("generate")

    def abort(self, request: str) -> None:
        """See `Engine.abort`: there is nothing to abort, as nothing is submitted."""

    async def kv_events(self) -> AsyncIterator[list[KvEvent]]:
        """See `Engine.kv_events`: never any."""
        await asyncio.Event().wait()
        yield []

    def held_blocks(self) -> list[BlocksStored]:
        """See `Engine.held_blocks`."""
        return []

    def load(self) -> EngineLoad:
        """See `Engine.load`."""
        waiting = sum(not turn.done() for _, _, turn in self._waiting)
        return EngineLoad(self._running, waiting, 0, TOTAL_BLOCKS)

    async def clear_kv(self) -> None:
        """See `Engine.clear_kv`."""

    async def check(self) -> None:
        """See `Engine.check`. A pipeline dies with its process."""

    async def stop(self) -> None:
        """See `Engine.stop`."""
        for stopped in self._stops:
            stopped.set()
        self._thread.shutdown(wait=False, cancel_futures=True)
