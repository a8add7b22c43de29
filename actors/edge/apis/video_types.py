"""Wire types of `POST /v1/videos`: OpenAI's fields, and those of diffusion models. As JSON, or as a form."""

import re
import secrets
from typing import Annotated, Any, Final, cast

import msgspec

from headwater.actors.edge.apis.image_types import (
    Guidance,
    ImageCount,
    NegativePrompt,
    Prompt,
    Seed,
    sides,
)
from headwater.actors.edge.apis.openai.types import Priority
from headwater.actors.edge.saga.fields import UnsupportedFields, rejected
from headwater.actors.http.asgi import Headers
from headwater.actors.http.body import FORM, UploadForm, read_form
from headwater.actors.http.decoding import check_shape, decode_body, invalid_field
from headwater.actors.http.errors import bad_request
from headwater.schemas.messages.file_generation import VideoRequest
from headwater.schemas.tables import VideoGenerationSupport

_SECONDS: Final = re.compile(r"\d{1,4}(\.\d{1,3})?")


class VideoFields(UnsupportedFields, kw_only=True):
    """POST /v1/videos. `negative_prompt`, `seed`, `steps`, `guidance_scale` and `priority` are extensions."""

    model: str
    prompt: Prompt
    size: str | None = None
    seconds: str | int | float | None = None
    user: str | None = None
    safety_identifier: str | None = None
    negative_prompt: NegativePrompt | None = None
    seed: Seed | None = None
    steps: ImageCount | None = None
    guidance_scale: Guidance | None = None
    priority: Priority | None = None
    input_reference: Annotated[Any, rejected(reason="videos are generated from text alone; leave it out")] = (
        None
    )

    def order(self, support: VideoGenerationSupport, model: str) -> VideoRequest:
        """Return what a worker is to generate, without a name yet. Raises `ApiError` 400 for what the model cannot."""
        width, height = sides(self.size, support, model, "videos")
        if width * height > support.pixels_max:
            raise bad_request(
                f"size is {width}x{height}, {width * height} pixels; {model} generates at most {support.pixels_max} "
                "per frame.",
                param="size",
                code="invalid_size",
            )
        steps = self.steps or support.steps
        if steps > support.steps_max:
            raise bad_request(
                f"steps is {steps}; {model} computes at most {support.steps_max} per video.", param="steps"
            )
        return VideoRequest(
            request="",
            prompt=self.prompt,
            width=width,
            height=height,
            frames=self._frames(support, model),
            fps=support.fps,
            steps=steps,
            # Chosen here: another worker that begins again must begin with the same noise.
            seed=self.seed if self.seed is not None else secrets.randbits(32),
            negative_prompt=self.negative_prompt or "",
            guidance=self.guidance_scale,
            priority=self.priority or 0,
        )

    def _frames(self, support: VideoGenerationSupport, model: str) -> int:
        """The possible number of frames that is next to the duration. Raises `ApiError` 400."""
        if self.seconds is None:
            return support.frames
        given = str(self.seconds)
        wanted = float(given) * support.fps if _SECONDS.fullmatch(given) else 0.0
        frames = round(max(0.0, wanted - 1) / support.frames_multiple) * support.frames_multiple + 1
        if wanted <= 0 or frames > support.frames_max:
            longest = int(1000 * support.frames_max / support.fps) / 1000
            raise bad_request(
                f"{model} does not generate videos of this duration: give seconds above 0, and at most {longest:g}.",
                param="seconds",
                code="invalid_seconds",
            )
        return frames


_decoder = msgspec.json.Decoder(VideoFields)
_OWN: Final = frozenset(VideoFields.__annotations__)


async def decode_video(headers: Headers, body: bytes) -> VideoFields:
    """The fields of a body: a form if the content type says so, else JSON. Raises `ApiError` 400 naming the field."""
    content = next((value for name, value in headers if name == b"content-type"), b"")
    if content.lower().startswith(FORM.encode()):
        return _of_form(await read_form(headers, body))
    await check_shape(body)
    return cast(VideoFields, decode_body(_decoder, body))


def _of_form(form: UploadForm) -> VideoFields:
    values: dict[str, Any] = dict.fromkeys(form.files, True)
    for name, given in form.fields.items():
        if len(given) > 1:
            raise bad_request(f"{name[:64]} comes {len(given)} times.", param=name)
        # A field of an object, as clients flatten it.
        values[name.partition("[")[0]] = given[0]
    for name in values:
        if name not in _OWN:
            raise bad_request(f"{name[:64]} is not supported; leave it out.", param=name)
    try:
        return msgspec.convert(values, VideoFields, strict=False)
    except msgspec.ValidationError as error:
        raise invalid_field(error, VideoFields) from error
