"""Fleet events: workers that come, drain and go. Stream: pool log, kind `fleet`."""

from typing import Annotated, Literal

import msgspec

from headwater.schemas.envelope import Event

Positive = Annotated[int, msgspec.Meta(ge=1)]
Role = Literal["both", "prefill", "decode"]


class WorkerJoined(Event, frozen=True, tag="fleet.joined"):
    """A worker serves from now on, with an empty cache. Written by the worker under its new epoch.

    Blocks and requests of the worker's earlier epochs do not exist any more.
    """

    worker: str
    epoch: int
    model: str
    engine: str
    role: Role
    block_size: Positive
    total_blocks: Positive
    max_running: Positive


class WorkerDraining(Event, frozen=True, tag="fleet.draining"):
    """A worker takes no new requests and finishes those it has."""

    worker: str
    epoch: int


class WorkerLeft(Event, frozen=True, tag="fleet.left"):
    """A worker is gone. Written by the worker on a clean stop, by a router when its lease lapsed.

    May be written more than once for one (worker, epoch).
    """

    worker: str
    epoch: int
    reason: str
