"""Who holds limits: the API key of a request, or without keys its tenant; and which limits these are."""

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from headwater.actors.edge.access.principal import NO_MODEL_LIMITS, Principal
from headwater.actors.edge.limits.settings import UNLIMITED, RateLimits
from headwater.schemas.tables.api_key import UsageLimits

ALL_MODELS: Final = ""
"""The scope of the limits that hold for all models together."""

_UNSET: Final = UsageLimits()


class LimitHolder(NamedTuple):
    """A name for the accounts, the limits for all models together, and further ones for single models."""

    name: str
    limits: RateLimits = UNLIMITED
    model_limits: Mapping[str, UsageLimits] = NO_MODEL_LIMITS

    @property
    def limited(self) -> bool:
        """Whether it has any limits."""
        return self.limits != UNLIMITED or bool(self.model_limits)

    def limits_of(self, model: str) -> Iterator[tuple[str, RateLimits]]:
        """The limits that a request for this model is under, by scope."""
        yield ALL_MODELS, self.limits
        own = self.model_limits.get(model)
        if own is not None:
            yield model, RateLimits(*(getattr(own, name) for name in RateLimits._fields))


def holder_of(principal: Principal, tenant: str, defaults: RateLimits) -> LimitHolder:
    """The holder that a request counts against. Its key's limits replace the edge's defaults, each where it is set."""
    limits = defaults
    if principal.limits != _UNSET:
        own = principal.limits
        limits = RateLimits(
            *(getattr(own, name) or default for name, default in zip(defaults._fields, defaults, strict=True))
        )
    return LimitHolder(principal.credential or f"tenant {tenant}", limits, principal.model_limits)
