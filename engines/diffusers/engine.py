"""The engine of a diffusers pipeline. It generates one image, or one video, at a time, in a thread; requests wait by priority."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import ClassVar, TypeVar

from headwater.engines.diffusers.pipelines import (
    DiffusersOptions,
    ImagePipeline,
    LoadedPipeline,
    TextToVideo,
)
from headwater.engines.engine import (
    EmitFile,
    Engine,
    EngineInfo,
    FileStep,
)
from headwater.engines.file_engine import FileEngine, read_options
from headwater.engines.launcher import PipelineLauncher, WorkerSpec
from headwater.engines.model_files import ModelFiles, pipeline_folder
from headwater.engines.process import interruptible
from headwater.schemas.inference import ImageRequest, VideoRequest

FileT = TypeVar("FileT", ImageRequest, VideoRequest)


class DiffusersEngine(FileEngine):
    """A pipeline as an `Engine`. `folder` has the pipeline, `name` is that of the model."""

    name = "diffusers"
    packages: ClassVar[tuple[str, ...]] = ("diffusers",)
    remark: ClassVar[str] = (
        "generates images, or videos, from text, and changes images; one request at a time"
    )

    def __init__(self, folder: Path, name: str, context_length: int, options: DiffusersOptions) -> None:
        super().__init__(name, context_length)
        self._folder = folder
        self._options = options
        self._loaded: LoadedPipeline | None = None
        self._images: ImagePipeline | None = None
        self._videos: TextToVideo | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="diffusers")
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
        return self._info(
            metadata.version("diffusers"),
            self._images.support if self._images is not None else None,
            self._videos.support if self._videos is not None else None,
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
        options = read_options(self.options, DiffusersOptions, self.entry.name)
        return DiffusersEngine(folder, files.name, files.context_length, options)
