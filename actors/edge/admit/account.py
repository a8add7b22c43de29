"""Accounts of rate limits: what one holder (an API key or a tenant) uses of all models, or of one, here and as other edges report it.

Pure: each call has the time, in seconds of a monotonic clock; a time before the newest one counts as the newest one.
"""

import math
from collections.abc import Iterator, Mapping
from functools import lru_cache
from hashlib import blake2b
from typing import Final, NamedTuple

import msgspec

from headwater.actors.edge.admit.control import NO_MODEL_LIMITS, Principal
from headwater.actors.edge.settings import UNLIMITED, RateLimits
from headwater.schemas.inference import AccountUsage
from headwater.schemas.tables import UsageLimits

MINUTE_S: Final = 60.0
_ROUNDING: Final = 1e-6
"""Room for sums of floats, in units of the bucket: after the wait that `wait_s` returns, the amount fits."""


class TokenBucket:
    """Admits `per_minute` units in a burst, and as many each minute.

    What is charged after the fact (more than was reserved, or used at another edge) may exceed the capacity: a debt
    that drains before anything is admitted, so that the rate holds in the long run.
    """

    __slots__ = ("_at_s", "_used", "capacity")

    def __init__(self, per_minute: int, now_s: float) -> None:
        self.capacity = per_minute
        self._used = 0.0
        self._at_s = now_s

    @property
    def per_s(self) -> float:
        """Units that drain per second."""
        return self.capacity / MINUTE_S

    def used(self, now_s: float) -> float:
        """Units in use: 0 is an untouched bucket, above `capacity` is debt."""
        if now_s > self._at_s:
            self._used = max(0.0, self._used - (now_s - self._at_s) * self.per_s)
            self._at_s = now_s
        return self._used

    def left(self, now_s: float) -> int:
        """Whole units that would be admitted now."""
        return max(0, math.floor(self.capacity - self.used(now_s) + _ROUNDING))

    def wait_s(self, amount: float, now_s: float) -> float:
        """Seconds until `amount` fits: 0 if it does now, infinite if it never will."""
        if amount > self.capacity:
            return math.inf
        missing = self.used(now_s) + amount - self.capacity
        return missing / self.per_s if missing > _ROUNDING else 0.0

    def reset_s(self, now_s: float) -> float:
        """Seconds until the bucket is untouched again."""
        return self.used(now_s) / self.per_s

    def charge(self, amount: float, now_s: float) -> None:
        """Use `amount`, whether it fits or not. A negative amount is given back."""
        self._used = max(0.0, self.used(now_s) + amount)

    def raise_to(self, used: float, now_s: float) -> None:
        """Raise what is used to at least `used`."""
        self._used = max(self.used(now_s), used)

    def resize(self, per_minute: int, now_s: float) -> None:
        """Another capacity and rate from now on. What is used stays used."""
        self.used(now_s)
        self.capacity = per_minute


# One account: the use of a holder's limits.

STALE_S: Final = 5.0
"""Requests in flight at an edge that has not reported them for this long are no longer counted."""

FORGET_S: Final = 60.0
"""Another edge's totals are forgotten this long after its last report of the account."""

CLOSE_S: Final = 30.0
"""Totals of an account without use here for this long begin again. Less than `FORGET_S`: what was forgotten must not come back."""


@lru_cache(maxsize=65_536)
def account_key(holder: str, scope: str) -> bytes:
    """The account's name between edges: neither keys nor tenants are sent."""
    return blake2b(f"{holder}\0{scope}".encode(), digest_size=16).digest()


class PeerUsage(msgspec.Struct):
    """Newest report of an account by one other edge: totals since it opened, and requests in flight."""

    opened_ms: int
    requests: int
    tokens: int
    running: int
    heard_s: float


