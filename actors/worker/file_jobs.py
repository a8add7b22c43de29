"""Files to generate, images or videos: requests that take seconds to hours, whose results are kept until their edge has fetched them.

A video is a job that any edge may follow: it is cancelled once no edge has asked for it for `ABANDONED_S`, whichever edge sent it. Images
end with the edge that waits for them (see `OrphanWatch`); those of an edge that does not answer for them end like videos.
"""

import asyncio
from collections.abc import Sequence
from typing import Final

import msgspec
import structlog

from headwater.actors.bus import Bus, BusError, Message
from headwater.actors.runtime.actor import Spawn
from headwater.actors.worker.handoffs import RequestsByEdge, by_edge
from headwater.actors.worker.inflight import Inflight, WorkerStatus
from headwater.actors.worker.media import MediaCache, MediaMissing
from headwater.actors.worker.requests import ABORTED, refusal_of
from headwater.engines.engine import Engine, FileStep, NotSupported
from headwater.schemas.clock import Clock
from headwater.schemas.messages.file_generation import (
    FINAL,
    PIECE_BYTES,
    STATE_WAIT_S,
    FileMessage,
    FilePiece,
    FilePieceQuery,
    FileRequest,
    FileState,
    FileStateQuery,
    GeneratedFile,
    ImageRequest,
    VideoRequest,
)
from headwater.schemas.messages.inference import Accepted, Cancel, Refused

ACTIVE_MAX: Final = 64
"""Requests at once; one more is refused, and its edge tries another worker."""

ABANDONED_S: Final = 30.0
"""A request whose edge asked nothing for this long is cancelled, and its files are dropped."""

EXPIRY_PERIOD_S: Final = 5.0

INPUTS_S_MAX: Final = 30.0
"""The longest time that fetching the images of an edit may take: its edge only waits for the state of the request."""

_encode = msgspec.msgpack.Encoder().encode
_message: msgspec.msgpack.Decoder[FileMessage] = msgspec.msgpack.Decoder(FileMessage)
_cancel = msgspec.msgpack.Decoder(Cancel)
_log = structlog.get_logger("headwater.worker.files")


class _Job:
    """One request: its state, which `changed` announces, and the bytes of its files."""

    def __init__(self, request: FileRequest, now_s: float) -> None:
        self.request = request
        self.asked_s = now_s
        self.state = FileState(True, number=request.first)
        self.files: list[bytes] = []
        self.changed = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    def take(self, step: FileStep) -> None:
        """A step of the engine, or a file."""
        files = self.state.files
        if step.data:
            self.files.append(step.data)
            files = (*files, GeneratedFile(step.number, len(step.data), step.preview))
        self._set(number=step.number, steps_done=step.steps_done, files=files)

    def end(self, refused: Refused | None = None) -> None:
        """It has all its files, or failed; the first end counts."""
        if not self.state.has_ended:
            self._set(has_ended=True, refused=refused)

    @property
    def missing(self) -> int:
        """Files that the engine has not given yet."""
        wanted = self.request.count - self.request.first
        return wanted - sum(file.preview == FINAL for file in self.state.files)

    def _set(self, **changes: object) -> None:
        self.state = msgspec.structs.replace(self.state, version=self.state.version + 1, **changes)
        self.changed.set()


