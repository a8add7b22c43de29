"""The pipelines that change an image, made of the parts of the one that generates: nothing is in memory twice. Everything here blocks."""

import inspect
from typing import Any, Final, NamedTuple

from headwater.engines.diffusers.loaded import LoadedPipeline
from headwater.engines.engine import RequestRejected
from headwater.schemas.messages.file_generation import ImageRequest
from headwater.schemas.messages.media import PromptMedia

NEEDED: Final = ("prompt", "image", "num_inference_steps", "generator", "callback_on_step_end")
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
        own = loaded.pipe if "image" in loaded.parameters else None
        self.edit = own or _made(loaded.pipe, "AutoPipelineForImage2Image", NEEDED)
        self.inpaint = _made(loaded.pipe, "AutoPipelineForInpainting", (*NEEDED, MASK))

    def call(self, request: ImageRequest, arguments: dict[str, Any]) -> EditCall:
        """What to call for an edit; `arguments` are those of an image from text. Raises `RequestRejected`."""
        pipe = self.edit if request.mask is None else self.inpaint
        if pipe is None:
            raise RequestRejected("this model changes no part of an image alone", param="mask")
        parameters = inspect.signature(pipe.__call__).parameters
        found = {name: value for name, value in arguments.items() if name in parameters}
        found["image"] = source = _picture(request.images[0], request)
        mask = None
        if request.mask is not None:
            found[MASK] = mask = _picture(request.mask, request)
        if request.strength is not None and "strength" not in parameters:
            raise RequestRejected("this model takes no strength", param="strength")
        if "strength" in parameters:
            strength = parameters["strength"].default if request.strength is None else request.strength
            if int(request.steps * strength) < 1:
                raise RequestRejected(
                    f"strength {strength:g} of {request.steps} steps is less than one step: raise one of them",
                    param="strength",
                )
            found["strength"] = strength
        return EditCall(pipe, found, source, mask)


def _made(pipe: Any, kind: str, needed: tuple[str, ...]) -> Any:
    """A pipeline of the same parts; None if diffusers knows none, or one that cannot be stopped."""
    import diffusers

    library: Any = diffusers
    try:
        made = getattr(library, kind).from_pipe(pipe)
    except (ValueError, TypeError, AttributeError):
        return None
    parameters = inspect.signature(made.__call__).parameters
    if any(name not in parameters for name in needed):
        return None
    made.set_progress_bar_config(disable=True)
    return made


def _picture(item: PromptMedia, request: ImageRequest) -> Any:
    """An image of a request at the size of the result; a mask has one byte per pixel. Raises `RequestRejected`."""
    from PIL import Image

    height, width, channels = item.shape
    if len(item.data) != item.size:
        raise RequestRejected(f"an image of {item.size} bytes came with {len(item.data)}", param="image")
    size = (request.width, request.height)
    if channels == 1:
        # Partly transparent is changed too.
        whole = Image.frombytes("L", (width, height), item.data).resize(size, Image.Resampling.BOX)
        return whole.point(lambda value: 255 if value else 0)
    return Image.frombytes("RGB", (width, height), item.data).resize(size, Image.Resampling.LANCZOS)
