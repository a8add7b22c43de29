"""POST /v1/images/generations and /v1/images/edits, and GET of the images that they stored at a URL."""

import asyncio
import base64
from collections.abc import Awaitable, Callable
from typing import Any, Final, NamedTuple

import msgspec

from headwater.actors.edge.answer.files import FileGeneration, FileJob, FileUpdate, TakeUpdate
from headwater.actors.edge.apis.file_types import support_of
from headwater.actors.edge.apis.image_edits import PATH as EDITS
from headwater.actors.edge.apis.image_edits import ImageFiles, decode_edit, load_inputs
from headwater.actors.edge.apis.image_types import ImagesRequest, decode_images
from headwater.actors.edge.history import TenantObjects
from headwater.actors.edge.model.catalog import Model
from headwater.actors.edge.saga.context import Call, Serving
from headwater.actors.http.asgi import Headers, WaitingStream, respond
from headwater.actors.http.body import read_form
from headwater.actors.http.errors import ApiError
from headwater.schemas.messages.file_generation import FINAL, ImageRequest
from headwater.schemas.tables import ImageGenerationSupport, ModelCard


class ImagesEncoder(NamedTuple):
    """The responses of one images request. `tokens` are those of its prompt; `created_s` is in seconds of Unix time."""

    order: ImageRequest
    created_s: int
    tokens: int

    def response(self, images: list[dict[str, str]]) -> bytes:
        """The whole response; each of `images` has its b64_json or its url."""
        return msgspec.json.encode(
            {
                "created": self.created_s,
                "background": "opaque",
                "data": images,
                "output_format": self.order.format,
                "size": self._size,
                "usage": self._usage,
                "seed": self.order.seed,
            }
        )

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
    return b"event: %b\ndata: %b\n\n" % (document["type"].encode(), msgspec.json.encode(document))


# The endpoints.

VARIATIONS: Final = "/v1/images/variations"
"""OpenAI has it for one model only, dall-e-2."""


class ImagesApi:
    """The endpoints of generated images. `objects` None: there are no URLs."""

    def __init__(self, serving: Serving, objects: TenantObjects | None) -> None:
        self._serving = serving
        self._files = ImageFiles(objects)

    def find(self, path: str) -> Callable[[Call], Awaitable[None]]:
        """The endpoint of a GET of this path."""

        async def get(call: Call) -> None:
            data, kind = await self._files.get(call.principal.tenant, path)
            await respond(call.send, 200, data, [(b"cache-control", b"private, immutable")], kind)

        return get

    async def generate(self, call: Call) -> None:
        """POST /v1/images/generations."""
        request = decode_images(call.body)
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
        support = _edit_support(model.card)
        form.check_inputs(support, model.card.name)
        order = form.order(support, model.card.name)
        call.quota.enter(model.card.name)
        inputs = await load_inputs(form, self._serving.intake_of(call.headers, call.principal))
        # The log of requests has the fields; images are no text.
        call = call._replace(body=form.logged)
        with self._serving.workers.media.hold(inputs.held):
            await self._answer(call, model, form, inputs.complete(order, form, support))

    def _model_of(self, request: ImagesRequest, call: Call) -> Model:
        """Raises `ApiError` for fields that are not supported, and for a model that is not there."""
        self._serving.fields.check(request)
        if request.response_format == "url":
            self._files.check_available()
        return self._serving.model(request.model, call.principal)

    async def _answer(self, call: Call, model: Model, request: ImagesRequest, order: ImageRequest) -> None:
        tokens, hints = await request.routed(self._serving, call, model)
        ports = self._serving.workers.ports
        order = msgspec.structs.replace(order, request=f"img-{ports.ids()}")
        encoder = ImagesEncoder(order, ports.clock.wall_ns() // 1_000_000_000, tokens)
        job = FileJob(order, model.card.pool, tokens, hints)
        if request.stream:
            await self._stream(job, model, request, encoder, call)
            return
        made = await self._run(job, model, call, _take_nothing, stream=False)
        paths: list[str | None] = [None] * len(made)
        if request.response_format == "url":
            paths = await self._files.put_all(call.principal.tenant, made, order.format)
        images: list[dict[str, str]] = []
        for data, path in zip(made, paths, strict=True):
            if path is not None:
                images.append({"url": _origin(call) + path})
            else:
                images.append({"b64_json": base64.b64encode(data).decode()})
            # Base64 of a large image takes milliseconds: streams wait for one at most.
            await asyncio.sleep(0)
        await respond(call.send, 200, encoder.response(images), _headers(order.request))

    async def _stream(
        self, job: FileJob, model: Model, request: ImagesRequest, encoder: ImagesEncoder, call: Call
    ) -> None:
        """Errors before the first event are responses of their own, later ones are events."""
        stream = WaitingStream(call.send, _headers(job.order.request))

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
        self, job: FileJob, model: Model, call: Call, take: TakeUpdate, *, stream: bool
    ) -> list[bytes]:
        """Generate the images, unless the client disconnects. Raises `ApiError`, `ClientGone`."""
        serving = self._serving
        serving.require_open()
        call.quota.reserve(job.tokens, 0)
        record = serving.record(job.order.request, model, "images", call)
        record.accepted(job.tokens, job.order.count, call.body, stream=stream, flow=job.hints.flow)
        work = FileGeneration(serving.workers, job, take).run(record)
        return await serving.compute(call, record, job.tokens, work)


def _edit_support(card: ModelCard) -> ImageGenerationSupport:
    instead = ", or a model with the capability 'image_edits'"
    return support_of(card, "image_edits", card.image_generation, "edit images", instead)


def variations_unsupported() -> ApiError:
    """Return the error for POST /v1/images/variations."""
    return ApiError(
        404,
        f"/v1/images/variations is not supported: no engine has it. Send the image to {EDITS} with a prompt that "
        "says what to vary, or with a low strength.",
        code="not_supported",
    )


async def _take_nothing(_: FileUpdate) -> None:
    """A response that is no stream has its images at the end."""


def _origin(call: Call) -> str:
    """Scheme and host by which the client reached this edge, or the proxy in front of it."""
    headers = dict(call.headers)
    scheme = headers.get(b"x-forwarded-proto", b"").decode("latin-1").strip().lower()
    host = headers.get(b"host", b"").decode("latin-1")
    return f"{scheme if scheme in ('http', 'https') else call.scheme}://{host}"


def _headers(request: str) -> Headers:
    return [(b"x-request-id", request.encode())]
