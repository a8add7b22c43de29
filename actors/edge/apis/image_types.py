"""Wire types of `POST /v1/images/generations`: OpenAI's fields, and those of diffusion models."""

import re
import secrets
from typing import Annotated, Any, Final, Literal, cast

import msgspec

from headwater.actors.edge.apis.openai.types import Priority
from headwater.actors.edge.saga.fields import UnsupportedFields, rejected
from headwater.actors.http.decoding import decode_body
from headwater.actors.http.errors import bad_request
from headwater.schemas.messages.file_generation import ImageFormat, ImageRequest
from headwater.schemas.tables import ImageGenerationSupport, VideoGenerationSupport

PROMPT_CHARACTERS_MAX: Final = 32_000
"""The limit of OpenAI's servers."""

_SIZE: Final = re.compile(r"([1-9]\d{0,4})x([1-9]\d{0,4})")

Prompt = Annotated[str, msgspec.Meta(min_length=1, max_length=PROMPT_CHARACTERS_MAX)]
NegativePrompt = Annotated[str, msgspec.Meta(max_length=PROMPT_CHARACTERS_MAX)]
ImageCount = Annotated[int, msgspec.Meta(ge=1)]
Seed = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Guidance = Annotated[float, msgspec.Meta(ge=0.0, le=100.0)]
Compression = Annotated[int, msgspec.Meta(ge=0, le=100)]
Previews = Annotated[int, msgspec.Meta(ge=0, le=3)]


class ImagesRequest(UnsupportedFields, kw_only=True):
    """POST /v1/images/generations.

    `negative_prompt`, `seed`, `steps`, `guidance_scale`, `priority` and `progress` (an event per step) are extensions.
    """

    model: str
    prompt: Prompt
    n: ImageCount | None = None
    size: str | None = None
    response_format: Literal["b64_json", "url"] | None = None
    output_format: ImageFormat | None = None
    output_compression: Compression | None = None
    stream: bool | None = None
    partial_images: Previews | None = None
    user: str | None = None
    safety_identifier: str | None = None
    negative_prompt: NegativePrompt | None = None
    seed: Seed | None = None
    steps: ImageCount | None = None
    guidance_scale: Guidance | None = None
    priority: Priority | None = None
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
        width, height = sides(self.size, support, model)
        count, steps = self.n or 1, self.steps or support.steps
        if count > support.images_max:
            raise bad_request(
                f"n is {count}; {model} generates at most {support.images_max} images per request.",
                param="n",
                code="n_too_large",
            )
        if steps > support.steps_max:
            raise bad_request(
                f"steps is {steps}; {model} computes at most {support.steps_max} per image.", param="steps"
            )
        return ImageRequest(
            request="",
            prompt=self.prompt,
            width=width,
            height=height,
            steps=steps,
            # Chosen here: a worker that continues after another one must begin with the same noise.
            seed=self.seed if self.seed is not None else secrets.randbits(32),
            count=count,
            negative_prompt=self.negative_prompt or "",
            guidance=self.guidance_scale,
            format=self.output_format or "png",
            quality=90 if self.output_compression is None else self.output_compression,
            previews=self.partial_images or 0,
            priority=self.priority or 0,
        )


def sides(
    size: str | None,
    support: ImageGenerationSupport | VideoGenerationSupport,
    model: str,
    what: str = "images",
) -> tuple[int, int]:
    """Width and height. Raises `ApiError` 400 that says which sizes the model has."""
    if size is None or size == "auto":
        return support.width, support.height
    match = _SIZE.fullmatch(size)
    if match is not None:
        given = int(match[1]), int(match[2])
        if all(
            support.side_min <= side <= support.side_max and side % support.side_multiple == 0
            for side in given
        ):
            return given
    raise bad_request(
        f"{model} does not generate {what} of this size: give auto, or WIDTHxHEIGHT with sides from {support.side_min} "
        f"to {support.side_max} pixels that are multiples of {support.side_multiple}.",
        param="size",
        code="invalid_size",
    )


_decoder = msgspec.json.Decoder(ImagesRequest)


def decode_images(body: bytes) -> ImagesRequest:
    """Raises `ApiError` 400 naming the field."""
    return cast(ImagesRequest, decode_body(_decoder, body))
