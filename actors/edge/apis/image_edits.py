"""The form of `POST /v1/images/edits`, its images as the media intake decodes them, and the store of generated images."""

import asyncio
import math
import re
import secrets
from collections.abc import Sequence
from typing import Annotated, Any, Final, NamedTuple

import msgspec
import structlog

from headwater.actors import metrics
from headwater.actors.edge.apis.file_types import converted, form_values, own_fields
from headwater.actors.edge.apis.image_types import ImagesRequest
from headwater.actors.edge.history import OBJECT_BYTES_MAX, TenantObjects
from headwater.actors.edge.saga.fields import rejected
from headwater.actors.http.body import UploadForm
from headwater.actors.http.errors import ApiError, bad_request, overloaded
from headwater.actors.media.intake import MediaFetcher
from headwater.actors.media.item import MediaItem
from headwater.actors.media.request import MediaSource, MediaTarget
from headwater.schemas.messages.file_generation import ImageFormat, ImageRequest
from headwater.schemas.messages.media import PromptMedia
from headwater.schemas.tables import ImageGenerationSupport

PATH: Final = "/v1/images/edits"
UPLOADS_MAX: Final = 16
"""Images of one request, whatever the model takes: as OpenAI's servers."""

ImageFile = Annotated[bytes, msgspec.Meta(extra_json_schema={"contentEncoding": "binary"})]
Uploads = Annotated[list[ImageFile], msgspec.Meta(min_length=1, max_length=UPLOADS_MAX)]
Strength = Annotated[float, msgspec.Meta(gt=0.0, le=1.0)]


class ImageEditForm(ImagesRequest, kw_only=True):
    """POST /v1/images/edits: a form with one image or several, and what to make of them.

    `mask` is an image of the same size as the first one: where it is transparent, that one is changed. `strength` (how much is changed) is an
    extension, as are those of generations.
    """

    image: Uploads
    mask: ImageFile | None = None
    strength: Strength | None = None
    input_fidelity: Annotated[Any, rejected()] = None
    markup: Annotated[Any, rejected()] = None
    moderation: Annotated[Any, rejected()] = None

    def check_inputs(self, support: ImageGenerationSupport, model: str) -> None:
        """Raises `ApiError` 400 for more images than the model takes, and for a mask that it does not."""
        if len(self.image) > support.inputs_max:
            raise bad_request(
                f"There are {len(self.image)} images; {model} takes {support.inputs_max}.", param="image"
            )
        if self.mask is not None and not support.masks:
            raise bad_request(
                f"{model} takes no mask: leave it out, and say in the prompt what to change.", param="mask"
            )

    @property
    def logged(self) -> bytes:
        """The fields as JSON, without the files' contents."""
        fields = {name: getattr(self, name) for name in _OWN if getattr(self, name) is not None}
        fields["image"] = [f"{len(one)} bytes" for one in self.image]
        if self.mask is not None:
            fields["mask"] = f"{len(self.mask)} bytes"
        return msgspec.json.encode(fields)


_OWN: Final = own_fields(ImageEditForm)
_FILES: Final = ("image", "mask")


def decode_edit(form: UploadForm) -> ImageEditForm:
    """A form as its type. Raises `ApiError` 400 naming the field."""
    for name in _FILES:
        if name in form.fields:
            raise bad_request(
                f"{name} must be an uploaded file: a part of the form with a filename.", param=name
            )
    values = form_values(form.fields, _OWN)
    for name, files in form.files.items():
        if name not in _FILES:
            raise bad_request(
                f"The file {name[:64]!r} is not expected; images are 'image', a mask is 'mask'.", param=name
            )
        if name == "mask" and len(files) > 1:
            raise bad_request("There are several masks; the first image has one.", param=name)
        values[name] = files if name == "image" else files[0]
    if "image" not in values:
        raise bad_request("The form has no image.", param="image")
    return converted(values, ImageEditForm)


class EditInputs(NamedTuple):
    """The images of a request, decoded; its mask, if any, is the last of `items`."""

    items: tuple[MediaItem, ...]
    masked: bool

    @property
    def held(self) -> list[tuple[str, memoryview]]:
        """What workers fetch."""
        return [(item.id, item.data) for item in self.items]

    def complete(
        self, order: ImageRequest, form: ImageEditForm, support: ImageGenerationSupport
    ) -> ImageRequest:
        """The order with its images; of their size, unless the form names one."""
        media = [PromptMedia("image", item.id, 0, 0, item.shape) for item in self.items]
        images, mask = (media[:-1], media[-1]) if self.masked else (media, None)
        if form.size in (None, "auto"):
            high, wide, _ = images[0].shape
            width, height = fitted(wide, high, support)
            order = msgspec.structs.replace(order, width=width, height=height)
        return msgspec.structs.replace(order, images=tuple(images), mask=mask, strength=form.strength)


