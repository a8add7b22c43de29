"""/v1/videos: create, get, list, download and delete video jobs.

Any edge answers for any job: what is shown is read from the jobs' table, and the file from the store. Fields are OpenAI's, and those of diffusion
models, as JSON or as a form.
"""

import asyncio
import re
import secrets
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Annotated, Any, Final

import msgspec

from headwater.actors.edge.apis.file_types import FileFields, converted, form_values, own_fields, support_of
from headwater.actors.edge.apis.video_jobs import (
    StoredJob,
    VideoBoard,
    VideoJob,
    VideoParts,
    VideoRunner,
    key_of,
)
from headwater.actors.edge.history import TenantObjects
from headwater.actors.edge.saga.fields import rejected
from headwater.actors.edge.saga.http_call import Call, Endpoint, Serving
from headwater.actors.edge.settings import VideoSettings
from headwater.actors.http.asgi import ClientGone, Disconnect, Headers, WaitingStream, respond, server_sent
from headwater.actors.http.body import FORM, UploadForm, check_shape, decode_body, read_form
from headwater.actors.http.errors import (
    ApiError,
    bad_field,
    bad_request,
    overloaded,
    page_of,
    page_request,
)
from headwater.events.ports import LogError
from headwater.schemas.inference import VideoRequest
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
            raise bad_field(
                "size",
                f"is {common['width']}x{common['height']}, {pixels} pixels; {model} generates at most "
                f"{support.pixels_max} per frame.",
                code="invalid_size",
            )
        return VideoRequest(**common, frames=self._frames(support, model), fps=support.fps)

    def _frames(self, support: VideoGenerationSupport, model: str) -> int:
        """The possible number of frames that is next to the duration. Raises `ApiError` 400."""
        if self.seconds is None:
            return support.frames
        seconds = str(self.seconds)
        requested_frames = float(seconds) * support.fps if _SECONDS.fullmatch(seconds) else 0.0
        frames = round(max(0.0, requested_frames - 1) / support.frames_multiple) * support.frames_multiple + 1
        if requested_frames <= 0 or frames > support.frames_max:
            longest = int(1000 * support.frames_max / support.fps) / 1000
            raise bad_request(
                f"{model} does not generate videos of this duration: give seconds above 0, and at most {longest:g}.",
                param="seconds",
                code="invalid_seconds",
            )
        return frames


_OWN: Final = own_fields(VideoFields)


async def decode_video(headers: Headers, body: bytes) -> VideoFields:
    """The fields of a body: a form if the content type says so, else JSON. Raises `ApiError` 400 naming the field."""
    content = next((value for name, value in headers if name == b"content-type"), b"")
    if content.lower().startswith(FORM.encode()):
        return _of_form(await read_form(headers, body))
    await check_shape(body)
    return decode_body(VideoFields, body)


def _of_form(form: UploadForm) -> VideoFields:
    fields: dict[str, list[Any]] = {name: [True] for name in form.files}
    # A field of an object, as clients flatten it.
    fields |= {name.partition("[")[0]: field_values for name, field_values in form.fields.items()}
    return converted(form_values(fields, _OWN), VideoFields)


def video_resource(job: VideoJob) -> dict[str, Any]:
    """The object of a job. `frames`, `fps` and `seed` are extensions."""
    request = job.request
    return {
        "id": job.id,
        "object": "video",
        "model": job.model,
        "status": job.status,
        "progress": job.progress,
        "created_at": job.created_s,
        "completed_at": job.completed_s if job.status == "completed" else None,
        "expires_at": job.expires_s or None,
        "prompt": request.prompt,
        "size": f"{request.width}x{request.height}",
        "seconds": job.seconds,
        "error": {"code": job.error_code, "message": job.error} if job.status == "failed" else None,
        "remixed_from_video_id": None,
        "frames": request.frames,
        "fps": request.fps,
        "seed": request.seed,
    }


def video_event(job: VideoJob) -> bytes:
    """The server-sent event of a job's present state."""
    kind = f"video.{job.status}"
    document = {"type": kind, "video": video_resource(job)}
    return server_sent(kind.encode(), msgspec.json.encode(document))


