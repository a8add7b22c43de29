"""The facts of the logs and their base, except decisions, which are in `schemas.routing`.

Of the pool log: fleet events (workers that join, drain and leave; kind `fleet`), load reports (kind `load`), and KV-cache events of one
worker (kind `kv`). The order of KV-cache events holds per (worker, rank); worker and epoch are the batch's writer and epoch. Hashes are
sequence hashes (`schemas.hashing`), packed little-endian u64.

Of the request log, one subject per edge, the lifecycle of a request:

    accepted ── routed ── started ── checkpoint … ── ended        per request; the middle ones per choice,
                  └─────── again after each migration ─┘           ended exactly once

    routed (prefill) ── prefilled ── routed (decode)              with a hand-off between two workers
    encoded                                                        per image that an encode worker was considered for
                    stepped                                        whenever a failure changes the state

`after_ms`, like `ttft_ms` and `duration_ms`, is the time since `began_ns` of the acceptance, by the edge's monotonic clock; 0: not known.

Contents of requests and responses are recorded only if the edge is configured to do so: `payload` says whether `body`
and `answers` are empty ("off"), SHA-256 digests ("hashed") or the bytes themselves ("full").
"""

from typing import Annotated, Final, Literal

import msgspec

from headwater.schemas.inference import Leg
from headwater.schemas.media import PromptMediaKind
from headwater.schemas.names import TraceContext


class Event(msgspec.Struct, frozen=True, array_like=True):
    """One fact of the log. Concrete events set a tag, which no later version reuses for anything else."""


class UnknownEvent(Event, frozen=True, tag="unknown"):
    """In place of an event that a later release wrote: this one does not have its `kind`. Never written; folds ignore it."""

    kind: str


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

    `arguments` are JSON; `status` follows HTTP, as in `schemas.control`; `by` is the caller's self-declared name.
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


# The KV cache of one worker, kind `kv`.

Hash = Annotated[int, msgspec.Meta(ge=0)]
Tier = Annotated[int, msgspec.Meta(ge=0, le=3)]
Rank = Annotated[int, msgspec.Meta(ge=0)]

GPU: Final = 0
CPU: Final = 1
DISK: Final = 2
TIER_NAMES: Final = ("gpu", "cpu", "disk", "external")


class BlocksStored(Event, frozen=True, tag="kv.stored"):
    """A run of consecutive blocks was stored; the first follows `parent` (0: start of a prompt)."""

    parent: Hash
    hashes: bytes
    tier: Tier = GPU
    rank: Rank = 0


class BlocksRemoved(Event, frozen=True, tag="kv.removed"):
    """One copy of each block was evicted from `tier`."""

    hashes: bytes
    tier: Tier = GPU
    rank: Rank = 0


class BlocksCleared(Event, frozen=True, tag="kv.cleared"):
    """All blocks of the rank were removed, on all tiers. Also the first event of each epoch."""

    rank: Rank = 0


class KvGap(Event, frozen=True, tag="kv.gap"):
    """`missing` engine batches were lost and could not be replayed: the following events are incomplete.

    Routers count no cache hits on this rank until the next `BlocksCleared`.
    """

    missing: Annotated[int, msgspec.Meta(ge=0)]
    rank: Rank = 0


# The lifecycle of a request.

SagaState = Literal["routing", "prefill", "handoff", "decode", "ended"]
PayloadKind = Literal["off", "hashed", "full"]
EncodeOutcome = Literal["computed", "cached", "local", "failed"]
"""How an image came to its embedding: an encode worker computed it or had it, or the serving worker computes it, because that
was expected to be faster or because no encode worker delivered."""
EncodeLegs = Literal["estimate", "always", "never"]
"""The images that an edge sends to encode workers: those for which that is expected to be faster, all that an encode worker takes, or none."""


class MediaPlace(msgspec.Struct, frozen=True, array_like=True):
    """An item of media in a prompt: its `tokens` tokens from `start` on. Equal ids are equal content."""

    kind: PromptMediaKind
    id: str
    start: int
    tokens: int


