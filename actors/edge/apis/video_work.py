"""Video jobs that this edge runs: each is placed and followed, its progress and file are stored, and its end is written.

Each change names the revision of the one before. If another edge has taken the job over, the change fails, and the worker
is left to that edge; if the job was deleted, the worker stops.

A job names the edge that has it generated. An edge that ends gives its jobs back; one that dies loses its lease, and a
later incarnation has a greater epoch: in each case another edge claims the job, by compare-and-set, and follows it at the
worker where it was, which keeps a request for half a minute without any edge.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
import structlog

from headwater.actors import metrics
from headwater.actors.edge.answer.files import (
    FILE_BYTES_MAX,
    FileGeneration,
    FileJob,
    FileUpdate,
    PlacedFiles,
)
from headwater.actors.edge.apis.video_jobs import StoredJob, VideoBoard, VideoJob, key_of
from headwater.actors.edge.history import TenantObjects
from headwater.actors.edge.saga.open_requests import OpenRequests
from headwater.actors.edge.saga.record import RequestLogWriter
from headwater.actors.edge.saga.routing_hints import RoutingHints
from headwater.actors.edge.saga.workers import WorkerRegistry
from headwater.actors.http.errors import ApiError
from headwater.events.ports import LogError
from headwater.schemas.clock import Clock
from headwater.schemas.events.request import PayloadKind
from headwater.schemas.failure import failure_place

VIDEO_BYTES_MAX: Final = FILE_BYTES_MAX
"""The largest video in the store."""

SAVE_S: Final = 1.0
"""Seconds between two writes of the progress."""

PAUSE_S: Final = 2.0
PAUSE_S_MAX: Final = 30.0
"""Pauses before a job that no worker takes is tried again, doubled from the first value to the last."""

T = TypeVar("T")

_log = structlog.get_logger("headwater.edge.videos")


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
        board, mine = self._parts.board, (self.job.edge, self.job.edge_epoch)
        for _ in range(2):
            made = await board.replace(job, self.stored.revision, self._parts.now_s)
            if made is not None:
                self.stored = made
                return
            # A write whose reply was lost is this edge's own.
            found = await board.get(job.tenant, job.id)
            if found is None:
                self.stop_worker()
                raise JobLost("it was deleted")
            if found.job.has_ended or (found.job.edge, found.job.edge_epoch) != mine:
                raise JobLost("another edge has taken it over")
            self.stored = found
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
        self._works: dict[str, VideoWork] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._released = False

    @property
    def edge(self) -> tuple[str, int]:
        """Name and epoch of this edge, under which it claims jobs."""
        return self._parts.workers.edge, self._parts.workers.epoch

    def start(self, stored: StoredJob) -> None:
        """Have a job generated that this edge has claimed."""
        key = key_of(stored.job)
        if self._released or key in self._tasks:
            return
        work = VideoWork(self._parts, stored)
        self._works[key] = work
        task = self._tasks[key] = self._parts.workers.spawn(work.run(), "video job")
        metrics.VIDEO_JOBS.inc()
        task.add_done_callback(lambda _: self._end(key))

    def _end(self, key: str) -> None:
        del self._works[key], self._tasks[key]
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
        works = list(self._works.values())
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        board, now_s = self._parts.board, self._parts.now_s
        for work in works:
            job, revision = work.stored
            if job.has_ended:
                continue
            try:
                await board.replace(msgspec.structs.replace(job, edge=""), revision, now_s)
            except LogError as error:
                _log.warning("video_job_not_stored", job=job.id, reason=str(error))

    def _drop_lost(self) -> None:
        """Stop what was deleted, and what another edge has by now."""
        for key, work in list(self._works.items()):
            found = self._parts.board.find(key)
            if found is None:
                work.stop_worker()
                self._tasks[key].cancel()
            elif found.job.edge and (found.job.edge, found.job.edge_epoch) != (
                work.job.edge,
                work.job.edge_epoch,
            ):
                self._tasks[key].cancel()

    def _is_free(self, job: VideoJob) -> bool:
        """Return whether this edge may take the job, because no edge generates it."""
        if self._released or key_of(job) in self._tasks or len(self._tasks) >= RUNNING_MAX:
            return False
        if (job.edge, job.edge_epoch) == self.edge or not job.edge:
            return True
        epoch = self._parts.workers.edges.get(job.edge)
        return epoch is None or epoch > job.edge_epoch

    async def _claim(self, job: VideoJob) -> None:
        parts = self._parts
        found = await parts.board.get(job.tenant, job.id)
        if found is None or found.job.has_ended or not self._is_free(found.job):
            return
        name, epoch = self.edge
        mine = msgspec.structs.replace(found.job, edge=name, edge_epoch=epoch, runs=found.job.runs + 1)
        if mine.runs > RUNS_MAX:
            reason = f"The video was begun {RUNS_MAX} times and never completed."
            mine = mine.failed("video_failed", reason, parts.now_s, parts.ttl_s)
        claimed = await parts.board.replace(mine, found.revision, parts.now_s)
        if claimed is not None and not mine.has_ended:
            metrics.VIDEO_TAKEOVERS.inc()
            _log.info("video_job_taken_over", job=job.id, from_edge=job.edge, runs=mine.runs)
            self.start(claimed)
