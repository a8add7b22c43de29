"""The video jobs that this edge has generated: those that it accepted, and those of edges that are gone.

A job names the edge that has it generated. An edge that ends gives its jobs back; one that dies loses its lease, and a
later incarnation has a greater epoch: in each case another edge claims the job, by compare-and-set, and follows it at the
worker where it was, which keeps a request for half a minute without any edge.
"""

import asyncio
from typing import Final

import msgspec
import structlog

from headwater.actors import metrics
from headwater.actors.edge.videos.board import StoredJob, key_of
from headwater.actors.edge.videos.job import VideoJob
from headwater.actors.edge.videos.work import VideoParts, VideoWork
from headwater.events.errors import LogError

SCAN_S: Final = 1.0
"""Between two searches for jobs of edges that are gone."""

RUNS_MAX: Final = 50
"""A job that was begun so often has ended its edges, or no worker ever finishes it: it fails."""

RUNNING_MAX: Final = 256
"""Jobs that one edge has generated at once; further ones wait for it, or for another edge."""

_log = structlog.get_logger("headwater.edge.videos")


class VideoRunner:
    """See the module."""

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
        """Whether no edge has the job generated."""
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
            now_s = parts.now_s
            mine = msgspec.structs.replace(
                mine,
                status="failed",
                error_code="video_failed",
                error=f"The video was begun {RUNS_MAX} times and never completed.",
                completed_s=now_s,
                expires_s=now_s + parts.ttl_s,
            )
        claimed = await parts.board.replace(mine, found.revision, parts.now_s)
        if claimed is not None and not mine.has_ended:
            metrics.VIDEO_TAKEOVERS.inc()
            _log.info("video_job_taken_over", job=job.id, from_edge=job.edge, runs=mine.runs)
            self.start(claimed)
