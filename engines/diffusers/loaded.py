"""A pipeline of diffusers, loaded from a folder: what its parts say of the sizes and steps it can do. Everything here blocks."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from headwater.engines.diffusers.options import DiffusersOptions
from headwater.engines.engine import (
    EngineError,
    EngineUnavailable,
    RequestRejected,
    start_failure,
)
from headwater.schemas.messages.file_generation import FileRequest

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
        """Whether the pipeline makes videos, not images."""
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
        found: dict[str, Any] = {
            "prompt": request.prompt,
            "width": request.width,
            "height": request.height,
            "num_inference_steps": request.steps,
            # On the CPU: the same noise on every device.
            "generator": self.torch.Generator("cpu").manual_seed(seed % SEEDS),
            "callback_on_step_end": on_step,
        }
        if request.negative_prompt:
            found["negative_prompt"] = request.negative_prompt
        if request.guidance is not None:
            found["guidance_scale"] = request.guidance
        return found

    @contextmanager
    def failures(self, what: str) -> Iterator[None]:
        """Ends quietly when the generation was stopped. Raises `EngineError` without memory for it."""
        try:
            yield
        except GenerationStopped:
            return
        except self.torch.OutOfMemoryError as error:
            raise EngineError(f"the device has too little memory for this {what}: {error}") from error

    def _number(self, *names: str) -> int:
        """The first of these attributes of the pipeline, 0 if it has none."""
        return next((int(getattr(self.pipe, name)) for name in names if getattr(self.pipe, name, None)), 0)