class RequestAccepted(Event, frozen=True, tag="req.accepted"):
    """The edge accepted a request, and will write exactly one `RequestEnded`. `body` is the client's request.

    `media` are the items of its prompt, in order. A recording that is transcribed has no tokens in a prompt and is not among
    them. `trace`, `span`, `sampled` and `trace_state` are the W3C trace context that the client sent (`TraceContext`). `tenant` is a
    digest of its tenant, 0 without one, as in its decisions, and `priority` that with which it waits for a worker: lower ones are
    served first. Times of the request's other events count from `began_ns` of the edge's clock, when it was prepared, `prepare_ms`
    after its body had arrived. The first `media_ms` of those it took to fetch and decode its media. 0: not known.
    """

    request: str
    model: str
    endpoint: str
    prompt_tokens: int
    max_tokens: int
    stream: bool
    choices: int = 1
    payload: PayloadKind = "off"
    body: bytes = b""
    media: tuple[MediaPlace, ...] = ()
    trace: str = ""
    tenant: int = 0
    priority: int = 0
    span: str = ""
    sampled: bool = False
    trace_state: str = ""
    began_ns: int = 0
    prepare_ms: float = 0.0
    media_ms: float = 0.0

    @property
    def context(self) -> TraceContext:
        """The trace context that the client sent."""
        return TraceContext(self.trace, self.span, self.sampled, self.trace_state)


class RequestRouted(Event, frozen=True, tag="req.routed"):
    """A choice, or its remainder after `emitted_tokens`, was dispatched to a worker, which runs the `leg`.

    `attempt` identifies the decision in the pool log. For the decode leg `handoff` identifies the KV it starts with.
    """

    request: str
    choice: int
    attempt: str
    worker: str
    epoch: int
    emitted_tokens: int
    leg: Leg = ""
    handoff: str = ""
    after_ms: float = 0.0


class RequestEncoded(Event, frozen=True, tag="req.encoded"):
    """An image of a choice, before the choice was dispatched as `attempt`; `worker` is the encode worker asked last, "" for none.

    `image` is the id of the image, which has `tokens` tokens; `encode_ms` is how long the encode leg took. With more than `ahead_max`
    tokens of other images ahead of it, the serving worker was expected to be faster (-1: there was no bound). Encoding all images of the
    request apart was expected to take `apart_ms`, and on the serving worker `here_ms`, with the delay of others; 0: not known.
    """

    request: str
    choice: int
    attempt: str
    image: str
    tokens: int
    outcome: EncodeOutcome
    worker: str
    epoch: int
    encode_ms: float
    reason: str = ""
    ahead_max: int = -1
    apart_ms: float = 0.0
    here_ms: float = 0.0
    after_ms: float = 0.0


class RequestPrefilled(Event, frozen=True, tag="req.prefilled"):
    """The prefill leg of a choice ended after `prefill_ms`; `handoff` identifies its KV, which is kept for `lease_ms`, "" without any."""

    request: str
    choice: int
    worker: str
    epoch: int
    handoff: str
    prefill_ms: float
    lease_ms: int = 0
    after_ms: float = 0.0


class RequestStepped(Event, frozen=True, tag="req.stepped"):
    """The saga of a choice changed its state by a failure: loss, refusal or timeout.

    `before` and `after` are states of the saga, `cause` is one of its inputs, `reason` is for people. `worker` is the
    one concerned, empty without one; `handoff` is the hand-off that was abandoned with it.
    """

    request: str
    choice: int
    before: SagaState
    cause: str
    after: SagaState
    worker: str
    epoch: int
    reason: str
    handoff: str = ""
    after_ms: float = 0.0


class RequestStarted(Event, frozen=True, tag="req.started"):
    """The first token of a choice arrived. `cached_tokens` of its prompt were cached, -1 where unknown."""

    request: str
    choice: int
    worker: str
    epoch: int
    cached_tokens: int
    ttft_ms: float


class RequestCheckpoint(Event, frozen=True, tag="req.checkpoint"):
    """A choice has `emitted_tokens` tokens so far.

    `tokens` are those since the previous checkpoint, packed little-endian u32, with payload "full"; else empty.
    """

    request: str
    choice: int
    emitted_tokens: int
    tokens: bytes = b""


class RequestEnded(Event, frozen=True, tag="req.ended"):
    """The one terminal event: stop, length, cancelled or error. `answers` are the texts of the choices."""

    request: str
    reason: str
    completion_tokens: int
    cached_tokens: int
    migrations: int
    ttft_ms: float
    duration_ms: float
    error: str = ""
    payload: PayloadKind = "off"
    answers: tuple[bytes, ...] = ()


class RequestsOpen(Event, frozen=True, tag="req.open"):
    """Requests that this incarnation of the edge accepted and did not end are after log position `since`; -1: none.

    Written with every batch, so that the edge's next incarnation reads from there to end the open requests.
    """

    since: int


RequestEvent = (
    RequestAccepted
    | RequestRouted
    | RequestEncoded
    | RequestPrefilled
    | RequestStepped
    | RequestStarted
    | RequestCheckpoint
    | RequestEnded
    | RequestsOpen
)
