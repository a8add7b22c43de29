"""Settings of rate limits: types, defaults and descriptions only. Light to import: the command line reads them."""

from typing import Annotated, Final, NamedTuple

from msgspec import Meta

_PER = "per API key (or tenant, without keys) and model; 0: unlimited"


class RateLimits(NamedTuple):
    """Limits of one holder of limits, for each model on its own. 0 is unlimited."""

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
