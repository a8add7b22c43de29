"""POST /v1/images/generations and /v1/images/edits, and GET of the images that they stored at a URL.

Fields are OpenAI's, and those of diffusion models. The images of an edit's form are taken as the media intake decodes them.
"""

import asyncio
import base64
import math
import re
import secrets
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec
import structlog

from headwater.actors.edge.answer.jobs import FileGeneration, FileJob, FileUpdate, TakeUpdate
from headwater.actors.edge.apis.file_types import (
    FileFields,
    ImageCount,
    converted,
    form_values,
    own_fields,
    support_of,
)
from headwater.actors.edge.catalog import Model
from headwater.actors.edge.history import OBJECT_BYTES_MAX, TenantObjects
from headwater.actors.edge.prompt.media import fetch_counted
from headwater.actors.edge.saga.fields import rejected
from headwater.actors.edge.saga.http_call import Call, Endpoint, Serving, request_headers
from headwater.actors.http.asgi import WaitingStream, respond, server_sent
from headwater.actors.http.body import UploadForm, decode_body, read_form
from headwater.actors.http.errors import ApiError, bad_field, bad_request, overloaded
from headwater.actors.media.intake import MediaFetcher
from headwater.actors.media.item import MediaItem
from headwater.actors.media.request import MediaSource, MediaTarget
from headwater.schemas.inference import FINAL, ImageFormat, ImageRequest
from headwater.schemas.media import PromptMedia
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
                raise bad_field(name, "needs stream: true.")
        if self.output_compression is not None and self.output_format not in ("jpeg", "webp"):
            raise bad_field("output_compression", "is for output_format jpeg and webp.")

    def order(self, support: ImageGenerationSupport, model: str) -> ImageRequest:
        """Return what a worker is to generate, without a name yet. Raises `ApiError` 400 for what the model cannot."""
        common = self.common(support, model, "image")
        count = self.n or 1
        if count > support.images_max:
            raise bad_field(
                "n",
                f"is {count}; {model} generates at most {support.images_max} images per request.",
                code="n_too_large",
            )
        return ImageRequest(
            **common,
            count=count,
            format=self.output_format or "png",
            quality=90 if self.output_compression is None else self.output_compression,
            previews=self.partial_images or 0,
        )


IMAGE_EDITS: Final = "/v1/images/edits"
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
        fields["image"] = [f"{len(image)} bytes" for image in self.image]
        if self.mask is not None:
            fields["mask"] = f"{len(self.mask)} bytes"
        return msgspec.json.encode(fields)


_OWN: Final = own_fields(ImageEditForm)
_FILES: Final = ("image", "mask")


def decode_edit(form: UploadForm) -> ImageEditForm:
    """A form as its type. Raises `ApiError` 400 naming the field."""
    values = form_values(form.fields, _OWN, files=_FILES)
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
    uploads = [
        (MediaSource.from_bytes("image", data, f"image[{number}]" if several else "image"), MediaTarget())
        for number, data in enumerate(form.image)
    ]
    if form.mask is not None:
        uploads.append((MediaSource.from_bytes("image", form.mask, "mask"), MediaTarget(mask=True)))
    try:
        async with asyncio.TaskGroup() as group:
            loading = [
                group.create_task(fetch_counted(intake, *upload), name="image of an edit")
                for upload in uploads
            ]
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


def fitted(width: int, height: int, support: ImageGenerationSupport) -> tuple[int, int]:
    """The possible size that is next to an image's: of its shape, and with no more pixels than what the model generates by itself."""
    scale = min(1.0, math.sqrt(support.width * support.height / (width * height)))
    multiple = support.side_multiple

    def side(pixels: int) -> int:
        largest = support.side_max // multiple * multiple
        return min(largest, max(support.side_min, round(pixels * scale / multiple) * multiple))

    return side(width), side(height)


# Generated images at a URL: objects of their tenant in the store, for a time.

