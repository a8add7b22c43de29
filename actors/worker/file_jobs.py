"""Files to generate, images or videos: requests that take seconds to hours, whose results are kept until their edge has fetched them.

A video is a job that any edge may follow: it is cancelled once no edge has asked for it for `ABANDONED_S`, whichever edge sent it. Images
end with the edge that waits for them (see `OrphanWatch`); those of an edge that does not answer for them end like videos.
"""

import asyncio
from typing import Final

import msgspec
import structlog

from headwater.actors.bus import Bus, Message
from headwater.actors.runtime.actor import Spawn
from headwater.actors.worker.inflight import Inflight, WorkerStatus
from headwater.actors.worker.media import MediaCache
from headwater.actors.worker.reply_server import ReplyServer
from headwater.actors.worker.requests import ABORTED
from headwater.engines.engine import Engine, FileStep, NotSupported
from headwater.schemas.clock import Clock
from headwater.schemas.messages.file_generation import (
    FINAL,
    PIECE_BYTES,
    STATE_WAIT_S,
    FilePiece,
    FilePieceQuery,
    FileQuery,
    FileRequest,
    FileState,
    FileStateQuery,
    GeneratedFile,
    ImageRequest,
)
from headwater.schemas.messages.inference import Refused

ABANDONED_S: Final = 30.0
"""A request whose edge asked nothing for this long is cancelled, and its files are dropped."""

EXPIRY_PERIOD_S: Final = 5.0

INPUTS_S_MAX: Final = 30.0
"""The longest time that fetching the images of an edit may take: its edge only waits for the state of the request."""

_request: msgspec.msgpack.Decoder[FileRequest] = msgspec.msgpack.Decoder(FileRequest)
_query: msgspec.msgpack.Decoder[FileQuery] = msgspec.msgpack.Decoder(FileQuery)
_log = structlog.get_logger("headwater.worker.files")


class _Job:
    """One request: its state, which `changed` announces, and the bytes of its files."""

    def __init__(self, request: FileRequest, now_s: float) -> None:
        self.request = request
        self.asked_s = now_s
        self.state = FileState(True, number=request.first)
        self.files: list[bytes] = []
        self.changed = asyncio.Event()

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


class FileJobs(ReplyServer[FileRequest]):
    """The requests for files of one worker."""

    kind = "files"
    active_max = 64
    keeps_results = True
    is_bug_fatal = True  # Each try may take minutes: two are enough.

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
        super().__init__(_request, bus, spawn, status, inflight)
        self._engine = engine
        self._clock = clock
        self._media = media
        self._jobs: dict[str, _Job] = {}

    async def on_request(self, message: Message) -> None:
        """See `ReplyServer.on_request`. It may be a query about one, too."""
        try:
            query = _query.decode(message.data)
        except msgspec.DecodeError:
            return await super().on_request(message)
        job = self._jobs.get(query.request)
        if job is not None:
            job.asked_s = self._clock.monotonic_s()
        if isinstance(query, FilePieceQuery):
            await self._reply(message, _piece(job, query))
        elif job is None:
            await self._reply(message, FileState(False))
        else:
            self._spawn(self._reply_when_changed(message, job, query), "file state")
        return None

    async def receive(self, message: Message, request: FileRequest) -> None:
        """See `ReplyServer.receive`. No worker with this model's engine takes what it is not capable of."""
        if request.need in self._engine.capabilities:
            await super().receive(message, request)
        else:
            await self._reply(message, Refused(str(NotSupported(self._engine.name, request.need)), False))

    def accept(self, request: FileRequest) -> None:
        """See `ReplyServer.accept`."""
        self._jobs[request.request] = _Job(request, self._clock.monotonic_s())
        self._inflight.accept_embedding(request.request)

    def finish(self, request: str) -> None:
        """See `ReplyServer.finish`. Its files are dropped."""
        del self._jobs[request]
        self._inflight.finish_embedding(request)

    def abort_all(self) -> None:
        """See `ReplyServer.abort_all`. Their edges learn of it when they ask."""
        for name, job in self._jobs.items():
            job.end(ABORTED)
            self._running[name].task.cancel()

    async def expire(self) -> None:
        """Drop requests whose edge is gone. Until cancelled."""
        while True:
            await self._clock.sleep(EXPIRY_PERIOD_S)
            now_s = self._clock.monotonic_s()
            for name, job in list(self._jobs.items()):
                if now_s - job.asked_s > ABANDONED_S:
                    _log.info("file_request_abandoned", attempt=name, after_s=ABANDONED_S)
                    self.abort([name])

    async def compute(self, request: FileRequest) -> Refused | None:
        """See `ReplyServer.compute`."""
        job = self._jobs[request.request]

        def emit(step: FileStep) -> None:
            self._inflight.file_steps += 1
            job.take(step)

        if isinstance(request, ImageRequest):
            await self._engine.generate_images(await self._with_inputs(request), emit)
        else:
            await self._engine.generate_video(request, emit)
        return Refused(f"the engine gave {job.missing} files too few", True) if job.missing else None

    async def deliver(self, message: Message, request: FileRequest, result: object) -> None:
        """See `ReplyServer.deliver`. The edge learns of it when it asks."""
        job = self._jobs.get(request.request)
        if job is not None:
            job.end(result if isinstance(result, Refused) else None)

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

    async def _reply_when_changed(self, message: Message, job: _Job, query: FileStateQuery) -> None:
        if job.state.version == query.seen:
            job.changed.clear()
            try:
                async with asyncio.timeout(STATE_WAIT_S):
                    await job.changed.wait()
            except TimeoutError:
                pass
        await self._reply(message, job.state)


def _piece(job: _Job | None, query: FilePieceQuery) -> FilePiece:
    if job is None or not 0 <= query.file < len(job.files):
        return FilePiece(False)
    if query.offset < 0 or not 0 < query.count <= PIECE_BYTES:
        return FilePiece(False)
    return FilePiece(True, job.files[query.file][query.offset : query.offset + query.count])
