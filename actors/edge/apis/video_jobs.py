"""Video jobs: what a client asked for, the progress, and the edge that runs it. KV bucket, one key per job.

Every edge follows the table, so each of them lists a tenant's jobs, announces progress and sees which jobs no edge has
generated. What must be exact (one job, before it is changed or shown) is read from the table itself.

A job that this edge runs is placed and followed, its progress and file are stored, and its end is written. Each change names the revision of the one
before. If another edge has taken the job over, the change fails, and the worker is left to that edge; if the job was deleted, the worker stops.

A job names the edge that has it generated. An edge that ends gives its jobs back; one that dies loses its lease, and a
later incarnation has a greater epoch: in each case another edge claims the job, by compare-and-set, and follows it at the
worker where it was, which keeps a request for half a minute without any edge.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, Literal, NamedTuple, TypeVar

import msgspec
import structlog

from headwater.actors import metrics
from headwater.actors.edge.answer.jobs import FILE_BYTES_MAX, FileGeneration, FileJob, FileUpdate, PlacedFiles
from headwater.actors.edge.history import TenantObjects, tenant_token
from headwater.actors.edge.saga.http_call import RoutingHints
from headwater.actors.edge.saga.record import OpenRequests, RequestLogWriter
from headwater.actors.edge.saga.workers import WorkerRegistry
from headwater.actors.http.errors import ApiError
from headwater.engines.logs import failure_place
from headwater.events.ports import LogError
from headwater.events.table import Table, TableEntry
from headwater.schemas import subjects
from headwater.schemas.clock import Clock
from headwater.schemas.events import PayloadKind
from headwater.schemas.inference import VideoRequest
from headwater.schemas.names import NO_TRACE, TraceContext
from headwater.schemas.routing import (
    NO_CONSTRAINTS,
    NO_FLOW_CONTROL,
    NO_PREFERENCES,
    Constraints,
    FlowControl,
    Preferences,
)

VideoStatus = Literal["queued", "in_progress", "completed", "failed"]


class VideoJob(msgspec.Struct, frozen=True, kw_only=True):
    """One job. Stored as JSON. It changes by compare-and-set only, so that one edge at a time has it generated.

    `request` is what a worker is sent, `tokens` are those of its prompt, `seconds` is how the client gave the duration. It
    fails at `deadline_s`; `expires_s` is when a finished one disappears. Times since the epoch, 0 for not yet.
    `edge` with `edge_epoch` has it generated, "" for none; `runs` counts how often an edge began to. `worker`,
    `worker_epoch` and `attempt` are where it was placed last, so that another edge can follow it there.
    """

    id: str
    tenant: str
    model: str
    pool: str
    request: VideoRequest
    tokens: int
    seconds: str
    created_ns: int
    deadline_s: int
    trace_context: TraceContext = NO_TRACE
    constraints: Constraints = NO_CONSTRAINTS
    preferences: Preferences = NO_PREFERENCES
    flow: FlowControl = NO_FLOW_CONTROL
    status: VideoStatus = "queued"
    progress: int = 0
    """Percent."""
    completed_s: int = 0
    expires_s: int = 0
    error_code: str = ""
    error: str = ""
    edge: str = ""
    edge_epoch: int = 0
    runs: int = 0
    worker: str = ""
    worker_epoch: int = 0
    attempt: str = ""

    @property
    def created_s(self) -> int:
        """When it was created, in seconds."""
        return self.created_ns // 1_000_000_000

    @property
    def has_ended(self) -> bool:
        """True once the job is completed or failed."""
        return self.status in ("completed", "failed")

    def completed(self, now_s: int, ttl_s: int) -> "VideoJob":
        """The job once its file is stored."""
        return self._ended(now_s, ttl_s, status="completed", progress=100)

    def failed(self, code: str, message: str, now_s: int, ttl_s: int) -> "VideoJob":
        """The job once it has failed."""
        return self._ended(now_s, ttl_s, status="failed", error_code=code, error=message)

    def _ended(self, now_s: int, ttl_s: int, **changes: Any) -> "VideoJob":
        return msgspec.structs.replace(
            self, completed_s=now_s, expires_s=now_s + ttl_s, edge="", worker="", **changes
        )


# All video jobs, as an edge knows them.

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(VideoJob).decode
_log = structlog.get_logger("headwater.edge.videos")


class StoredJob(NamedTuple):
    """A job and the revision that a change names."""

    job: VideoJob
    revision: int


class VideoBoard:
    """The fold of the jobs' table, kept current by `run`. Every method that reads or writes the table raises `LogError` where it does not answer."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._jobs: dict[str, StoredJob] = {}
        self._changed = asyncio.Event()
        self.known = asyncio.Event()
        """Set once all present jobs are known."""

    def all(self) -> list[VideoJob]:
        """All jobs, the oldest first."""
        return sorted(
            (stored.job for stored in self._jobs.values()), key=lambda job: (job.created_ns, job.id)
        )

    def of(self, tenant: str) -> list[VideoJob]:
        """The jobs of a tenant, the oldest first."""
        return [job for job in self.all() if job.tenant == tenant]

    def find(self, key: str) -> StoredJob | None:
        """A job as it is known here."""
        return self._jobs.get(key)

    async def changed(self) -> None:
        """Wait until any job changes."""
        await self._changed.wait()

    async def create(self, job: VideoJob) -> StoredJob:
        """Store a new job. Its id is unique."""
        revision = await self._table.create(key_of(job), _encode(job), ttl_s=_ttl_s(job, job.created_s))
        assert revision is not None
        return self._note(StoredJob(job, revision))

    async def replace(self, job: VideoJob, revision: int, now_s: int) -> StoredJob | None:
        """Replace a job unless it changed since this revision; None if it did."""
        new_revision = await self._table.update(
            key_of(job), _encode(job), revision=revision, ttl_s=_ttl_s(job, now_s)
        )
        return None if new_revision is None else self._note(StoredJob(job, new_revision))

    async def get(self, tenant: str, id_: str) -> StoredJob | None:
        """A job of this tenant, None if it has none with this id (any more)."""
        key = subjects.video_key(tenant_token(tenant), id_)
        entry = await self._table.get(key)
        if entry is not None and entry.value is not None:
            self._note(StoredJob(_decode(entry.value), entry.revision))
        # A replica of the table that answers may be behind what this edge knows.
        return self._jobs.get(key)

    async def delete(self, job: VideoJob) -> None:
        """Delete a job: the edge that has it generated stops."""
        await self._table.delete(key_of(job), marker_s=1)
        self._drop(key_of(job))

    async def run(self) -> None:
        """Follow the table until cancelled."""
        async for entries in self._table.watch():
            self._take(entries)
            self.known.set()

    def _take(self, entries: Sequence[TableEntry]) -> None:
        for entry in entries:
            if entry.value is None:
                held = self._jobs.get(entry.key)
                if held is not None and held.revision < entry.revision:
                    self._drop(entry.key)
                continue
            try:
                self._note(StoredJob(_decode(entry.value), entry.revision))
            except msgspec.DecodeError as error:
                _log.error("video_job_unreadable", key=entry.key, reason=str(error))

    def _note(self, stored: StoredJob) -> StoredJob:
        held = self._jobs.get(key_of(stored.job))
        if held is None or held.revision < stored.revision:
            self._jobs[key_of(stored.job)] = stored
            self._announce()
        return stored

    def _drop(self, key: str) -> None:
        if self._jobs.pop(key, None) is not None:
            self._announce()

    def _announce(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def key_of(job: VideoJob) -> str:
    """The key of a job in the table."""
    return subjects.video_key(tenant_token(job.tenant), job.id)


def _ttl_s(job: VideoJob, now_s: int) -> int:
    """Return how long a job stays in the table. One in progress is there until an edge has noticed its deadline, with time to spare."""
    return max(1, job.expires_s - now_s) if job.has_ended else max(1, job.deadline_s - now_s) + 24 * 3600


# One job that this edge runs.

VIDEO_BYTES_MAX: Final = FILE_BYTES_MAX
"""The largest video in the store."""

SAVE_S: Final = 1.0
"""Seconds between two writes of the progress."""

PAUSE_S: Final = 2.0
PAUSE_S_MAX: Final = 30.0
"""Pauses before a job that no worker takes is tried again, doubled from the first value to the last."""

T = TypeVar("T")


class JobLost(Exception):
    """The job was deleted, ended, or taken over by another edge."""


class VideoParts(NamedTuple):
    """The parts of an edge that generate videos. `payload`: what of requests is recorded; `ttl_s`: how long results are kept."""

    workers: WorkerRegistry
    ledger: OpenRequests
    payload: PayloadKind
    board: VideoBoard
    objects: TenantObjects
    ttl_s: int

    @property
    def clock(self) -> Clock:
        """The edge's clock."""
        return self.workers.ports.clock

    @property
    def now_s(self) -> int:
        """Seconds since the epoch."""
        return self.clock.wall_ns() // 1_000_000_000


class VideoWork:
    """One job that this edge runs. `stored` is the job as this edge claimed it."""

    def __init__(self, parts: VideoParts, stored: StoredJob) -> None:
        self.stored = stored
        self._parts = parts
        self._generation: FileGeneration | None = None
        self._saved_s = 0.0

    @property
    def job(self) -> VideoJob:
        """The job as this edge wrote it last."""
        return self.stored.job

    def stop_worker(self) -> None:
        """Have the worker stop when this ends: no other edge follows it."""
        if self._generation is not None:
            self._generation.stays = False

    async def run(self) -> None:
        """Run the job until it has ended, here or elsewhere. When cancelled, the worker continues for another edge, unless `stop_worker` was called."""
        pause_s = PAUSE_S
        try:
            while not self.job.has_ended:
                if await self._try_once():
                    return
                await self._parts.clock.sleep(pause_s)
                pause_s = min(2 * pause_s, PAUSE_S_MAX)
        except JobLost as lost:
            _log.info("video_job_lost", job=self.job.id, reason=str(lost))
        except LogError as error:
            # It stays claimed by this edge, which claims it again.
            _log.warning("video_job_not_stored", job=self.job.id, reason=str(error))

    async def _try_once(self) -> bool:
        """Place the job and follow it; False if no worker takes it at present."""
        parts, job = self._parts, self.job
        left_s = job.deadline_s - parts.now_s
        if left_s <= 0:
            await self._fail(
                "video_timeout",
                "The video was not completed in time: no worker took it, or it took too long.",
            )
            return True
        order = msgspec.structs.replace(job.request, request=f"{job.id}-{job.runs}")
        record = RequestLogWriter(
            parts.ledger,
            parts.clock,
            order.request,
            job.model,
            "videos",
            payload=parts.payload,
            trace=job.trace_context,
        )
        body = msgspec.json.encode({"model": job.model, "prompt": order.prompt})
        record.accepted(job.tokens, 1, body, flow=job.flow)
        hints = RoutingHints(job.constraints, job.preferences, job.flow)
        generation = self._generation = FileGeneration(
            parts.workers, FileJob(order, job.pool, job.tokens, hints), self._take, self._placed, stays=True
        )
        before = PlacedFiles(job.worker, job.worker_epoch, job.attempt) if job.worker else None
        try:
            with record.ending(JobLost):
                [data] = await self._within(left_s, generation.run(record, before))
                await self._keep(data)
        except ApiError as error:
            if error.status in (429, 503):
                await self._save(status="queued", runs=job.runs + 1, worker="")
                return False
            await self._fail(error.code or "video_failed", str(error))
        except (JobLost, LogError):
            raise
        except Exception as error:
            _log.error("video_job_failed", job=job.id, failure=failure_place(error))
            _log.debug("video_job_failure", exc_info=True)
            await self._fail("video_failed", "Internal error; see the log of the edge.")
        return True

    async def _within(self, seconds: int, work: Awaitable[T]) -> T:
        """The result of `work`. Raises `ApiError` 504 if it is not there in time; the worker stops then."""
        running = asyncio.ensure_future(work)
        try:
            done, _ = await asyncio.wait({running}, timeout=seconds)
            if done:
                return running.result()
            self.stop_worker()
            raise ApiError(
                504,
                f"The video was not completed within {seconds} s.",
                code="video_timeout",
                logged="the job's time limit",
            )
        finally:
            if not running.done():
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)

    async def _placed(self, place: PlacedFiles) -> None:
        worker, epoch, attempt = place
        await self._save(worker=worker, worker_epoch=epoch, attempt=attempt)

    async def _take(self, update: FileUpdate) -> None:
        """Store how far it is, once a second at most; another edge's readers see it then."""
        job = self.job
        progress = max(job.progress, min(99, 100 * update.steps_done // job.request.steps))
        begins = update.steps_done > 0 and job.status == "queued"
        now_s = self._parts.clock.monotonic_s()
        if not begins and (progress == job.progress or now_s - self._saved_s < SAVE_S):
            return
        self._saved_s = now_s
        try:
            await self._save(status="in_progress", progress=progress)
        except LogError as error:
            _log.warning("video_progress_not_stored", job=job.id, reason=str(error))

    async def _keep(self, data: bytes) -> None:
        parts, job = self._parts, self.job
        # A store that does not answer for a moment must not cost an hour of a GPU.
        await self._until_stored(lambda: parts.objects.put(job.tenant, "video", job.id, data))
        completed = self.job.completed(parts.now_s, parts.ttl_s)
        await self._until_stored(lambda: self._store(completed))

    async def _fail(self, code: str, message: str) -> None:
        failed = self.job.failed(code, message, self._parts.now_s, self._parts.ttl_s)
        await self._until_stored(lambda: self._store(failed))

    async def _until_stored(self, write: Callable[[], Awaitable[Any]]) -> None:
        """Write, and again while the store is not available, until the job's deadline. Raises `LogError`, `ApiError`."""
        pause_s = PAUSE_S
        while True:
            try:
                await write()
                return
            except (LogError, ApiError) as error:
                unavailable = isinstance(error, LogError) or error.status == 503
                if not unavailable or self._parts.now_s >= self.job.deadline_s:
                    raise
            await self._parts.clock.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_S_MAX)

    async def _save(self, **changes: Any) -> None:
        """Change the job. Raises `JobLost` and `LogError`."""
        await self._store(msgspec.structs.replace(self.job, **changes))

    async def _store(self, job: VideoJob) -> None:
        """Write the job as it is now. Raises `JobLost` and `LogError`."""
        board, this_edge = self._parts.board, (self.job.edge, self.job.edge_epoch)
        for _ in range(2):
            replaced = await board.replace(job, self.stored.revision, self._parts.now_s)
            if replaced is not None:
                self.stored = replaced
                return
            # A write whose reply was lost is this edge's own.
            stored = await board.get(job.tenant, job.id)
            if stored is None:
                self.stop_worker()
                raise JobLost("it was deleted")
            if stored.job.has_ended or (stored.job.edge, stored.job.edge_epoch) != this_edge:
                raise JobLost("another edge has taken it over")
            self.stored = stored
        raise JobLost("it changes all the time")


# All jobs that this edge runs: those that it accepted, and those of edges that are gone.

SCAN_S: Final = 1.0
"""Seconds between two searches for jobs of edges that are gone."""

RUNS_MAX: Final = 50
"""A job that was begun so often has ended its edges, or no worker ever finishes it: it fails."""

RUNNING_MAX: Final = 256
"""Jobs that one edge has generated at once; further ones wait for it, or for another edge."""


class VideoRunner:
    """All jobs that this edge runs."""

    def __init__(self, parts: VideoParts) -> None:
        self._parts = parts
        self._running: dict[str, tuple[VideoWork, asyncio.Task[None]]] = {}
        self._released = False

    @property
    def edge(self) -> tuple[str, int]:
        """Name and epoch of this edge, under which it claims jobs."""
        return self._parts.workers.edge, self._parts.workers.epoch

    def start(self, stored: StoredJob) -> None:
        """Have a job generated that this edge has claimed."""
        key = key_of(stored.job)
        if self._released or key in self._running:
            return
        work = VideoWork(self._parts, stored)
        task = self._parts.workers.spawn(work.run(), "video job")
        self._running[key] = work, task
        metrics.VIDEO_JOBS.inc()
        task.add_done_callback(lambda _: self._end(key))

    def _end(self, key: str) -> None:
        del self._running[key]
        metrics.VIDEO_JOBS.dec()

    async def run(self) -> None:
        """Watch this edge's jobs and look for those of edges that are gone. Until cancelled."""
        workers, board = self._parts.workers, self._parts.board
        await board.known.wait()
        await workers.leases_known.wait()
        while True:
            self._drop_lost()
            for job in board.all():
                if not job.has_ended and self._is_free(job):
                    try:
                        await self._claim(job)
                    except LogError as error:
                        _log.warning("video_job_not_stored", job=job.id, reason=str(error))
            changed = asyncio.ensure_future(board.changed())
            try:
                await asyncio.wait({changed}, timeout=SCAN_S)
            finally:
                changed.cancel()

    async def release(self) -> None:
        """Give all jobs back: other edges follow their workers. For the end of this edge."""
        self._released = True
        running = list(self._running.values())
        for _, task in running:
            task.cancel()
        await asyncio.gather(*(task for _, task in running), return_exceptions=True)
        board, now_s = self._parts.board, self._parts.now_s
        for work, _ in running:
            job, revision = work.stored
            if job.has_ended:
                continue
            try:
                await board.replace(msgspec.structs.replace(job, edge=""), revision, now_s)
            except LogError as error:
                _log.warning("video_job_not_stored", job=job.id, reason=str(error))

    def _drop_lost(self) -> None:
        """Stop what was deleted, and what another edge has by now."""
        for key, (work, task) in list(self._running.items()):
            stored = self._parts.board.find(key)
            if stored is None:
                work.stop_worker()
                task.cancel()
            elif stored.job.edge and (stored.job.edge, stored.job.edge_epoch) != (
                work.job.edge,
                work.job.edge_epoch,
            ):
                task.cancel()

    def _is_free(self, job: VideoJob) -> bool:
        """Return whether this edge may take the job, because no edge generates it."""
        if self._released or key_of(job) in self._running or len(self._running) >= RUNNING_MAX:
            return False
        if (job.edge, job.edge_epoch) == self.edge or not job.edge:
            return True
        epoch = self._parts.workers.edges.get(job.edge)
        return epoch is None or epoch > job.edge_epoch

    async def _claim(self, job: VideoJob) -> None:
        parts = self._parts
        stored = await parts.board.get(job.tenant, job.id)
        if stored is None or stored.job.has_ended or not self._is_free(stored.job):
            return
        name, epoch = self.edge
        updated_job = msgspec.structs.replace(
            stored.job, edge=name, edge_epoch=epoch, runs=stored.job.runs + 1
        )
        if updated_job.runs > RUNS_MAX:
            reason = f"The video was begun {RUNS_MAX} times and never completed."
            updated_job = updated_job.failed("video_failed", reason, parts.now_s, parts.ttl_s)
        claimed = await parts.board.replace(updated_job, stored.revision, parts.now_s)
        if claimed is not None and not updated_job.has_ended:
            metrics.VIDEO_TAKEOVERS.inc()
            _log.info("video_job_taken_over", job=job.id, from_edge=job.edge, runs=updated_job.runs)
            self.start(claimed)