IMAGE_FILES: Final = "/v1/images/files/"

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
        return IMAGE_FILES + id_

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
        id_ = path.removeprefix(IMAGE_FILES)
        match = _ID.fullmatch(id_)
        stored = None
        if match is not None and self._objects is not None:
            try:
                stored = await self._objects.get(tenant, "image", id_)
            except ApiError as error:
                raise _unavailable(error) from error
        if match is None or stored is None:
            raise ApiError(
                404, "There is no such image, or it has expired: generate it again.", code="image_not_found"
            )
        return stored.data, b"image/" + match[1].encode()


def _unavailable(error: ApiError) -> ApiError:
    """The store's error, in the terms of this endpoint."""
    if error.status != 503:
        return error
    return overloaded("The store of images is not available; retry, or set response_format to b64_json.", 1.0)


# Generation's events as responses.


class ImagesEncoder(NamedTuple):
    """The responses of one images request. `tokens` are those of its prompt; `created_s` is in seconds of Unix time."""

    order: ImageRequest
    created_s: int
    tokens: int

    def response(self, images: list[dict[str, str]]) -> dict[str, Any]:
        """The whole response; each of `images` has its b64_json or its url."""
        return {
            "created": self.created_s,
            "background": "opaque",
            "data": images,
            "output_format": self.order.format,
            "size": self._size,
            "usage": self._usage,
            "seed": self.order.seed,
        }

    @property
    def _kind(self) -> str:
        """What the events are called by."""
        return "image_edit" if self.order.images else "image_generation"

    def event(self, update: FileUpdate) -> bytes:
        """The server-sent event of a step or a file."""
        if not update.data:
            return _event(
                {
                    "type": f"{self._kind}.progress",
                    "step": update.steps_done,
                    "steps": self.order.steps,
                }
            )
        common = {
            "b64_json": base64.b64encode(update.data).decode(),
            "background": "opaque",
            "created_at": self.created_s,
            "output_format": self.order.format,
            "quality": "auto",
            "size": self._size,
        }
        if update.preview != FINAL:
            return _event(
                {
                    "type": f"{self._kind}.partial_image",
                    "partial_image_index": update.preview,
                    **common,
                }
            )
        return _event(
            {"type": f"{self._kind}.completed", "usage": self._usage, "seed": self.order.seed, **common}
        )

    @property
    def _size(self) -> str:
        return f"{self.order.width}x{self.order.height}"

    @property
    def _usage(self) -> dict[str, Any]:
        return {
            "input_tokens": self.tokens,
            "input_tokens_details": {"text_tokens": self.tokens, "image_tokens": 0},
            "output_tokens": 0,
            "total_tokens": self.tokens,
        }


def error_event(document: dict[str, Any]) -> bytes:
    """A stream that has begun ends with this."""
    return _event({"type": "error", **document})


def _event(document: dict[str, Any]) -> bytes:
    return server_sent(document["type"].encode(), msgspec.json.encode(document))


# The endpoints.

VARIATIONS: Final = "/v1/images/variations"
"""OpenAI has it for one model only, dall-e-2."""


