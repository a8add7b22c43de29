"""Video jobs: what a client asked for, how far it is, and which edge has it generated. KV bucket, one key per job."""

from typing import Literal

import msgspec

from headwater.schemas.constraints import (
    NO_CONSTRAINTS,
    NO_FLOW_CONTROL,
    NO_PREFERENCES,
    Constraints,
    FlowControl,
    Preferences,
)
from headwater.schemas.messages.file_generation import VideoRequest

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
    trace: str = ""
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
        """Whether it is completed or failed."""
        return self.status in ("completed", "failed")
