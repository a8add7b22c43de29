"""The lifecycle of a request. Stream: request log, one subject per edge.

    accepted ── routed ── started ── checkpoint … ── ended        per request; the middle ones per choice,
                  └─────── again after each migration ─┘           ended exactly once

    routed (prefill) ── prefilled ── routed (decode)              with a hand-off between two workers
    encoded                                                        per image that an encode worker was considered for
                    stepped                                        whenever a failure changes the state

`after_ms`, like `ttft_ms` and `duration_ms`, is the time since `began_ns` of the acceptance, by the edge's monotonic clock; 0: not known.

Contents of requests and responses are recorded only if the edge is configured to do so: `payload` says whether `body`
and `answers` are empty ("off"), SHA-256 digests ("hashed") or the bytes themselves ("full").
"""

from typing import Literal

import msgspec

from headwater.schemas.events import Event
from headwater.schemas.media_kind import PromptMediaKind
from headwater.schemas.messages.inference import Leg
from headwater.schemas.trace import TraceContext

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
