"""Video jobs: what a client asked for, the progress, and the edge that runs it. KV bucket, one key per job.

Every edge follows the table, so each of them lists a tenant's jobs, announces progress and sees which jobs no edge has
generated. What must be exact (one job, before it is changed or shown) is read from the table itself.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgspec
import structlog

from headwater.actors.edge.history import tenant_token
from headwater.events.table import Table, TableEntry
from headwater.schemas import subjects
from headwater.schemas.constraints import (
    NO_CONSTRAINTS,
    NO_FLOW_CONTROL,
    NO_PREFERENCES,
    Constraints,
    FlowControl,
    Preferences,
)
from headwater.schemas.messages.file_generation import VideoRequest
from headwater.schemas.trace import NO_TRACE, TraceContext

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
        made = await self._table.update(
            key_of(job), _encode(job), revision=revision, ttl_s=_ttl_s(job, now_s)
        )
        return None if made is None else self._note(StoredJob(job, made))

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
                known = self._jobs.get(entry.key)
                if known is not None and known.revision < entry.revision:
                    self._drop(entry.key)
                continue
            try:
                self._note(StoredJob(_decode(entry.value), entry.revision))
            except msgspec.DecodeError as error:
                _log.error("video_job_unreadable", key=entry.key, reason=str(error))

    def _note(self, stored: StoredJob) -> StoredJob:
        known = self._jobs.get(key_of(stored.job))
        if known is None or known.revision < stored.revision:
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
