"""Wire types of `POST /v1/videos`: OpenAI's fields, and those of diffusion models. As JSON, or as a form."""

import re
from typing import Annotated, Any, Final, cast

import msgspec

from headwater.actors.edge.apis.file_types import FileFields, converted, form_values, own_fields
from headwater.actors.edge.saga.fields import rejected
from headwater.actors.http.asgi import Headers
from headwater.actors.http.body import FORM, UploadForm, read_form
from headwater.actors.http.decoding import check_shape, decode_body
from headwater.actors.http.errors import bad_request
from headwater.schemas.messages.file_generation import VideoRequest
from headwater.schemas.tables import VideoGenerationSupport

_SECONDS: Final = re.compile(r"\d{1,4}(\.\d{1,3})?")


class VideoFields(FileFields, kw_only=True):
    """POST /v1/videos."""

    seconds: str | int | float | None = None
    input_reference: Annotated[Any, rejected(reason="videos are generated from text alone; leave it out")] = (
        None
    )

    def order(self, support: VideoGenerationSupport, model: str) -> VideoRequest:
        """Return what a worker is to generate, without a name yet. Raises `ApiError` 400 for what the model cannot."""
        common = self.common(support, model, "video")
        pixels = common["width"] * common["height"]
        if pixels > support.pixels_max:
            raise bad_request(
                f"size is {common['width']}x{common['height']}, {pixels} pixels; {model} generates at most "
                f"{support.pixels_max} per frame.",
                param="size",
                code="invalid_size",
            )
        return VideoRequest(**common, frames=self._frames(support, model), fps=support.fps)

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
_OWN: Final = own_fields(VideoFields)


async def decode_video(headers: Headers, body: bytes) -> VideoFields:
    """The fields of a body: a form if the content type says so, else JSON. Raises `ApiError` 400 naming the field."""
    content = next((value for name, value in headers if name == b"content-type"), b"")
    if content.lower().startswith(FORM.encode()):
        return _of_form(await read_form(headers, body))
    await check_shape(body)
    return cast(VideoFields, decode_body(_decoder, body))


def _of_form(form: UploadForm) -> VideoFields:
    fields: dict[str, list[Any]] = {name: [True] for name in form.files}
    # A field of an object, as clients flatten it.
    fields |= {name.partition("[")[0]: given for name, given in form.fields.items()}
    return converted(form_values(fields, _OWN), VideoFields)