async def load_inputs(form: ImageEditForm, intake: MediaFetcher | None) -> EditInputs:
    """Decode the files, at the same time. Raises `ApiError` 400 for one that is no image, or too large, and for a mask of another size."""
    if intake is None:
        raise bad_request("This server decodes no media.", param="image")
    several = len(form.image) > 1
    wanted = [
        (data, f"image[{number}]" if several else "image", MediaTarget())
        for number, data in enumerate(form.image)
    ]
    if form.mask is not None:
        wanted.append((form.mask, "mask", MediaTarget(mask=True)))
    try:
        async with asyncio.TaskGroup() as group:
            loading = [group.create_task(_decode(intake, *one), name="image of an edit") for one in wanted]
    except ExceptionGroup as errors:
        # The first that failed ended the others.
        raise errors.exceptions[0] from None
    items = tuple([one.result() for one in loading])
    if form.mask is not None and items[-1].shape[:2] != items[0].shape[:2]:
        (height, width), (high, wide) = items[0].shape[:2], items[-1].shape[:2]
        raise bad_request(
            f"The mask has {wide} x {high} pixels, and the image {width} x {height}: they must be of the same size.",
            param="mask",
        )
    return EditInputs(items, form.mask is not None)


async def _decode(intake: MediaFetcher, data: bytes, param: str, target: MediaTarget) -> MediaItem:
    outcome = "cancelled"
    try:
        with metrics.MEDIA_SECONDS.labels("image").time():
            item = await intake.fetch(MediaSource.from_bytes("image", data, param), target=target)
        outcome = "ok"
    except ApiError as error:
        outcome = error.code or "error"
        raise
    finally:
        metrics.MEDIA.labels("image", outcome).inc()
    return item


def fitted(width: int, height: int, support: ImageGenerationSupport) -> tuple[int, int]:
    """The possible size that is next to an image's: of its shape, and with no more pixels than what the model generates by itself."""
    scale = min(1.0, math.sqrt(support.width * support.height / (width * height)))
    multiple = support.side_multiple

    def side(pixels: int) -> int:
        largest = support.side_max // multiple * multiple
        return min(largest, max(support.side_min, round(pixels * scale / multiple) * multiple))

    return side(width), side(height)


# Generated images at a URL: objects of their tenant in the store, for a time.

FILES_PATH: Final = "/v1/images/files/"

PAUSES_S: Final = (0.2, 1.0)
"""The pause before another attempt to store an image."""

STORE_S_MAX: Final = 15.0
"""The time limit for all images of a request, as their client waits."""

_log = structlog.get_logger("headwater.images")

_ID: Final = re.compile(r"img_[0-9a-f]{32}\.(png|jpeg|webp)")


class ImageFiles:
    """The images of all tenants. An id names its format, and nothing of another tenant's."""

    def __init__(self, objects: TenantObjects | None) -> None:
        self._objects = objects

    def check_available(self) -> None:
        """Raises `ApiError` 400 if this edge stores nothing."""
        if self._objects is None:
            raise bad_request(
                "This server stores no images: set response_format to b64_json.", param="response_format"
            )

    async def put(self, tenant: str, data: bytes, format_: ImageFormat) -> str:
        """Store an image; returns the path of its URL. Raises `ApiError`."""
        self.check_available()
        assert self._objects is not None
        if len(data) > OBJECT_BYTES_MAX:
            raise bad_request(
                f"An image has {len(data)} bytes, and one at a URL at most {OBJECT_BYTES_MAX}: set response_format to "
                "b64_json, or output_format to jpeg.",
                param="response_format",
                code="image_too_large",
            )
        id_ = f"img_{secrets.token_hex(16)}.{format_}"
        try:
            await self._objects.put(tenant, "image", id_, data)
        except ApiError as error:
            raise _unavailable(error) from error
        return FILES_PATH + id_

    async def put_all(self, tenant: str, images: Sequence[bytes], format_: ImageFormat) -> list[str | None]:
        """Paths of their URLs; None for an image that the store did not take after some attempts, or has no room for.

        An image took seconds of a GPU: its client gets it with the response then, rather than an error to repeat.
        """
        paths: list[str | None] = []
        try:
            async with asyncio.timeout(STORE_S_MAX):
                for data in images:
                    paths.append(await self._put_again(tenant, data, format_, attempts=None not in paths))
        except TimeoutError:
            _log.warning("images_not_stored", images=len(images) - len(paths), reason="no answer in time")
        return paths + [None] * (len(images) - len(paths))

    async def _put_again(
        self, tenant: str, data: bytes, format_: ImageFormat, *, attempts: bool
    ) -> str | None:
        """Store an image, with further `attempts` if the store fails. None if it is not stored."""
        for pause_s in (*(PAUSES_S if attempts else ()), None):
            try:
                return await self.put(tenant, data, format_)
            except ApiError as error:
                if pause_s is None or error.status != 503:
                    _log.warning("images_not_stored", images=1, reason=str(error))
                    return None
                await asyncio.sleep(pause_s)
        raise AssertionError("the last attempt returns")

    async def get(self, tenant: str, path: str) -> tuple[bytes, bytes]:
        """An image and its media type. Raises `ApiError` 404 if this tenant has none there (any more)."""
        id_ = path.removeprefix(FILES_PATH)
        match = _ID.fullmatch(id_)
        found = None
        if match is not None and self._objects is not None:
            try:
                found = await self._objects.get(tenant, "image", id_)
            except ApiError as error:
                raise _unavailable(error) from error
        if match is None or found is None:
            raise ApiError(
                404, "There is no such image, or it has expired: generate it again.", code="image_not_found"
            )
        return found.data, b"image/" + match[1].encode()


def _unavailable(error: ApiError) -> ApiError:
    """The store's error, in the terms of this endpoint."""
    if error.status != 503:
        return error
    return overloaded("The store of images is not available; retry, or set response_format to b64_json.", 1.0)
