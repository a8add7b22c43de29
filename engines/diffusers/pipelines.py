"""Hugging Face's pipelines: images from text, edits of images, and videos. Everything here blocks."""

import inspect
import io
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec

from headwater.engines.engine import (
    EmitFile,
    EngineError,
    EngineUnavailable,
    FileStep,
    RequestRejected,
    start_failure,
)
from headwater.schemas.inference import FileRequest, ImageRequest, VideoRequest
from headwater.schemas.media import PromptMedia
from headwater.schemas.tables import ImageGenerationSupport, VideoGenerationSupport

Count = Annotated[int, msgspec.Meta(ge=1)]


class DiffusersOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`device` "": a GPU if there is one. `dtype` "auto": bfloat16 on a GPU, float32 on a CPU. `threads`
    on CPUs, 0: as many as torch chooses, which is too many for several workers on one machine. `steps` 0: the pipeline's default.

    `fps`: frames that videos show per second, 0: the pipeline's. Sides in pixels, `pixels_max` those of a video's frame.
    The others bound what one request may ask for.
    """

    device: str = ""
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    threads: Annotated[int, msgspec.Meta(ge=0)] = 0
    steps: Annotated[int, msgspec.Meta(ge=0)] = 0
    steps_max: Count = 200
    side_max: Count = 2_048
    images_max: Count = 10
    pixels_max: Count = 1_280 * 720
    seconds_max: Annotated[float, msgspec.Meta(gt=0)] = 10.0
    fps: Annotated[int, msgspec.Meta(ge=0)] = 0


# A pipeline loaded from a folder: what its parts say of the sizes and steps it can do.

NEEDED: Final = ("prompt", "height", "width", "num_inference_steps", "generator", "callback_on_step_end")
"""Arguments of a pipeline that generates images or a video of a size from a text, and can be stopped."""

SIDE_MIN: Final = 64
STEPS_DEFAULT: Final = 50
SEEDS: Final = 2**63

OnStep = Callable[[Any, int, Any, dict[str, Any]], dict[str, Any]]
"""What a pipeline calls after each denoising step, with itself, the step from 0, the timestep and tensors."""


class GenerationStopped(Exception):
    """No client waits for the result any more."""


class LoadedPipeline:
    """One loaded pipeline: `pipe`, and the `parameters` of its call."""

    def __init__(self, folder: Path, options: DiffusersOptions) -> None:
        """Raises `EngineUnavailable`."""
        try:
            import diffusers
            import torch
        except ImportError as error:
            raise EngineUnavailable(
                f"diffusers cannot be imported ({error}): install headwater[diffusers]"
            ) from error
        device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
        dtype = (
            (torch.bfloat16 if device.startswith("cuda") else torch.float32)
            if options.dtype == "auto"
            else getattr(torch, options.dtype)
        )
        try:
            # Weights in other formats than safetensors may contain code.
            library: Any = diffusers
            self.pipe: Any = library.DiffusionPipeline.from_pretrained(
                str(folder), dtype=dtype, local_files_only=True, use_safetensors=True
            ).to(device)
        except AttributeError as error:
            # Its own configuration names a class that this release does not have.
            raise EngineUnavailable(f"diffusers cannot load {folder}: {error}") from error
        except Exception as error:  # whatever it raises, nothing is loaded
            raise start_failure(f"diffusers cannot load {folder}", error) from error
        self.pipe.set_progress_bar_config(disable=True)
        if options.threads:
            torch.set_num_threads(options.threads)
        self.torch = torch
        self.parameters = inspect.signature(self.pipe.__call__).parameters
        missing = [name for name in NEEDED if name not in self.parameters]
        if missing:
            kind = type(self.pipe).__name__
            raise EngineUnavailable(
                f"{kind} is no pipeline for images or videos from text: it takes no {missing[0]}"
            )

    @property
    def generates_videos(self) -> bool:
        """True if the pipeline makes videos, not images."""
        return "num_frames" in self.parameters

    @property
    def scale(self) -> int:
        """Pixels per side of a latent."""
        return (
            self._number("vae_scale_factor_spatial", "vae_spatial_compression_ratio", "vae_scale_factor") or 8
        )

    @property
    def frames_multiple(self) -> int:
        """Frames of a latent."""
        return self._number("vae_scale_factor_temporal", "vae_temporal_compression_ratio") or 1

    @property
    def side_multiple(self) -> int:
        """What the sides of its results are multiples of: transformers read latents in patches of 2 × 2."""
        return self.scale * (2 if getattr(self.pipe, "transformer", None) is not None else 1)

    @property
    def side_min(self) -> int:
        """The smallest side."""
        return -(-SIDE_MIN // self.side_multiple) * self.side_multiple

    def default(self, name: str) -> int:
        """The default of a parameter of the pipeline's call, 0 if it has none."""
        parameter = self.parameters.get(name)
        return parameter.default if parameter is not None and isinstance(parameter.default, int) else 0

    def steps(self, options: DiffusersOptions) -> tuple[int, int]:
        """The default number of denoising steps, and the greatest.

        Schedulers reject more steps than the model was trained with, and count the first ones that they leave out.
        """
        config = getattr(self.pipe.scheduler, "config", None)
        trained = getattr(config, "num_train_timesteps", None)
        most = options.steps_max
        if isinstance(trained, int):
            most = min(most, trained - int(getattr(config, "steps_offset", 0) or 0))
        return min(options.steps or self.default("num_inference_steps") or STEPS_DEFAULT, most), most

    def check(self, request: FileRequest) -> None:
        """Raises `RequestRejected` for what this pipeline has no argument for."""
        if request.negative_prompt and "negative_prompt" not in self.parameters:
            raise RequestRejected("this model takes no negative prompt", param="negative_prompt")
        if request.guidance is not None and "guidance_scale" not in self.parameters:
            raise RequestRejected("this model takes no guidance scale", param="guidance_scale")

    def arguments(self, request: FileRequest, seed: int, on_step: OnStep) -> dict[str, Any]:
        """The arguments of a call for one image, or one video."""
        arguments: dict[str, Any] = {
            "prompt": request.prompt,
            "width": request.width,
            "height": request.height,
            "num_inference_steps": request.steps,
            # On the CPU: the same noise on every device.
            "generator": self.torch.Generator("cpu").manual_seed(seed % SEEDS),
            "callback_on_step_end": on_step,
        }
        if request.negative_prompt:
            arguments["negative_prompt"] = request.negative_prompt
        if request.guidance is not None:
            arguments["guidance_scale"] = request.guidance
        return arguments

    @contextmanager
    def failures(self, media_kind: str) -> Iterator[None]:
        """Ends quietly when the generation was stopped. Raises `EngineError` without memory for it."""
        try:
            yield
        except GenerationStopped:
            return
        except self.torch.OutOfMemoryError as error:
            raise EngineError(f"the device has too little memory for this {media_kind}: {error}") from error

    def _number(self, *names: str) -> int:
        """The first of these attributes of the pipeline, 0 if it has none."""
        return next((int(getattr(self.pipe, name)) for name in names if getattr(self.pipe, name, None)), 0)


