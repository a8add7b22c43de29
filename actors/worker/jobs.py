"""Requests whose result is one whole: prompts to pool, media to encode (see `encoding`), files to generate.

Each request runs in a task of its own, for as long as the engine takes. A copy of a request has no answer of its own; an edge cancels a
request like any other, and is told when the worker aborts it. Generation is served apart (`requests`), as its tokens are a stream.

Pooling turns prompts into vectors, computed in addition to the requests that generate.

Files, images or videos, take seconds to hours, and are kept until their edge has fetched them. A video is a job that any edge may follow: it is
cancelled once no edge has asked for it for `ABANDONED_S`, whichever edge sent it. Images end with the edge that waits for them (see `OrphanWatch`);
those of an edge that does not answer for them end like videos.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Final, Generic, NamedTuple, Protocol, TypeVar

import msgspec
import structlog

from headwater.actors.runtime.actor import Spawn
from headwater.actors.runtime.ports import Bus, BusError, Message
from headwater.actors.worker.handoffs import RequestsByEdge, by_edge
from headwater.actors.worker.inflight import Inflight, WorkerStatus
from headwater.actors.worker.media import MediaCache
from headwater.actors.worker.requests import ABORTED, refusal_of
from headwater.engines.engine import Engine, FileStep, NotSupported
from headwater.schemas.clock import Clock
from headwater.schemas.inference import (
    FINAL,
    PIECE_BYTES,
    STATE_WAIT_S,
    Accepted,
    Cancel,
    Embedded,
    EmbedReply,
    EmbedRequest,
    FilePiece,
    FilePieceQuery,
    FileQuery,
    FileRequest,
    FileState,
    FileStateQuery,
    GeneratedFile,
    ImageRequest,
    Refused,
    WaitingEdge,
)

_encode = msgspec.msgpack.Encoder().encode
_cancel = msgspec.msgpack.Decoder(Cancel)
_log = structlog.get_logger("headwater.worker")


class ReplyRequest(Protocol):
    """A request with a name that is its own, and the edge that waits for its answer."""

    @property
    def request(self) -> str:
        """The name of the request."""
        ...

    @property
    def waiter(self) -> WaitingEdge | None:
        """The edge that waits, if it answers for its requests."""
        ...


Request = TypeVar("Request", bound=ReplyRequest)


class _Running(NamedTuple):
    task: asyncio.Task[None]
    message: Message
    waiter: WaitingEdge | None


class ReplyServer(ABC, Generic[Request]):
    """The requests of one kind at one worker, counted in `inflight` from when they are accepted until they are answered, or dropped."""

    decoder: "ClassVar[msgspec.msgpack.Decoder[Any]]"
    kind: ClassVar[str]
    """What is computed, as in the names of tasks and in refusals."""
    active_max: ClassVar[int] = 256
    """Requests at once; one more is refused, and its edge tries another worker."""
    keeps_results: ClassVar[bool] = False
    """Is a request accepted at once, and its result kept until its edge cancels it? Else the reply is the result."""
    is_bug_fatal: ClassVar[bool] = False
    """Does a bug of the engine count as its death?"""

    def __init__(
        self,
        bus: Bus,
        engine: Engine,
        spawn: Spawn,
        status: WorkerStatus,
        inflight: Inflight,
        media: MediaCache,
    ) -> None:
        self._bus = bus
        self._engine = engine
        self._spawn = spawn
        self._status = status
        self._inflight = inflight
        self._media = media
        self._running: dict[str, _Running] = {}

    @abstractmethod
    async def compute(self, request: Request) -> object:
        """Return the result. What it raises becomes a refusal."""

    @abstractmethod
    def accept(self, request: Request) -> object | None:
        """Count a request that the worker takes. Return the reply to one that is declined all the same, which is counted as ended."""

    @abstractmethod
    def finish(self, request: str) -> None:
        """Count the end of a request that was accepted."""

    async def on_request(self, message: Message) -> None:
        """Accept a request, or refuse it."""
        try:
            request = self.decoder.decode(message.data)
        except msgspec.DecodeError as error:
            return await self._reply(message, Refused(f"unreadable request: {error}", False))
        return await self.receive(message, request)

    async def receive(self, message: Message, request: Request) -> None:
        """Accept a request, or refuse it."""
        if self._inflight.knows(request.request):
            # A copy: there is one answer.
            return await self._reply(message, Accepted()) if self.keeps_results else None
        refusal = self._status.refusal()
        if not refusal and len(self._running) >= self.active_max:
            refusal = f"it has {self.active_max} requests of this kind already ({self.kind})"
        if refusal:
            return await self._reply(message, self._status.refuse(refusal))
        declined = self.accept(request)
        if declined is not None:
            self.finish(request.request)
            return await self._reply(message, declined)
        task = self._spawn(self._answer(message, request), self.kind)
        self._running[request.request] = _Running(task, message, request.waiter)
        if self.keeps_results:
            return await self._reply(message, Accepted())
        # Not at the end of `_answer`: a task may be cancelled before it starts.
        task.add_done_callback(lambda _: self._end(request.request))
        return None

    async def on_cancel(self, message: Message) -> None:
        """Cancel requests that no client waits for any more."""
        self.abort(_cancel.decode(message.data).requests)

    def requests_by_edge(self) -> RequestsByEdge:
        """See `EdgeRequests`."""
        return by_edge((request, running.waiter) for request, running in self._running.items())

    def abort(self, requests: Sequence[str]) -> None:
        """See `EdgeRequests`."""
        for request in requests:
            if request in self._running:
                self._running[request].task.cancel()
                if self.keeps_results:
                    self._end(request)

    def abort_all(self) -> None:
        """Abort all requests and reply so: their edges try another worker, or do without."""
        for running in list(self._running.values()):
            running.task.cancel()
            # A worker that only sleeps keeps its lease: without this reply the edge would wait for its timeout.
            self._spawn(self._reply(running.message, ABORTED), f"{self.kind} aborted")

    async def _answer(self, message: Message, request: Request) -> None:
        try:
            result = await self.compute(request)
        except Exception as error:
            result = refusal_of(error, request.request, self._status, fatal=self.is_bug_fatal)
        await self.deliver(message, request, result)

    async def deliver(self, message: Message, request: Request, result: object) -> None:
        """Pass on what was computed, or why it was not."""
        await self._reply(message, result)

    async def _reply(self, message: Message, reply: object) -> None:
        try:
            await self._bus.publish(message.reply, _encode(reply))
        except BusError as error:
            _log.warning("reply_failed", kind=self.kind, reason=str(error))

    def _end(self, request: str) -> None:
        del self._running[request]
        self.finish(request)


REPLY_BYTES_MAX: Final = 768 * 1024
"""A reply is one message, and a NATS server accepts 1 MiB by default."""


class PoolingRequests(ReplyServer[EmbedRequest]):
    """The pooling requests of one worker."""

    decoder = msgspec.msgpack.Decoder(EmbedRequest)
    kind = "embed"

    def accept(self, request: EmbedRequest) -> None:
        """See `ReplyServer.accept`."""
        self._inflight.accept_embedding(request.request)

    def finish(self, request: str) -> None:
        """See `ReplyServer.finish`."""
        self._inflight.finish_embedding(request)

    async def compute(self, request: EmbedRequest) -> EmbedReply:
        """See `ReplyServer.compute`."""
        if request.waiter is not None and any(request.media):
            items = [await self._media.load(request.waiter.edge, media) for media in request.media]
            request = msgspec.structs.replace(request, media=tuple(items))
        return _checked(request, await self._engine.embed(request))


def _checked(request: EmbedRequest, vectors: tuple[bytes, ...]) -> EmbedReply:
    """Return the vectors, if there is one per prompt and they fit into one message."""
    if len(vectors) != len(request.prompts):
        return Refused(f"the engine gave {len(vectors)} vectors for {len(request.prompts)} prompts", True)
    size = sum(len(vector) for vector in vectors)
    if size > REPLY_BYTES_MAX:
        return Refused(f"the vectors have {size} bytes, a message at most {REPLY_BYTES_MAX}", False)
    return Embedded(vectors)


ABANDONED_S: Final = 30.0
"""A request whose edge asked nothing for this long is cancelled, and its files are dropped."""

EXPIRY_PERIOD_S: Final = 5.0

INPUTS_S_MAX: Final = 30.0
"""The longest time that fetching the images of an edit may take: its edge only waits for the state of the request."""

_query: msgspec.msgpack.Decoder[FileQuery] = msgspec.msgpack.Decoder(FileQuery)
_files_log = structlog.get_logger("headwater.worker.files")


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
        expected = self.request.count - self.request.first
        return expected - sum(file.preview == FINAL for file in self.state.files)

    def _set(self, **changes: object) -> None:
        self.state = msgspec.structs.replace(self.state, version=self.state.version + 1, **changes)
        self.changed.set()


class FileJobs(ReplyServer[FileRequest]):
    """The requests for files of one worker."""

    decoder = msgspec.msgpack.Decoder(FileRequest)
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
        media: MediaCache,
        clock: Clock,
    ) -> None:
        super().__init__(bus, engine, spawn, status, inflight, media)
        self._clock = clock
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
                    _files_log.info("file_request_abandoned", attempt=name, after_s=ABANDONED_S)
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