class Account:
    """Limits, buckets and requests in flight. A bucket is missing where there is no such limit."""

    __slots__ = (
        "_opened_ms", "_peers", "_requests_total", "_tokens_total", "key", "limits", "requests", "running", "tokens",
        "used_s",
    )  # fmt: skip

    def __init__(self, key: bytes, limits: RateLimits, now_s: float) -> None:
        self.key = key
        self.limits = limits
        self.requests = _bucket(limits.requests_per_minute, now_s)
        self.tokens = _bucket(limits.tokens_per_minute, now_s)
        self.running = 0
        self.used_s = now_s
        self._opened_ms = _ms(now_s)
        self._requests_total = 0
        self._tokens_total = 0
        self._peers: dict[str, PeerUsage] = {}

    def set_limits(self, limits: RateLimits, now_s: float) -> None:
        """The limits as they are now. What is used stays used."""
        if limits == self.limits:
            return
        self.limits = limits
        self.requests = _resized(self.requests, limits.requests_per_minute, now_s)
        self.tokens = _resized(self.tokens, limits.tokens_per_minute, now_s)

    def use(self, now_s: float, *, requests: int = 0, tokens: int = 0, running: int = 0) -> None:
        """Use that began (or, negative, was given back) at this edge."""
        if self.running == 0 and now_s - self.used_s > CLOSE_S:
            self._opened_ms, self._requests_total, self._tokens_total = _ms(now_s), 0, 0
        self.used_s = max(self.used_s, now_s)
        self.running += running
        self._requests_total += requests
        self._tokens_total += tokens
        self._charge(requests, tokens, now_s)

    def running_everywhere(self, now_s: float) -> int:
        """Requests in flight at all edges that reported lately."""
        elsewhere = sum(peer.running for peer in self._peers.values() if now_s - peer.heard_s < STALE_S)
        return self.running + elsewhere

    def usage(self, now_s: float) -> AccountUsage:
        """Return what the other edges need to know."""
        limits = self.limits
        return AccountUsage(
            self.key,
            self._opened_ms,
            limits.requests_per_minute,
            limits.tokens_per_minute,
            self._requests_total,
            self._tokens_total,
            self.running,
            round(self.requests.used(now_s), 3) if self.requests else 0.0,
            round(self.tokens.used(now_s), 3) if self.tokens else 0.0,
        )

    def add_report(self, edge: str, usage: AccountUsage, now_s: float, *, heard_whole: bool) -> None:
        """Charge what another edge used since its last report.

        `heard_whole`: every use since that edge opened the account was after this edge began to listen to it. Otherwise
        its totals may be old, and its own estimate of what is in use is taken over instead.
        """
        peer = self._peers.get(edge)
        if peer is not None and peer.opened_ms == usage.opened_ms:
            self._charge_report(usage.requests - peer.requests, usage.tokens - peer.tokens, now_s)
        elif heard_whole:
            self._charge_report(usage.requests, usage.tokens, now_s)
        else:
            if self.requests:
                self.requests.raise_to(min(usage.requests_used, 2.0 * self.requests.capacity), now_s)
            if self.tokens:
                self.tokens.raise_to(min(usage.tokens_used, 2.0 * self.tokens.capacity), now_s)
        self._peers[edge] = PeerUsage(usage.opened_ms, usage.requests, usage.tokens, usage.running, now_s)

    def is_idle(self, now_s: float) -> bool:
        """Return whether forgetting this account changes nothing. Forgets peers that are no longer heard."""
        for edge in [edge for edge, peer in self._peers.items() if now_s - peer.heard_s > FORGET_S]:
            del self._peers[edge]
        buckets = (self.requests, self.tokens)
        return (
            not self.running
            and not self._peers
            and now_s - self.used_s > CLOSE_S
            and all(bucket is None or bucket.used(now_s) == 0.0 for bucket in buckets)
        )

    def _charge_report(self, requests: int, tokens: int, now_s: float) -> None:
        # After a partition one report has the use of minutes: a client must not be locked out for as long.
        most_requests, most_tokens = self.limits.requests_per_minute, self.limits.tokens_per_minute
        self._charge(min(requests, most_requests), min(tokens, most_tokens), now_s)

    def _charge(self, requests: int, tokens: int, now_s: float) -> None:
        if self.requests and requests:
            self.requests.charge(requests, now_s)
        if self.tokens and tokens:
            self.tokens.charge(tokens, now_s)


def _ms(now_s: float) -> int:
    return round(now_s * 1000)


def _bucket(per_minute: int, now_s: float) -> TokenBucket | None:
    return TokenBucket(per_minute, now_s) if per_minute else None


def _resized(bucket: TokenBucket | None, per_minute: int, now_s: float) -> TokenBucket | None:
    if bucket is None or not per_minute:
        return _bucket(per_minute, now_s)
    bucket.resize(per_minute, now_s)
    return bucket


# The holder of limits: a request's API key, or without keys its tenant.

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
        """Return whether the holder has any limits."""
        return self.limits != UNLIMITED or bool(self.model_limits)

    def limits_of(self, model: str) -> Iterator[tuple[str, RateLimits]]:
        """The limits that a request for this model is under, by scope."""
        yield ALL_MODELS, self.limits
        model_limits = self.model_limits.get(model)
        if model_limits is not None:
            yield model, RateLimits(*(getattr(model_limits, name) for name in RateLimits._fields))


def holder_of(principal: Principal, tenant: str, defaults: RateLimits) -> LimitHolder:
    """The holder that a request counts against. Its key's limits replace the edge's defaults, each where it is set."""
    limits = defaults
    if principal.limits != _UNSET:
        principal_limits = principal.limits
        limits = RateLimits(
            *(
                getattr(principal_limits, name) or default
                for name, default in zip(defaults._fields, defaults, strict=True)
            )
        )
    return LimitHolder(principal.credential or f"tenant {tenant}", limits, principal.model_limits)
