"""Fleet events (workers that join, drain and leave) and load reports. Stream: pool log, kinds `fleet` and `load`."""

from typing import Annotated, Literal

import msgspec

from headwater.schemas.events import Event

Positive = Annotated[int, msgspec.Meta(ge=1)]
Role = Literal["both", "prefill", "decode", "encode"]
"""What a worker computes: whole requests and both legs, one leg only, or the embeddings of images for other workers."""

WorkerState = Literal["ready", "draining", "paused", "sleeping"]
"""Only a ready worker receives requests."""

SplitSubject = Literal["revision", "policy"]
"""What requests are split by: the revision of their worker, or the routing policy that decides."""

RolloutState = Literal["active", "promoted", "rolled back"]

LORA_ON_DEMAND = "lora_on_demand"
"""A capability: the worker loads the LoRA adapter that a request names."""


class WorkerJoined(Event, frozen=True, tag="fleet.joined"):
    """A worker serves from now on, with an empty cache. Written by the worker under its new epoch.

    Blocks and requests of the worker's earlier epochs no longer exist. `pairs_with` identifies compatible engines for hand-offs
    (engine, version, model): only equal values match, "" for none; of an encode worker it is the format of its embeddings.
    `capabilities` are the engine's; `lora_slots` is the number of LoRA adapters that it can load at once. `worker` may be one
    data-parallel rank of an engine: `instance` is the same for all ranks of one engine. `tier` is a class of service; requests
    that do not tolerate all `taints` are not routed to the worker. `tokenizer` is the SHA-256 digest of its model's tokenizer, ""
    if unknown. `media_processor` is the digest of the settings with which it turns media into its model's input, "" if it takes
    none. `revision` names what the worker runs: KV is handed over within one revision only. Workers of releases that had none
    publish "".
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
    tokenizer: str = ""
    media_processor: str = ""
    revision: str = ""


class WorkerChanged(Event, frozen=True, tag="fleet.changed"):
    """The complete status of a worker from now on: only the newest event counts.

    `loras` are the loaded LoRA adapters.
    """

    worker: str
    epoch: int
    state: WorkerState
    role: Role
    loras: tuple[str, ...] = ()
    taints: tuple[str, ...] = ()


class WorkerControlled(Event, frozen=True, tag="fleet.controlled"):
    """Audit record of a control command to a worker. Changes no state.

    `arguments` are JSON; `status` follows HTTP, as in `schemas.messages.control`; `by` is the caller's self-declared name.
    """

    worker: str
    epoch: int
    command: str
    arguments: bytes
    by: str
    status: int
    detail: str


class WorkerDraining(Event, frozen=True, tag="fleet.draining"):
    """A worker accepts no new requests and finishes those in flight."""

    worker: str
    epoch: int


class WorkerLeft(Event, frozen=True, tag="fleet.left"):
    """A worker left. Written by the worker on a clean stop, by a router when its lease expired.

    May be written more than once for one (worker, epoch).
    """

    worker: str
    epoch: int
    reason: str


class EnginesWeighted(Event, frozen=True, tag="fleet.weighted"):
    """The shares of the pool's new requests that its engines get from now on. Replaces all earlier weights.

    `weights` are by engine name; an engine without one gets no new request. Empty: no engine is preferred. Written by the
    router that took the operator's command; `by` is the operator's self-declared name.
    """

    weights: dict[str, float]
    by: str = ""


class Rollout(msgspec.Struct, frozen=True, array_like=True):
    """The plan by which `headwater switch` moves requests to the revision or policy `to`, and how far it is.

    `steps` are the shares that it gets one after the other, in percent; number `step`, from 0 on, applies now and is held for
    `hold_s` seconds at least. A step ends once each of the `gates`, (name, limit), passes on `samples` requests of either side.
    `before` are the shares before the roll-out, which a rollback restores; empty: there were none.
    """

    id: str
    to: str
    steps: tuple[float, ...]
    step: int
    hold_s: float
    gates: tuple[tuple[str, float], ...]
    samples: int
    before: dict[str, float]
    state: RolloutState = "active"

    @property
    def share(self) -> float:
        """The present step's share in percent."""
        return self.steps[self.step]


class TrafficSplit(Event, frozen=True, tag="fleet.split"):
    """The shares of the pool's new requests that revisions of its workers get, or that routing policies decide, from now on.

    It replaces the split of its `subject` that the log stores at position `after`, 0 for none. Where another one was stored in
    between it changes nothing, so that of two writers which read the same split only one succeeds. A name with the share 0 gets
    nothing. A revision without a share gets requests only where no worker of the others may take them. Empty shares: no split.
    Written by the router that took the command, of `by`, its self-declared name, for a `reason`. With a `rollout` the shares
    are those of its present step.
    """

    subject: SplitSubject
    shares: dict[str, float]
    after: int
    by: str = ""
    reason: str = ""
    rollout: Rollout | None = None


# Load of one worker, kind `load`. Worker and epoch are the batch's writer and epoch.


class LoadReported(Event, frozen=True, tag="load.reported"):
    """The engine's load, and the progress of requests since the last report.

    `running` and `waiting` count requests, `used_blocks` KV blocks in use. The three lists name requests: accepted by the engine,
    prefilled (first token generated), and ended for any reason. `cached` are cached prompt tokens, one number for each of
    `prefilled`, -1 where the engine did not report it. `prefills` are measurements: (prompt tokens computed, duration in µs);
    `step_us` is the mean time between two tokens of a request over `gaps` such times, 0 if there were none. `outputs` are
    (`max_tokens`, tokens generated) of the answers that ended by themselves or at their limit. `encodes`, of workers that read
    embeddings, are (prompt tokens computed, images encoded for that, tokens of these, duration of both in µs), and `reads`
    (tokens of an image whose embedding was read, duration in µs). `answered` are (prompt tokens, digest of the tenant or 0) of
    the requests of `outputs`, one for each.
    """

    running: int
    waiting: int
    used_blocks: int
    total_blocks: int
    accepted: tuple[str, ...] = ()
    prefilled: tuple[str, ...] = ()
    finished: tuple[str, ...] = ()
    cached: tuple[int, ...] = ()
    prefills: tuple[tuple[int, int], ...] = ()
    step_us: int = 0
    gaps: int = 0
    outputs: tuple[tuple[int, int], ...] = ()
    encodes: tuple[tuple[int, int, int, int], ...] = ()
    reads: tuple[tuple[int, int], ...] = ()
    answered: tuple[tuple[int, int], ...] = ()


class RequestsHeld(Event, frozen=True, tag="load.held"):
    """All requests that the engine has now: any other that it accepted has ended.

    Part of an announcement, after an incarnation started or a part of the log was lost.
    """

    requests: tuple[str, ...]