VIDEOS: Final = "/v1/videos"
STREAM_QUIET_S: Final = 15.0
"""Without a change for so long, a stream has a comment, so that no proxy closes it."""

JOBS_KEPT_MAX: Final = 1_000
"""Jobs of one tenant that have ended; of more, the oldest are deleted."""

_UNSUPPORTED: Final = re.compile(r"/v1/videos/(?:[^/]+/remix|edits|extensions|characters(?:/[^/]+)?)")


class VideosApi:
    """The endpoints. `runner` has the jobs generated."""

    def __init__(self, serving: Serving, objects: TenantObjects | None, settings: VideoSettings) -> None:
        ports = serving.workers.ports
        self._serving = serving
        self._settings = settings
        self._objects = objects
        self.board = VideoBoard(ports.videos)
        video = f"{VIDEOS}/(video_[0-9a-f]{{32}})"
        self.paths: dict[str, dict[str, Endpoint]] = {
            VIDEOS: {"POST": self.create, "GET": self.list},
            video: {"GET": self.get, "DELETE": self.delete},
            f"{video}/content": {"GET": self.content},
        }
        self.runner: VideoRunner | None = None
        if objects is not None:
            parts = VideoParts(
                serving.workers,
                serving.ledger,
                serving.settings.record_payloads,
                self.board,
                objects,
                settings.ttl_s,
            )
            self.runner = VideoRunner(parts)

    def loops(self) -> list[tuple[Coroutine[Any, Any, None], str]]:
        """Return what the owner runs, each with its name."""
        if self.runner is None:
            return []
        return [(self.board.run(), "video jobs"), (self.runner.run(), "videos")]

    async def release(self) -> None:
        """Give this edge's jobs to other edges."""
        if self.runner is not None:
            await self.runner.release()

    async def create(self, call: Call) -> None:
        """POST /v1/videos."""
        fields = await decode_video(call.headers, call.body)
        serving = self._serving
        serving.fields.check(fields)
        model = serving.model(fields.model, call)
        card = model.card
        support = support_of(card, "video_generation", card.video_generation, "generate videos")
        order = fields.order(support, card.name)
        runner = self._available()
        serving.require_open()
        call.quota.enter(card.name)
        tokens, hints = await fields.routed(serving, call, model)
        tenant = call.principal.tenant
        self._check_room(tenant)
        call.quota.reserve(tokens, 0)
        call.quota.settle(tokens)
        now_ns = serving.workers.ports.clock.wall_ns()
        name, epoch = runner.edge
        job = VideoJob(
            id=f"video_{secrets.token_hex(16)}",
            tenant=tenant,
            model=card.name,
            pool=card.pool,
            request=order,
            tokens=tokens,
            seconds=str(fields.seconds) if fields.seconds is not None else f"{order.frames / order.fps:g}",
            created_ns=now_ns,
            deadline_s=now_ns // 1_000_000_000 + self._settings.timeout_s,
            trace_context=call.trace,
            constraints=hints.constraints,
            preferences=hints.preferences,
            # A deadline for the first token means nothing to a job.
            flow=msgspec.structs.replace(hints.flow, deadline_ms=0),
            edge=name,
            edge_epoch=epoch,
            runs=1,
        )
        async with _stored():
            stored_job = await self.board.create(job)
            runner.start(stored_job)
            await self._forget_oldest(tenant)
        await call.answer(video_resource(job))

    async def list(self, call: Call) -> None:
        """GET /v1/videos: this tenant's jobs."""
        self._available()
        page = page_request(call.query)
        jobs = [video_resource(job) for job in self.board.of(call.principal.tenant)]
        await call.answer(page_of(jobs, page))

    async def get(self, call: Call, id_: str) -> None:
        """GET /v1/videos/{id}; `stream=true`: its changes as events, until it has ended."""
        self._available()
        stored = await self._job(call, id_)
        stream = call.asked.get("stream", "false")
        if stream not in ("true", "false"):
            raise bad_field("stream", "must be true or false.")
        if stream == "true":
            await self._stream(call, stored)
        else:
            await call.answer(video_resource(stored.job))

    async def content(self, call: Call, id_: str) -> None:
        """GET /v1/videos/{id}/content: the mp4 file."""
        self._available()
        variant = call.asked.get("variant", "video")
        if variant != "video":
            raise bad_field("variant", "must be video: there are no thumbnails or spritesheets.")
        job = (await self._job(call, id_)).job
        if job.status != "completed":
            why = f"failed: {job.error}" if job.status == "failed" else "is not completed yet"
            raise bad_request(f"The video {why}.", code="video_not_completed")
        assert self._objects is not None
        video = await self._objects.get(job.tenant, "video", id_)
        if video is None:
            raise ApiError(
                404,
                "The file of this video was discarded to make room for others: generate it again.",
                code="video_discarded",
            )
        headers = [
            (b"cache-control", b"private, immutable"),
            (b"content-disposition", f'attachment; filename="{id_}.mp4"'.encode()),
        ]
        await respond(call.send, 200, video.data, headers, b"video/mp4")

    async def delete(self, call: Call, id_: str) -> None:
        """DELETE /v1/videos/{id}: a job that has not ended is cancelled."""
        self._available()
        job = (await self._job(call, id_)).job
        async with _stored():
            await self.board.delete(job)
        assert self._objects is not None
        await self._objects.delete(job.tenant, "video", id_)
        await call.answer({"id": id_, "object": "video.deleted", "deleted": True})

    async def _stream(self, call: Call, stored: StoredJob) -> None:
        client, stream = Disconnect(call.receive), WaitingStream(call.send)
        shown: tuple[str, int] | None = None
        job = stored.job
        try:
            while True:
                if (job.status, job.progress) != shown:
                    shown = (job.status, job.progress)
                    await stream.write(video_event(job), last=job.has_ended)
                if job.has_ended:
                    return
                changed = asyncio.ensure_future(self.board.changed())
                try:
                    if await client.or_done(changed, STREAM_QUIET_S):
                        raise ClientGone
                    if not changed.done():
                        await stream.write(b": waiting\n\n")
                finally:
                    changed.cancel()
                current = self.board.find(key_of(job))
                if current is None:
                    gone = msgspec.json.encode({"type": "video.deleted", "id": job.id})
                    await stream.write(server_sent(b"video.deleted", gone), last=True)
                    return
                job = current.job
        finally:
            client.stop()

    def _available(self) -> VideoRunner:
        """Raises `ApiError` 400 if this edge stores nothing."""
        if self.runner is None:
            raise bad_request(
                "This server stores no videos: it runs with --responses store=false.", code="not_supported"
            )
        return self.runner

    async def _job(self, call: Call, id_: str) -> StoredJob:
        """Raises `ApiError` 404 for an id that this tenant has not (any more)."""
        async with _stored():
            stored = await self.board.get(call.principal.tenant, id_)
        if stored is None:
            raise no_video()
        return stored

    def _check_room(self, tenant: str) -> None:
        """Raises `ApiError` 429 if the tenant has as many jobs in flight as it may."""
        most = self._settings.jobs_max
        if most and sum(not job.has_ended for job in self.board.of(tenant)) >= most:
            raise ApiError(
                429,
                f"{most} videos are being generated already: wait for one, or delete it.",
                kind="rate_limit_error",
                code="video_jobs_limit",
                retry_after_s=10.0,
            )

    async def _forget_oldest(self, tenant: str) -> None:
        ended = [job for job in self.board.of(tenant) if job.has_ended]
        for job in ended[: max(0, len(ended) - JOBS_KEPT_MAX)]:
            await self.board.delete(job)


@asynccontextmanager
async def _stored() -> AsyncIterator[None]:
    """Raises `ApiError` 503 for a table that does not answer."""
    try:
        yield
    except LogError as error:
        raise overloaded("The store of videos is not available; retry.", 1.0) from error


def no_video(path: str = "") -> ApiError:
    """404 for a video that is not there, and for a `path` that is none of a video's."""
    if _UNSUPPORTED.fullmatch(path) is not None:
        return ApiError(
            404,
            f"{path[:200]} is not supported: videos are generated from text alone.",
            code="not_supported",
        )
    return ApiError(404, "There is no such video, or it has expired.", code="video_not_found")