# Edits of images, made of the parts of the pipeline that generates: nothing is in memory twice.

NEEDED_OF_EDITS: Final = ("prompt", "image", "num_inference_steps", "generator", "callback_on_step_end")
"""Arguments of a pipeline that changes an image as a text says, and can be stopped."""

MASK: Final = "mask_image"


class EditCall(NamedTuple):
    """A pipeline and its arguments. `source` and `mask`, None without one, are images of the result's size: what is not masked stays as it is."""

    pipe: Any
    arguments: dict[str, Any]
    source: Any
    mask: Any

    def finish(self, image: Any) -> Any:
        """The result of the call, with the pixels of the source where the mask says so: pipelines change all of them a little."""
        if self.mask is None:
            return image
        from PIL import Image

        return Image.composite(image.convert("RGB"), self.source, self.mask)


class EditPipelines:
    """`edit` changes a whole image, `inpaint` a part of it; None where diffusers has no such pipeline of these parts."""

    def __init__(self, loaded: LoadedPipeline) -> None:
        self._loaded = loaded
        # Some pipelines generate without an image, and change one that they are given.
        edit_pipe = loaded.pipe if "image" in loaded.parameters else None
        self.edit = edit_pipe or _made(loaded.pipe, "AutoPipelineForImage2Image", NEEDED_OF_EDITS)
        self.inpaint = _made(loaded.pipe, "AutoPipelineForInpainting", (*NEEDED_OF_EDITS, MASK))

    def call(self, request: ImageRequest, arguments: dict[str, Any]) -> EditCall:
        """Return what to call for an edit; `arguments` are those of an image from text. Raises `RequestRejected`."""
        pipe = self.edit if request.mask is None else self.inpaint
        if pipe is None:
            raise RequestRejected("this model changes no part of an image alone", param="mask")
        parameters = inspect.signature(pipe.__call__).parameters
        accepted = {name: value for name, value in arguments.items() if name in parameters}
        accepted["image"] = source = _picture(request.images[0], request)
        mask = None
        if request.mask is not None:
            accepted[MASK] = mask = _picture(request.mask, request)
        if request.strength is not None and "strength" not in parameters:
            raise RequestRejected("this model takes no strength", param="strength")
        if "strength" in parameters:
            strength = parameters["strength"].default if request.strength is None else request.strength
            if int(request.steps * strength) < 1:
                raise RequestRejected(
                    f"strength {strength:g} of {request.steps} steps is less than one step: raise one of them",
                    param="strength",
                )
            accepted["strength"] = strength
        return EditCall(pipe, accepted, source, mask)


