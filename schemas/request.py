"""The life of a request. Stream: request log, one subject per edge.

    accepted ── routed ── started ── checkpoint … ── ended        per request; the middle ones per choice,
                  └────────── again after each move ──┘            ended exactly once

    routed (prefill) ── prefilled ── routed (decode)              where two workers share it
                    stepped                                        whenever a state is left by a failure

What clients said and were told is in it only if the edge is set to record it: `payload` says whether `body` and
`answers` are empty ("off"), SHA-256 digests ("hashed") or the bytes themselves ("full").
"""

from typing import Literal

from headwater.schemas.envelope import Event
from headwater.schemas.inference import Leg

SagaState = Literal["routing", "prefill", "handoff", "decode", "ended"]
PayloadKind = Literal["off", "hashed", "full"]


class RequestAccepted(Event, frozen=True, tag="req.accepted"):
    """The edge took a request and owes it exactly one end. `body` is the request as the client sent it."""

    request: str
    model: str
    endpoint: str
    prompt_tokens: int
    max_tokens: int
    stream: bool
    choices: int = 1
    payload: PayloadKind = "off"
    body: bytes = b""


class RequestRouted(Event, frozen=True, tag="req.routed.2"):
    """A choice, or what is left of it after `emitted_tokens`, was given to a worker, which does the `leg`.

    `attempt` names the decision in the pool log. For the decode leg `handoff` names the KV it begins with.
    """

    request: str
    choice: int
    attempt: str
    worker: str
    epoch: int
    emitted_tokens: int
    leg: Leg = ""
    handoff: str = ""


class RequestPrefilled(Event, frozen=True, tag="req.prefilled"):
    """The prefill leg of a choice is done after `prefill_ms`; `handoff` names its KV, "" where there is none."""

    request: str
    choice: int
    worker: str
    epoch: int
    handoff: str
    prefill_ms: float


class RequestStepped(Event, frozen=True, tag="req.stepped"):
    """A choice left a state of its saga other than by going on: it was lost, refused or timed out there.

    `before` and `after` are states of the saga, `cause` is one of its inputs, `reason` says it for people. `worker`
    is the one concerned, empty while there was none; `handoff` is the one that was given up with it.
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


class RequestStarted(Event, frozen=True, tag="req.started"):
    """The first token of a choice came. `cached_tokens` of its prompt were not computed, -1 where not told."""

    request: str
    choice: int
    worker: str
    epoch: int
    cached_tokens: int
    ttft_ms: float


class RequestCheckpoint(Event, frozen=True, tag="req.checkpoint"):
    """A choice has `emitted_tokens` tokens by now.

    `tokens` are those since the checkpoint before, packed little-endian u32, with payload "full"; else empty.
    """

    request: str
    choice: int
    emitted_tokens: int
    tokens: bytes = b""


class RequestEnded(Event, frozen=True, tag="req.ended"):
    """The one terminal event: stop, length, cancelled or error. `answers` hold the text of each choice."""

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
    """Requests that this life of the edge accepted and did not end lie behind log position `since`; -1: none.

    Written with every batch, so that the edge's next life knows how far back to look for what it owes an end.
    """

    since: int


RequestEvent = (
    RequestAccepted
    | RequestRouted
    | RequestPrefilled
    | RequestStepped
    | RequestStarted
    | RequestCheckpoint
    | RequestEnded
    | RequestsOpen
)
