"""API keys: who a client is, what it may do and how much of it. KV bucket, one key per API key. The secret is not in it."""

from typing import Final, Literal, get_args

import msgspec

EVERY: Final = "*"
"""In a list of models or endpoints: all of them, those of the future too."""

Endpoint = Literal[
    "chat",
    "completions",
    "responses",
    "conversations",
    "messages",
    "embeddings",
    "classify",
    "score",
    "rerank",
    "audio",
    "images",
    "videos",
    "tokenize",
    "detokenize",
]
"""Endpoints that a key may be limited to, by the first segment of their path after the version."""

ENDPOINTS: Final[tuple[Endpoint, ...]] = get_args(Endpoint)

Permission = Literal["admin", "metrics", "tier", "worker", "toleration", "policy", "priority"]
"""What a key may do beyond calling models: administer, read metrics, override a decision of the router."""

PERMISSIONS: Final[dict[Permission, str]] = {
    "admin": "administer the edge",
    "metrics": "read /metrics",
    "tier": "choose the tier of workers (x-headwater-tier)",
    "worker": "choose the worker or its engine (x-headwater-worker, x-headwater-engine)",
    "toleration": "tolerate taints of workers (x-headwater-tolerates)",
    "policy": "choose the routing policy and its temperature (x-headwater-policy, x-headwater-router-temperature)",
    "priority": "choose the priority of requests (priority)",
}


class Scopes(msgspec.Struct, frozen=True):
    """What a credential permits. A name that is not listed is not permitted."""

    models: tuple[str, ...] = (EVERY,)
    endpoints: tuple[str, ...] = (EVERY,)
    permissions: tuple[str, ...] = ()
    """Each a `Permission`, or one of a later release, which this one ignores."""


class UsageLimits(msgspec.Struct, frozen=True):
    """How much of the fleet a credential may use. 0: no limit."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    """Tokens of prompts and outputs."""
    concurrent_requests: int = 0
    context_tokens: int = 0
    """Tokens of one prompt and its output."""


class SecretDigest(msgspec.Struct, frozen=True):
    """A digest of a key's secret, in hex. It is accepted until `until_s` (Unix time); 0: as long as the key."""

    digest: str
    until_s: int = 0


class ApiKey(msgspec.Struct, frozen=True, kw_only=True):
    """One API key. Stored as JSON, so that people can read it with the stock `nats` tool.

    Times are in seconds of Unix time; `expires_s` 0: never. `digests` are several while a rotated secret is still
    accepted. `model_limits` are limits for one model, besides `limits` for all of the key's requests.
    """

    id: str
    name: str
    tenant: str
    digests: tuple[SecretDigest, ...]
    created_s: int
    expires_s: int = 0
    scopes: Scopes = Scopes()
    limits: UsageLimits = UsageLimits()
    model_limits: dict[str, UsageLimits] = {}
    cache_sharing: bool = False
    """Whether its requests share cached prompts with other tenants, for system prompts that the operator publishes."""
