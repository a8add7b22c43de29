"""A text-to-image pipeline of diffusers, and those that change images with its parts, run step by step. Everything here blocks."""

import io
import threading
from typing import Any, Final

from headwater.engines.diffusers.edit_pipelines import EditPipelines
from headwater.engines.diffusers.loaded import GenerationStopped, LoadedPipeline
from headwater.engines.diffusers.options import DiffusersOptions
from headwater.engines.engine import EmitFile, FileStep
from headwater.schemas.messages.file_generation import ImageRequest
from headwater.schemas.tables.card import ImageGenerationSupport

SIDE_DEFAULT: Final = 1_024
LATENT_DIMENSIONS: Final = 4
"""Of latents that the decoder takes as they are (image, channel, height, width); others have no previews."""


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
