"""The engine of SGLang's diffusion runtime. It generates one image or video at a time; requests wait by priority.

SGLang cannot stop what it generates: a request that is cancelled keeps its turn until SGLang has ended it.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, ClassVar, Final

import msgspec
import structlog

from headwater.engines.engine import (
    EmitFile,
    Engine,
    EngineDied,
    EngineError,
    EngineInfo,
    EngineStartFailed,
    EngineUnavailable,
    FileStep,
    RequestRejected,
)
from headwater.engines.file_engine import FileEngine, read_options
from headwater.engines.launcher import SGLANG_DIFFUSION_BROKER, PipelineLauncher, Releases, WorkerSpec
from headwater.engines.model_files import ModelFiles, pipeline_folder
from headwater.engines.sglang_diffusion.client import DiffusionClient, DiffusionServer, ModelDefaults
from headwater.schemas.inference import FileRequest, ImageRequest, VideoRequest
from headwater.schemas.tables import Capability, ImageGenerationSupport, VideoGenerationSupport

Count = Annotated[int, msgspec.Meta(ge=1)]
OrDefault = Annotated[int, msgspec.Meta(ge=0)]


class SglangDiffusionOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`python`: the interpreter of the environment that has `sglang[diffusion]`, "": this one's. `args` are further arguments
    of its server, `start_s` is how long it may take to load the model. `allow_vulnerable` starts releases that are refused.

    `width`, `height`, `frames`, `fps` and `steps` are what a request that leaves them out gets, 0: the model's own. The others
    bound what one request may ask for: SGLang's server does not publish what its pipelines can do. `inputs_max`: images that an edit may have.
    """

    python: str = ""
    args: tuple[str, ...] = ()
    allow_vulnerable: bool = False
    start_s: Annotated[float, msgspec.Meta(gt=0)] = 3600.0
    width: OrDefault = 0
    height: OrDefault = 0
    frames: OrDefault = 0
    fps: OrDefault = 0
    steps: OrDefault = 0
    steps_max: Count = 200
    side_multiple: Count = 16
    side_min: Count = 64
    side_max: Count = 2_048
    pixels_max: Count = 1_280 * 720
    frames_multiple: Count = 4
    seconds_max: Annotated[float, msgspec.Meta(gt=0)] = 10.0
    images_max: Count = 10
    inputs_max: Count = 1


# The engine.

RELEASES: Final = Releases(
    "SGLang", vulnerabilities=(SGLANG_DIFFUSION_BROKER,), flag="the option allow_vulnerable"
)

IMAGE_TASKS: Final[dict[str, tuple[Capability, ...]]] = {
    "T2I": ("image_generation",),
    "I2I": ("image_edits",),
    "TI2I": ("image_generation", "image_edits"),
}
"""What SGLang's tasks are here: an image from a text, from an image and a text, and both."""

POLL_S: Final = 0.25
"""Seconds between two queries about a video, or about a server that starts."""

ALIVE_S: Final = 5.0
"""Seconds between two reported steps without progress, as long as the server is healthy: SGLang reports no steps of an image, nor of decoding."""

_log = structlog.get_logger("headwater.sglang_diffusion")


