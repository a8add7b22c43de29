"""Settings of rate limits: types, defaults and descriptions only. Light to import: the command line reads them."""

from typing import Annotated, Final, NamedTuple

from msgspec import Meta

_PER = "of one API key, or of one tenant without keys; a key's own limit replaces it; 0: unlimited"


class RateLimits(NamedTuple):
    """Limits of one holder of limits. 0 is unlimited."""

    requests_per_minute: Annotated[int, Meta(ge=0, description=f"requests per minute {_PER}")] = 0
    tokens_per_minute: Annotated[
        int, Meta(ge=0, description=f"prompt and generated tokens per minute {_PER}")
    ] = 0
    concurrent_requests: Annotated[int, Meta(ge=0, description=f"requests in flight {_PER}")] = 0
    context_tokens: Annotated[
        int, Meta(ge=0, description=f"tokens of the prompt and the answer of one request {_PER}")
    ] = 0

    @property
    def any_rate(self) -> bool:
        """Whether anything must be counted."""
        return bool(self.requests_per_minute or self.tokens_per_minute or self.concurrent_requests)


UNLIMITED: Final = RateLimits()

REQUEST_TIMEOUT_S: Final = 3600.0


class ServiceLimits(NamedTuple):
    """What one edge lets a request use: rates shared with the other edges, and time."""

    rates: RateLimits = UNLIMITED
    request_timeout_s: float = 0.0


UNLIMITED_SERVICE: Final = ServiceLimits()