class ImagesApi:
    """The endpoints of generated images. `objects` None: there are no URLs."""

    def __init__(self, serving: Serving, objects: TenantObjects | None) -> None:
        self._serving = serving
        self._files = ImageFiles(objects)
        self.paths: dict[str, dict[str, Endpoint]] = {
            "/v1/images/generations": {"POST": self.generate},
            IMAGE_EDITS: {"POST": self.edit},
            f"({IMAGE_FILES}.*)": {"GET": self.get},
        }

    async def get(self, call: Call, path: str) -> None:
        """GET /v1/images/files/{id}."""
        data, kind = await self._files.get(call.principal.tenant, path)
        await respond(call.send, 200, data, [(b"cache-control", b"private, immutable")], kind)

    async def generate(self, call: Call) -> None:
        """POST /v1/images/generations."""
        request = decode_body(ImagesRequest, call.body)
        model = self._model_of(request, call)
        card = model.card
        support = support_of(card, "image_generation", card.image_generation, "generate images")
        order = request.order(support, card.name)
        call.quota.enter(card.name)
        await self._answer(call, model, request, order)

    async def edit(self, call: Call) -> None:
        """POST /v1/images/edits."""
        form = decode_edit(await read_form(call.headers, call.body))
        model = self._model_of(form, call)
        instead = ", or a model with the capability 'image_edits'"
        support = support_of(model.card, "image_edits", model.card.image_generation, "edit images", instead)
        form.check_inputs(support, model.card.name)
        order = form.order(support, model.card.name)
        call.quota.enter(model.card.name)
        inputs = await load_inputs(form, self._serving.intake_of(call))
        # The log of requests has the fields; images are no text.
        call = call._replace(body=form.logged)
        with self._serving.workers.media.hold(inputs.held):
            await self._answer(call, model, form, inputs.complete(order, form, support))

    def _model_of(self, request: ImagesRequest, call: Call) -> Model:
        """Raises `ApiError` for fields that are not supported, and for a model that is not there."""
        self._serving.fields.check(request)
        if request.response_format == "url":
            self._files.check_available()
        return self._serving.model(request.model, call)

    async def _answer(self, call: Call, model: Model, request: ImagesRequest, order: ImageRequest) -> None:
        tokens, hints = await request.routed(self._serving, call, model)
        ports = self._serving.workers.ports
        order = msgspec.structs.replace(order, request=f"img-{ports.ids()}")
        encoder = ImagesEncoder(order, ports.clock.wall_ns() // 1_000_000_000, tokens)
        job = FileJob(order, model.card.pool, tokens, hints)
        if request.stream:
            await self._stream(job, model, request, encoder, call)
            return
        encoded_images = await self._run(job, model, call, None, stream=False)
        paths: list[str | None] = [None] * len(encoded_images)
        if request.response_format == "url":
            paths = await self._files.put_all(call.principal.tenant, encoded_images, order.format)
        images: list[dict[str, str]] = []
        for data, path in zip(encoded_images, paths, strict=True):
            if path is not None:
                images.append({"url": _origin(call) + path})
            else:
                images.append({"b64_json": base64.b64encode(data).decode()})
            # Base64 of a large image takes milliseconds: streams wait for one at most.
            await asyncio.sleep(0)
        await call.answer(encoder.response(images), request_headers(order.request))

    async def _stream(
        self, job: FileJob, model: Model, request: ImagesRequest, encoder: ImagesEncoder, call: Call
    ) -> None:
        """Errors before the first event are responses of their own, later ones are events."""
        stream = WaitingStream(call.send, request_headers(job.order.request))

        async def take(update: FileUpdate) -> None:
            is_final = bool(update.data) and update.preview == FINAL
            if not is_final and (update.data or request.progress):
                await stream.write(encoder.event(update))

        try:
            [image] = await self._run(job, model, call, take, stream=True)
        except ApiError as error:
            if not stream.has_begun:
                raise
            await stream.write(error_event(error.document()), last=True)
            return
        await stream.write(encoder.event(FileUpdate(0, job.order.steps, image)), last=True)

    async def _run(
        self, job: FileJob, model: Model, call: Call, take: TakeUpdate | None, *, stream: bool
    ) -> list[bytes]:
        """Generate the images, unless the client disconnects. Raises `ApiError`, `ClientGone`."""
        serving = self._serving
        serving.require_open()
        call.quota.reserve(job.tokens, 0)
        record = serving.record(job.order.request, model, "images", call)
        record.accepted(job.tokens, job.order.count, call.body, stream=stream, flow=job.hints.flow)
        work = FileGeneration(serving.workers, job, take).run(record)
        return await serving.compute(call, record, job.tokens, work)


def variations_unsupported() -> ApiError:
    """Return the error for POST /v1/images/variations."""
    return ApiError(
        404,
        f"/v1/images/variations is not supported: no engine has it. Send the image to {IMAGE_EDITS} with a prompt that "
        "says what to vary, or with a low strength.",
        code="not_supported",
    )


def _origin(call: Call) -> str:
    """Scheme and host by which the client reached this edge, or the proxy in front of it."""
    headers = dict(call.headers)
    scheme = headers.get(b"x-forwarded-proto", b"").decode("latin-1").strip().lower()
    host = headers.get(b"host", b"").decode("latin-1")
    return f"{scheme if scheme in ('http', 'https') else call.scheme}://{host}"
