"""The life of a request. Stream: request log, one subject per edge.

    accepted ── routed ── started ── checkpoint … ── ended        per request; the middle ones per choice,
                  └────────── again after each move ──┘            ended exactly once

What clients said and were told is in it only if the edge is set to record it: `payload` says whether `body` and
`answers` are empty ("off"), SHA-256 digests ("hashed") or the bytes themselves ("full").
"""

from typing import Literal

from headwater.schemas.envelope import Event

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
    """A choice, or what is left of it after `emitted_tokens`, was given to a worker.

    `attempt` names the decision in the pool log.
    """

    request: str
    choice: int
    attempt: str
    worker: str
    epoch: int
    emitted_tokens: int


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
    RequestAccepted | RequestRouted | RequestStarted | RequestCheckpoint | RequestEnded | RequestsOpen
)
