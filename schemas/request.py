"""The life of a request. Stream: request log. Payloads (prompt, answer) are not in it."""

from headwater.schemas.envelope import Event


class RequestAccepted(Event, frozen=True, tag="req.accepted"):
    """The edge took a request and owes it exactly one end."""

    request: str
    model: str
    endpoint: str
    prompt_tokens: int
    max_tokens: int
    stream: bool


class RequestRouted(Event, frozen=True, tag="req.routed"):
    """The request, or what is left of it after `emitted_tokens`, was sent to a worker."""

    request: str
    worker: str
    epoch: int
    decision_position: int
    emitted_tokens: int


class RequestEnded(Event, frozen=True, tag="req.ended"):
    """The one terminal event: stop, length, cancelled or error."""

    request: str
    reason: str
    completion_tokens: int
    cached_tokens: int
    migrations: int
    ttft_ms: float
    duration_ms: float
    error: str = ""


RequestEvent = RequestAccepted | RequestRouted | RequestEnded
