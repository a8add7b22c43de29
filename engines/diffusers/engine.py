"""The engine of a diffusers pipeline. It generates one image, or one video, at a time, in a thread; requests wait by priority.

It has no KV cache and no tokens: calls that concern these are rejected, and values empty.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import ClassVar, TypeVar

from headwater.engines.diffusers.pipelines import (
    DiffusersOptions,
    ImagePipeline,
    LoadedPipeline,
    TextToVideo,
    read_options,
)
from headwater.engines.engine import (
    Emit,
    EmitFile,
    Engine,
    EngineBase,
    EngineInfo,
    EngineLoad,
    FileStep,
    KvEvent,
    Transfer,
)
from headwater.engines.file_turns import PriorityTurns
from headwater.engines.launcher import PipelineLauncher, WorkerSpec
from headwater.engines.model_files import ModelFiles, pipeline_folder
from headwater.engines.process import interruptible
from headwater.schemas.events import BlocksStored
from headwater.schemas.inference import GenerateRequest, ImageRequest, VideoRequest
from headwater.schemas.tables import Capability

FileT = TypeVar("FileT", ImageRequest, VideoRequest)

BLOCK_SIZE = 16
TOTAL_BLOCKS = 4_096
"""Not used, but the events by which a worker joins its pool have sizes of a KV cache."""


class DiffusersEngine(EngineBase):
    """A pipeline as an `Engine`. `folder` has the pipeline, `name` is that of the model."""

    name = "diffusers"
    capabilities: frozenset[Capability] = frozenset({"priority", "seed"})
    possible: ClassVar[frozenset[Capability]] = frozenset(
        {"image_generation", "image_edits", "video_generation"}
    )
    packages: ClassVar[tuple[str, ...]] = ("diffusers",)
    remark: ClassVar[str] = (
        "generates images, or videos, from text, and changes images; one request at a time"
    )

    def __init__(self, folder: Path, name: str, context_length: int, options: DiffusersOptions) -> None:
        self._folder = folder
        self._model = name
        self._context_length = context_length
        self._options = options
        self._loaded: LoadedPipeline | None = None
        self._images: ImagePipeline | None = None
        self._videos: TextToVideo | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="diffusers")
        self._turns = PriorityTurns()
        self._stops: set[threading.Event] = set()

    async def start(self) -> EngineInfo:
        """See `Engine.start`. Loads for seconds to minutes on this thread, on which nothing else runs yet."""
        loop = asyncio.get_running_loop()
        options = self._options
        # Not on the other thread, for whose end the process would wait.
        with interruptible():
            loaded = self._loaded = LoadedPipeline(self._folder, options)
        if loaded.generates_videos:
            self._videos = TextToVideo(loaded, options)
            self.capabilities = self.capabilities | {"video_generation"}
        else:
            self._images = await loop.run_in_executor(self._thread, ImagePipeline, loaded, options)
            self.capabilities = self.capabilities | {"image_generation"}
            if self._images.support.inputs_max:
                self.capabilities = self.capabilities | {"image_edits"}
        return EngineInfo(
            self._model,
            BLOCK_SIZE,
            TOTAL_BLOCKS,
            1,
            self._context_length,
            version=metadata.version("diffusers"),
            image_generation=self._images.support if self._images is not None else None,
            video_generation=self._videos.support if self._videos is not None else None,
        )

    async def generate_images(self, request: ImageRequest, emit: EmitFile) -> None:
        """See `Engine.generate_images`."""
        if self._images is None or request.need not in self.capabilities:
            self._reject(request.need)
        await self._run(request, self._images.generate, emit)

    async def generate_video(self, request: VideoRequest, emit: EmitFile) -> None:
        """See `Engine.generate_video`."""
        if self._videos is None:
            self._reject("video_generation")
        await self._run(request, self._videos.generate, emit)

    async def _run(
        self,
        request: FileT,
        generate: Callable[[FileT, EmitFile, threading.Event], None],
        emit: EmitFile,
    ) -> None:
        """Have the thread generate when it is this request's turn."""
        assert self._loaded is not None
        self._loaded.check(request)
        loop = asyncio.get_running_loop()
        stopped = threading.Event()

        def emit_from_thread(step: FileStep) -> None:
            if not stopped.is_set():
                loop.call_soon_threadsafe(emit, step)

        async with self._turns.turn(request.priority):
            self._stops.add(stopped)
            try:
                await loop.run_in_executor(self._thread, generate, request, emit_from_thread, stopped)
            finally:
                # If this was cancelled the thread ends with its step, and the next request begins after it.
                stopped.set()
                self._stops.discard(stopped)

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
        return EngineLoad(self._turns.running, self._turns.waiting, 0, TOTAL_BLOCKS)

    async def clear_kv(self) -> None:
        """See `Engine.clear_kv`."""

    async def check(self) -> None:
        """See `Engine.check`. A pipeline dies with its process."""

    async def stop(self) -> None:
        """See `Engine.stop`."""
        for stopped in self._stops:
            stopped.set()
        self._thread.shutdown(wait=False, cancel_futures=True)


class DiffusersLauncher(PipelineLauncher):
    """See `EngineLauncher`."""

    def make(self, worker: WorkerSpec, files: ModelFiles) -> Engine:
        """See `EngineLauncher.make`."""
        folder = pipeline_folder(worker.model)
        return DiffusersEngine(folder, files.name, files.context_length, read_options(self.options))