def _made(pipe: Any, kind: str, needed: tuple[str, ...]) -> Any:
    """A pipeline of the same parts; None if diffusers knows none, or one that cannot be stopped."""
    import diffusers

    library: Any = diffusers
    try:
        pipeline = getattr(library, kind).from_pipe(pipe)
    except (ValueError, TypeError, AttributeError):
        return None
    parameters = inspect.signature(pipeline.__call__).parameters
    if any(name not in parameters for name in needed):
        return None
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _picture(item: PromptMedia, request: ImageRequest) -> Any:
    """An image of a request at the size of the result; a mask has one byte per pixel. Raises `RequestRejected`."""
    from PIL import Image

    height, width, channels = item.shape
    if len(item.data) != item.size:
        raise RequestRejected(f"an image of {item.size} bytes came with {len(item.data)}", param="image")
    size = (request.width, request.height)
    if channels == 1:
        # Partly transparent is changed too.
        mask = Image.frombytes("L", (width, height), item.data).resize(size, Image.Resampling.BOX)
        return mask.point(lambda value: 255 if value else 0)
    return Image.frombytes("RGB", (width, height), item.data).resize(size, Image.Resampling.LANCZOS)


# Images from text, and edits with the same parts, run step by step.

SIDE_DEFAULT: Final = 1_024
LATENT_DIMENSIONS: Final = 4
"""Dimensions of latents that the decoder takes as they are (image, channel, height, width); others have no previews."""


