"""Fleet events: workers that come, drain and go. Stream: pool log, kind `fleet`."""

from typing import Annotated, Literal

import msgspec

from headwater.schemas.envelope import Event

Positive = Annotated[int, msgspec.Meta(ge=1)]
Role = Literal["both", "prefill", "decode"]
WorkerState = Literal["ready", "draining", "paused", "sleeping"]
"""Only a ready worker is given requests."""

LORA_ON_DEMAND = "lora_on_demand"
"""Among a worker's capabilities: it loads an adapter that a request names."""


class WorkerJoined(Event, frozen=True, tag="fleet.joined"):
    """A worker serves from now on, with an empty cache. Written by the worker under its new epoch.

    Blocks and requests of the worker's earlier epochs do not exist any more. `pairs_with` names what its engine
    can hand KV over to and take it from (engine, version, model): equal names only, "" for none. `capabilities`
    are the engine's; `lora_slots` is how many adapters it can hold at once. `worker` may be one data-parallel rank
    of an engine: `instance` is the same for all ranks of one engine. `tier` names a class of service, and `taints` keep
    away requests that do not tolerate them.
    """

    worker: str
    epoch: int
    model: str
    engine: str
    role: Role
    block_size: Positive
    total_blocks: Positive
    max_running: Positive
    pairs_with: str = ""
    capabilities: tuple[str, ...] = ()
    lora_slots: int = 0
    instance: str = ""
    tier: str = ""
    taints: tuple[str, ...] = ()


class WorkerChanged(Event, frozen=True, tag="fleet.changed"):
    """How a worker stands from now on: all of it, so that the newest event alone tells.

    `loras` are the adapters that it holds.
    """

    worker: str
    epoch: int
    state: WorkerState
    role: Role
    loras: tuple[str, ...] = ()
    taints: tuple[str, ...] = ()


class WorkerControlled(Event, frozen=True, tag="fleet.controlled"):
    """Somebody had a worker do something: the audit. Changes nothing by itself.

    `arguments` are JSON; `status` follows HTTP, as in `schemas.control`; `by` is who asked, as they said.
    """

    worker: str
    epoch: int
    command: str
    arguments: bytes
    by: str
    status: int
    detail: str


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