class FileJobs:
    """The requests for files of one worker, counted in `inflight` from when they are accepted until they are dropped."""

    def __init__(
        self,
        bus: Bus,
        engine: Engine,
        spawn: Spawn,
        status: WorkerStatus,
        inflight: Inflight,
        clock: Clock,
        media: MediaCache,
    ) -> None:
        self._bus = bus
        self._engine = engine
        self._spawn = spawn
        self._status = status
        self._inflight = inflight
        self._clock = clock
        self._media = media
        self._jobs: dict[str, _Job] = {}

    async def on_message(self, message: Message) -> None:
        """A new request, or a query about one."""
        try:
            asked = _message.decode(message.data)
        except msgspec.DecodeError as error:
            return await self._reply(message, Refused(f"unreadable request: {error}", False))
        if isinstance(asked, ImageRequest | VideoRequest):
            return await self._reply(message, self._accept(asked))
        job = self._jobs.get(asked.request)
        if job is not None:
            job.asked_s = self._clock.monotonic_s()
        if isinstance(asked, FilePieceQuery):
            return await self._reply(message, _piece(job, asked))
        if job is None:
            return await self._reply(message, FileState(False))
        self._spawn(self._reply_when_changed(message, job, asked), "file state")
        return None

    async def on_cancel(self, message: Message) -> None:
        """Drop requests that no client waits for any more, or whose edge has all files."""
        self.abort(_cancel.decode(message.data).requests)

    def requests_by_edge(self) -> RequestsByEdge:
        """See `EdgeRequests`. Images only."""
        return by_edge(
            (name, job.request.waiter)
            for name, job in self._jobs.items()
            if isinstance(job.request, ImageRequest)
        )

    def abort(self, requests: Sequence[str]) -> None:
        """See `EdgeRequests`. Their files are dropped too."""
        for request in requests:
            self._drop(request)

    def abort_all(self) -> None:
        """Abort all requests that have not ended: their edges try another worker."""
        for job in self._jobs.values():
            job.end(ABORTED)
            if job.task is not None:
                job.task.cancel()

    async def expire(self) -> None:
        """Drop requests whose edge is gone. Until cancelled."""
        while True:
            await self._clock.sleep(EXPIRY_PERIOD_S)
            now_s = self._clock.monotonic_s()
            for name, job in list(self._jobs.items()):
                if now_s - job.asked_s > ABANDONED_S:
                    _log.info("file_request_abandoned", attempt=name, after_s=ABANDONED_S)
                    self._drop(name)

    def _accept(self, request: FileRequest) -> Accepted | Refused:
        if request.need not in self._engine.capabilities:
            return Refused(str(NotSupported(self._engine.name, request.need)), False)
        if self._inflight.knows(request.request):
            # A copy, perhaps of one that was dropped since.
            return Accepted()
        refusal = self._status.refusal()
        if not refusal and len(self._jobs) >= ACTIVE_MAX:
            refusal = f"it has {ACTIVE_MAX} requests already"
        if refusal:
            return self._status.refuse(refusal)
        job = _Job(request, self._clock.monotonic_s())
        self._jobs[request.request] = job
        self._inflight.accept_embedding(request.request)
        job.task = self._spawn(self._generate(job), "files")
        return Accepted()

    async def _generate(self, job: _Job) -> None:
        request = job.request

        def emit(step: FileStep) -> None:
            self._inflight.file_steps += 1
            job.take(step)

        try:
            if isinstance(request, ImageRequest):
                await self._engine.generate_images(await self._with_inputs(request), emit)
            else:
                await self._engine.generate_video(request, emit)
            job.end(Refused(f"the engine gave {job.missing} files too few", True) if job.missing else None)
        except MediaMissing as error:
            job.end(Refused(str(error), True))
        except Exception as error:
            # Each try may take minutes: two are enough.
            job.end(refusal_of(error, request.request, self._status, fatal=True))

    async def _with_inputs(self, request: ImageRequest) -> ImageRequest:
        """The request with the data of its images, from the edge that waits for it. Raises `MediaMissing`."""
        if not request.inputs:
            return request
        edge = request.waiter.edge if request.waiter is not None else ""
        loaded = await self._media.load(edge, request.inputs, within_s=INPUTS_S_MAX)
        images = len(request.images)
        return msgspec.structs.replace(
            request, images=loaded[:images], mask=loaded[images] if request.mask is not None else None
        )

    def _drop(self, name: str) -> None:
        job = self._jobs.pop(name, None)
        if job is not None:
            if job.task is not None:
                job.task.cancel()
            self._inflight.finish_embedding(name)

    async def _reply_when_changed(self, message: Message, job: _Job, query: FileStateQuery) -> None:
        if job.state.version == query.seen:
            job.changed.clear()
            try:
                async with asyncio.timeout(STATE_WAIT_S):
                    await job.changed.wait()
            except TimeoutError:
                pass
        await self._reply(message, job.state)

    async def _reply(self, message: Message, reply: object) -> None:
        try:
            await self._bus.publish(message.reply, _encode(reply))
        except BusError as error:
            # The edge asks again.
            _log.warning("file_reply_failed", reason=str(error))


def _piece(job: _Job | None, query: FilePieceQuery) -> FilePiece:
    if job is None or not 0 <= query.file < len(job.files):
        return FilePiece(False)
    if query.offset < 0 or not 0 < query.count <= PIECE_BYTES:
        return FilePiece(False)
    return FilePiece(True, job.files[query.file][query.offset : query.offset + query.count])