class ImagePipeline:
    """Generates and changes images with a loaded pipeline. `support` says which."""

    def __init__(self, loaded: LoadedPipeline, options: DiffusersOptions) -> None:
        self._loaded = loaded
        self._pipe = loaded.pipe
        self._edits = EditPipelines(loaded)
        self.support = self._supported(options)

    def _supported(self, options: DiffusersOptions) -> ImageGenerationSupport:
        pipe, loaded = self._pipe, self._loaded
        multiple = loaded.side_multiple
        model = getattr(pipe, "unet", None) or getattr(pipe, "transformer", None)
        latents = getattr(getattr(model, "config", None), "sample_size", None)
        side = latents * loaded.scale if isinstance(latents, int) else SIDE_DEFAULT
        smallest = loaded.side_min
        side = min(max(smallest, side // multiple * multiple), options.side_max)
        steps, steps_max = loaded.steps(options)
        return ImageGenerationSupport(
            width=side,
            height=side,
            side_multiple=multiple,
            side_min=smallest,
            side_max=max(side, options.side_max),
            steps=steps,
            steps_max=steps_max,
            images_max=options.images_max,
            inputs_max=1 if self._edits.edit is not None else 0,
            masks=self._edits.inpaint is not None,
        )

    def generate(self, request: ImageRequest, emit: EmitFile, stopped: threading.Event) -> None:
        """Generate the images one after the other; returns early once `stopped` is set.

        One at a time: the noise of each depends on its own seed only, and memory does not grow with their number.
        """
        with self._loaded.failures("image"):
            for number in range(request.first, request.count):
                emit(FileStep(number, request.steps, self._image(request, number, emit, stopped)))

    def _image(
        self,
        request: ImageRequest,
        number: int,
        emit: EmitFile,
        stopped: threading.Event,
    ) -> bytes:
        previews = _preview_steps(request)

        def on_step(_: Any, step: int, __: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            if stopped.is_set():
                raise GenerationStopped
            done = min(step + 1, request.steps)
            data = b""
            preview = previews.get(done, -1)
            if preview >= 0:
                data = self._preview(tensors.get("latents"), request)
            emit(FileStep(number, done, data, preview if data else -1))
            return {}

        if stopped.is_set():
            raise GenerationStopped
        arguments = self._loaded.arguments(request, request.seed + number, on_step)
        if not request.images:
            return _encoded(self._pipe(**arguments).images[0], request)
        edit = self._edits.call(request, arguments)
        return _encoded(edit.finish(edit.pipe(**edit.arguments).images[0]), request)

    def _preview(self, latents: Any, request: ImageRequest) -> bytes:
        """The image that these latents are by now; empty if the decoder does not take them as they are."""
        vae = getattr(self._pipe, "vae", None)
        if vae is None or latents is None or latents.ndim != LATENT_DIMENSIONS:
            return b""
        shift = getattr(vae.config, "shift_factor", None) or 0.0
        with self._loaded.torch.no_grad():
            decoded = vae.decode(
                latents.to(vae.dtype) / vae.config.scaling_factor + shift, return_dict=False
            )[0]
        return _encoded(self._pipe.image_processor.postprocess(decoded, output_type="pil")[0], request)


def _preview_steps(request: ImageRequest) -> dict[int, int]:
    """The steps after which there is a preview, evenly spread, each with its number."""
    count = min(request.previews, request.steps - 1)
    return {(number + 1) * request.steps // (count + 1): number for number in range(count)}


def _encoded(image: Any, request: ImageRequest) -> bytes:
    written = io.BytesIO()
    options = {} if request.format == "png" else {"quality": request.quality}
    image.convert("RGB").save(written, request.format.upper(), **options)
    return written.getvalue()


# Videos from text, run step by step.

QUALITY: Final = "18"
"""x264's constant rate factor: visually lossless."""


def encode_mp4(frames: Any, fps: int) -> bytes:
    """The file. `frames`: a numpy array (frames, height, width, 3) with values from 0 to 1; both sides are even."""
    import av
    import numpy as np

    pixels = np.rint(np.clip(np.asarray(frames), 0.0, 1.0) * 255.0).astype(np.uint8)
    _, height, width, _ = pixels.shape
    with tempfile.NamedTemporaryFile(suffix=".mp4") as written:
        # The index first, for which FFmpeg opens the file again: a player can begin before it has all of it.
        with av.open(written.name, "w", format="mp4", options={"movflags": "faststart"}) as container:
            stream = container.add_stream("libx264", rate=fps, options={"crf": QUALITY})
            stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
            for picture in pixels:
                container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
            container.mux(stream.encode())
        return Path(written.name).read_bytes()


FPS_DEFAULT: Final = 16
FRAMES_DEFAULT: Final = 81
WIDTH_DEFAULT: Final = 832
HEIGHT_DEFAULT: Final = 480
"""The height for pipelines that state none."""


class TextToVideo:
    """Generates videos with a loaded pipeline. `support` says which."""

    def __init__(self, loaded: LoadedPipeline, options: DiffusersOptions) -> None:
        self._loaded = loaded
        self.support = self._supported(options)

    def _supported(self, options: DiffusersOptions) -> VideoGenerationSupport:
        loaded = self._loaded
        multiple, smallest, frames_multiple = loaded.side_multiple, loaded.side_min, loaded.frames_multiple
        fps = options.fps or loaded.default("frame_rate") or FPS_DEFAULT
        steps, steps_max = loaded.steps(options)
        # As durations of requests are rounded: one of `seconds_max` is possible.
        frames_max = round(max(0.0, options.seconds_max * fps - 1) / frames_multiple) * frames_multiple + 1
        frames = loaded.default("num_frames") or FRAMES_DEFAULT
        frames = min(frames - 1, frames_max - 1) // frames_multiple * frames_multiple + 1
        width = max(smallest, (loaded.default("width") or WIDTH_DEFAULT) // multiple * multiple)
        height = max(smallest, (loaded.default("height") or HEIGHT_DEFAULT) // multiple * multiple)
        if width * height > options.pixels_max or max(width, height) > options.side_max:
            width = height = smallest
        return VideoGenerationSupport(
            width=width,
            height=height,
            side_multiple=multiple,
            side_min=smallest,
            side_max=max(width, height, options.side_max),
            pixels_max=max(width * height, options.pixels_max),
            fps=fps,
            frames=frames,
            frames_multiple=frames_multiple,
            frames_max=frames_max,
            steps=steps,
            steps_max=steps_max,
        )

    def generate(self, request: VideoRequest, emit: EmitFile, stopped: threading.Event) -> None:
        """Generate the video; returns early once `stopped` is set."""

        def on_step(_: Any, step: int, __: Any, ___: dict[str, Any]) -> dict[str, Any]:
            if stopped.is_set():
                raise GenerationStopped
            emit(FileStep(0, min(step + 1, request.steps)))
            return {}

        loaded = self._loaded
        with loaded.failures("video"):
            if stopped.is_set():
                raise GenerationStopped
            arguments = loaded.arguments(request, request.seed, on_step) | {"num_frames": request.frames}
            if "frame_rate" in loaded.parameters:
                arguments["frame_rate"] = request.fps
            if "output_type" in loaded.parameters:
                arguments["output_type"] = "np"
            frames = loaded.pipe(**arguments).frames[0]
            emit(FileStep(0, request.steps, encode_mp4(frames, request.fps)))
