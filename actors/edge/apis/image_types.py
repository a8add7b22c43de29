"""Wire types of `POST /v1/images/generations`: OpenAI's fields, and those of diffusion models."""

from typing import Annotated, Any, Literal, cast

import msgspec

from headwater.actors.edge.apis.file_types import FileFields, ImageCount
from headwater.actors.edge.saga.fields import rejected
from headwater.actors.http.decoding import decode_body
from headwater.actors.http.errors import bad_request
from headwater.schemas.messages.file_generation import ImageFormat, ImageRequest
from headwater.schemas.tables import ImageGenerationSupport

Compression = Annotated[int, msgspec.Meta(ge=0, le=100)]
Previews = Annotated[int, msgspec.Meta(ge=0, le=3)]


class ImagesRequest(FileFields, kw_only=True):
    """POST /v1/images/generations. `progress` (an event per step) is an extension, as are those of `FileFields`."""

    n: ImageCount | None = None
    response_format: Literal["b64_json", "url"] | None = None
    output_format: ImageFormat | None = None
    output_compression: Compression | None = None
    stream: bool | None = None
    partial_images: Previews | None = None
    progress: bool | None = None
    background: Annotated[Any, rejected("auto", "opaque")] = None
    quality: Annotated[Any, rejected("auto", "standard")] = None
    style: Annotated[Any, rejected()] = None
    complexity: Annotated[Any, rejected()] = None
    frame_count: Annotated[Any, rejected()] = None
    frame_duration_ms: Annotated[Any, rejected()] = None
    svg: Annotated[Any, rejected()] = None

    def refuse_unsupported(self) -> None:
        """See `UnsupportedFields.refuse_unsupported`."""
        super().refuse_unsupported()
        if self.stream:
            if (self.n or 1) > 1:
                raise bad_request("A stream has one image: set n to 1, or stream to false.", param="n")
            if self.response_format == "url":
                raise bad_request(
                    "A stream has its images inline: set response_format to b64_json.",
                    param="response_format",
                )
        for name in ("partial_images", "progress"):
            if getattr(self, name) and not self.stream:
                raise bad_request(f"{name} needs stream: true.", param=name)
        if self.output_compression is not None and self.output_format not in ("jpeg", "webp"):
            raise bad_request(
                "output_compression is for output_format jpeg and webp.", param="output_compression"
            )

    def order(self, support: ImageGenerationSupport, model: str) -> ImageRequest:
        """Return what a worker is to generate, without a name yet. Raises `ApiError` 400 for what the model cannot."""
        common = self.common(support, model, "image")
        count = self.n or 1
        if count > support.images_max:
            raise bad_request(
                f"n is {count}; {model} generates at most {support.images_max} images per request.",
                param="n",
                code="n_too_large",
            )
        return ImageRequest(
            **common,
            count=count,
            format=self.output_format or "png",
            quality=90 if self.output_compression is None else self.output_compression,
            previews=self.partial_images or 0,
        )


_decoder = msgspec.json.Decoder(ImagesRequest)


def decode_images(body: bytes) -> ImagesRequest:
    """Raises `ApiError` 400 naming the field."""
    return cast(ImagesRequest, decode_body(_decoder, body))
