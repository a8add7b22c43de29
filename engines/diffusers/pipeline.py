"""A text-to-image pipeline of diffusers: loaded from a folder, and run step by step. Everything here blocks."""

import inspect
import io
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import structlog

from headwater.engines.diffusers.options import DiffusersOptions
from headwater.engines.engine import EngineError, EngineUnavailable, ImageStep, RequestRejected
from headwater.schemas.messages.image_generation import ImageRequest
from headwater.schemas.tables.card import ImageGenerationSupport

NEEDED: Final = ("prompt", "height", "width", "num_inference_steps", "generator", "callback_on_step_end")
"""Arguments of a pipeline that generates images of a size from a text, and can be stopped."""

SIDE_MIN: Final = 64
SIDE_DEFAULT: Final = 1_024
STEPS_DEFAULT: Final = 50
SEEDS: Final = 2**63
LATENT_DIMENSIONS: Final = 4
"""Of latents that the decoder takes as they are (image, channel, height, width); others have no previews."""

_log = structlog.get_logger("headwater.diffusers")


class _ImageStopped(Exception):
    """No client waits for the image any more."""


class TextToImage:
    """One loaded pipeline. `support` says what it generates."""

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
            self._pipe: Any = library.DiffusionPipeline.from_pretrained(
                str(folder), dtype=dtype, local_files_only=True, use_safetensors=True
            ).to(device)
        except (OSError, ValueError, RuntimeError, AttributeError, ImportError) as error:
            raise EngineUnavailable(f"diffusers cannot load {folder}: {error}") from error
        self._pipe.set_progress_bar_config(disable=True)
        if options.threads:
            torch.set_num_threads(options.threads)
        self._torch = torch
        self._arguments = inspect.signature(self._pipe.__call__).parameters
        missing = [name for name in NEEDED if name not in self._arguments]
        if missing:
            kind = type(self._pipe).__name__
            raise EngineUnavailable(f"{kind} is no pipeline for images from text: it takes no {missing[0]}")
        self.support = self._supported(options)

    def _supported(self, options: DiffusersOptions) -> ImageGenerationSupport:
        pipe = self._pipe
        scale = int(getattr(pipe, "vae_scale_factor", 8))
        # Transformers read latents in patches of 2 × 2.
        multiple = scale * (2 if getattr(pipe, "transformer", None) is not None else 1)
        model = getattr(pipe, "unet", None) or getattr(pipe, "transformer", None)
        latents = getattr(getattr(model, "config", None), "sample_size", None)
        side = latents * scale if isinstance(latents, int) else SIDE_DEFAULT
        smallest = -(-SIDE_MIN // multiple) * multiple
        side = min(max(smallest, side // multiple * multiple), options.side_max)
        # Schedulers reject more steps than the model was trained with, and count the first ones that they leave out.
        config = getattr(pipe.scheduler, "config", None)
        trained = getattr(config, "num_train_timesteps", None)
        steps_max = options.steps_max
        if isinstance(trained, int):
            steps_max = min(steps_max, trained - int(getattr(config, "steps_offset", 0) or 0))
        default = self._arguments["num_inference_steps"].default
        steps = options.steps or (default if isinstance(default, int) else STEPS_DEFAULT)
        return ImageGenerationSupport(
            width=side,
            height=side,
            side_multiple=multiple,
            side_min=smallest,
            side_max=max(side, options.side_max),
            steps=min(steps, steps_max),
            steps_max=steps_max,
            images_max=options.images_max,
        )

    def check(self, request: ImageRequest) -> None:
        """Raises `RequestRejected` for what this pipeline has no argument for."""
        if request.negative_prompt and "negative_prompt" not in self._arguments:
            raise RequestRejected("this model takes no negative prompt", param="negative_prompt")
        if request.guidance is not None and "guidance_scale" not in self._arguments:
            raise RequestRejected("this model takes no guidance scale", param="guidance_scale")

    def generate(
        self, request: ImageRequest, emit: Callable[[ImageStep], None], stopped: threading.Event
    ) -> None:
        """Generate the images one after the other; returns early once `stopped` is set.

        One at a time: the noise of each depends on its own seed only, and memory does not grow with their number.
        """
        try:
            for number in range(request.first, request.count):
                emit(ImageStep(number, request.steps, self._image(request, number, emit, stopped)))
        except _ImageStopped:
            return
        except self._torch.OutOfMemoryError as error:
            raise EngineError(f"the device has too little memory for this image: {error}") from error

    def _image(
        self,
        request: ImageRequest,
        number: int,
        emit: Callable[[ImageStep], None],
        stopped: threading.Event,
    ) -> bytes:
        previews = _preview_steps(request)

        def on_step(_: Any, step: int, __: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            if stopped.is_set():
                raise _ImageStopped
            done = min(step + 1, request.steps)
            data = b""
            preview = previews.get(done, -1)
            if preview >= 0:
                data = self._preview(tensors.get("latents"), request)
            emit(ImageStep(number, done, data, preview if data else -1))
            return {}

        if stopped.is_set():
            raise _ImageStopped
        arguments: dict[str, Any] = {
            "prompt": request.prompt,
            "width": request.width,
            "height": request.height,
            "num_inference_steps": request.steps,
            # On the CPU: the same noise on every device.
            "generator": self._torch.Generator("cpu").manual_seed((request.seed + number) % SEEDS),
            "callback_on_step_end": on_step,
        }
        if request.negative_prompt:
            arguments["negative_prompt"] = request.negative_prompt
        if request.guidance is not None:
            arguments["guidance_scale"] = request.guidance
        return _encoded(self._pipe(**arguments).images[0], request)

    def _preview(self, latents: Any, request: ImageRequest) -> bytes:
        """The image that these latents are by now; empty if the decoder does not take them as they are."""
        vae = getattr(self._pipe, "vae", None)
        if vae is None or latents is None or latents.ndim != LATENT_DIMENSIONS:
            return b""
        shift = getattr(vae.config, "shift_factor", None) or 0.0
        with self._torch.no_grad():
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