class SglangDiffusionEngine(FileEngine):
    """SGLang's diffusion server as an `Engine`. `model` is what SGLang loads, a folder or a name; `name` is that of the model for clients."""

    name = "sglang_diffusion"
    packages: ClassVar[tuple[str, ...]] = ("httpx",)
    remark: ClassVar[str] = (
        "images or videos from text, and edits of images, by SGLang's diffusion server, which may be in another environment"
    )

    def __init__(self, model: str, name: str, context_length: int, options: SglangDiffusionOptions) -> None:
        super().__init__(name, context_length)
        self._options = options
        self._server = DiffusionServer(options.python, model, options.args)
        self._client: DiffusionClient | None = None
        self._works: set[asyncio.Task[None]] = set()

    async def start(self) -> EngineInfo:
        """See `Engine.start`."""
        client = self._client = DiffusionClient(self._server.url)
        await self._server.start()
        await self._wait_until_ready(client)
        model, defaults, options = await client.model(), self._server.defaults(), self._options
        version = await client.version()
        RELEASES.check(version, allow=options.allow_vulnerable)
        images = videos = None
        if "T2V" in model.supported_task_types:
            videos = _video_support(defaults, options)
            self.capabilities = self.capabilities | {"video_generation"}
        elif image_capabilities := {
            capability
            for task, capabilities in IMAGE_TASKS.items()
            if task in model.supported_task_types
            for capability in capabilities
        }:
            images = _image_support(defaults, options, edits="image_edits" in image_capabilities)
            self.capabilities = self.capabilities | image_capabilities
        else:
            tasks = ", ".join(model.supported_task_types) or "none"
            raise EngineUnavailable(
                f"SGLang's pipeline makes no images, and no videos from text; its tasks: {tasks}"
            )
        return self._info(version, images, videos)

    async def _wait_until_ready(self, client: DiffusionClient) -> None:
        try:
            async with asyncio.timeout(self._options.start_s):
                while not await client.is_healthy():
                    self._server.check()
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise EngineStartFailed(
                f"SGLang's diffusion server was not ready within {self._options.start_s:g} s (option start_s)"
            ) from None
        except EngineDied as error:
            raise EngineStartFailed(str(error)) from error

    async def generate_images(self, request: ImageRequest, emit: EmitFile) -> None:
        """See `Engine.generate_images`. There are no previews."""
        if request.need not in self.capabilities:
            self._reject(request.need)
        # SGLang ignores them.
        if request.mask is not None:
            raise RequestRejected("SGLang takes no mask", param="mask")
        if request.strength is not None:
            raise RequestRejected("SGLang takes no strength", param="strength")
        await self._run(request, emit, lambda report: self._images(request, report))

    async def generate_video(self, request: VideoRequest, emit: EmitFile) -> None:
        """See `Engine.generate_video`."""
        if "video_generation" not in self.capabilities:
            self._reject("video_generation")
        await self._run(request, emit, lambda report: self._video(request, report))

    async def _run(
        self, request: FileRequest, emit: EmitFile, work: Callable[[EmitFile], Awaitable[None]]
    ) -> None:
        """Run `work` when it is this request's turn, and to its end: also if its client has left."""
        active = True

        def report(step: FileStep) -> None:
            if active:
                emit(step)

        async def run() -> None:
            async with self._turns.turn(request.priority):
                if active:
                    await work(report)

        task = asyncio.create_task(run(), name=f"SGLang {request.request}")
        self._works.add(task)
        task.add_done_callback(self._works.discard)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            active = False
            task.add_done_callback(_look_at)
            raise

    async def _images(self, request: ImageRequest, report: EmitFile) -> None:
        assert self._client is not None
        for number in range(request.first, request.count):
            image = asyncio.ensure_future(self._client.generate_image(request, number))
            try:
                while not image.done():
                    await asyncio.wait({image}, timeout=ALIVE_S)
                    if not image.done() and await self._client.is_healthy():
                        report(FileStep(number, 0))
                data, path = image.result()
            finally:
                image.cancel()
                if request.images:
                    self._server.remove_inputs()
            self._server.remove_output(path)
            report(FileStep(number, request.steps, data))

    async def _video(self, request: VideoRequest, report: EmitFile) -> None:
        client = self._client
        assert client is not None
        loop = asyncio.get_running_loop()
        state = await client.create_video(request)
        done, reported_s = -1, 0.0
        try:
            while state.status not in ("completed", "failed"):
                steps = request.steps * min(state.progress, 99) // 100
                if state.status == "in_progress" and (steps > done or loop.time() - reported_s > ALIVE_S):
                    done, reported_s = steps, loop.time()
                    report(FileStep(0, steps))
                await asyncio.sleep(POLL_S)
                self._server.check()
                state = await client.video(state.id)
            if state.status == "failed":
                raise EngineError(f"SGLang: {(state.error or {}).get('message', 'the video failed')}")
            report(FileStep(0, request.steps, await client.video_file(state.id)))
        finally:
            await self._forget(client, state.id, state.file_path or "")

    async def _forget(self, client: DiffusionClient, id_: str, path: str) -> None:
        self._server.remove_output(path)
        try:
            await client.forget_video(id_)
        except EngineError as error:
            _log.warning("sglang_video_not_forgotten", reason=str(error))

    async def check(self) -> None:
        """See `Engine.check`."""
        self._server.check()
        if self._client is not None:
            try:
                await self._client.is_healthy()
            except EngineError as error:
                raise EngineDied(str(error)) from error

    async def stop(self) -> None:
        """See `Engine.stop`."""
        for task in list(self._works):
            task.cancel()
        await asyncio.gather(*self._works, return_exceptions=True)
        if self._client is not None:
            await self._client.close()
        await self._server.stop()


def _look_at(task: "asyncio.Task[None]") -> None:
    """Log the failure of a request that was cancelled: no client gets it."""
    if not task.cancelled() and task.exception() is not None:
        _log.info("sglang_cancelled_request_failed", reason=str(task.exception()))


def _side(value: int, options: SglangDiffusionOptions, default: int) -> int:
    side = value or default
    return min(options.side_max, max(options.side_min, side // options.side_multiple * options.side_multiple))


def _image_support(
    defaults: ModelDefaults, options: SglangDiffusionOptions, *, edits: bool
) -> ImageGenerationSupport:
    return ImageGenerationSupport(
        width=_side(options.width or defaults.width, options, 1_024),
        height=_side(options.height or defaults.height, options, 1_024),
        side_multiple=options.side_multiple,
        side_min=options.side_min,
        side_max=options.side_max,
        steps=min(options.steps or defaults.num_inference_steps or 50, options.steps_max),
        steps_max=options.steps_max,
        images_max=options.images_max,
        inputs_max=options.inputs_max if edits else 0,
    )


def _video_support(defaults: ModelDefaults, options: SglangDiffusionOptions) -> VideoGenerationSupport:
    width = _side(options.width or defaults.width, options, 832)
    height = _side(options.height or defaults.height, options, 480)
    fps, multiple = options.fps or defaults.fps or 24, options.frames_multiple
    frames_max = round(max(0.0, options.seconds_max * fps - 1) / multiple) * multiple + 1
    frames = (options.frames or defaults.num_frames or 81) - 1
    return VideoGenerationSupport(
        width=width,
        height=height,
        side_multiple=options.side_multiple,
        side_min=options.side_min,
        side_max=options.side_max,
        pixels_max=max(width * height, options.pixels_max),
        fps=fps,
        frames=min(frames // multiple * multiple + 1, frames_max),
        frames_multiple=multiple,
        frames_max=frames_max,
        steps=min(options.steps or defaults.num_inference_steps or 50, options.steps_max),
        steps_max=options.steps_max,
    )


class SglangDiffusionLauncher(PipelineLauncher):
    """See `EngineLauncher`."""

    releases = RELEASES

    def make(self, worker: WorkerSpec, files: ModelFiles) -> Engine:
        """See `EngineLauncher.make`."""
        folder = str(pipeline_folder(worker.model))
        options = read_options(self.options, SglangDiffusionOptions, self.entry.name)
        return SglangDiffusionEngine(folder, files.name, files.context_length, options)
