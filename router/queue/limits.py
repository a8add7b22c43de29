"""Limits of the router's admission queue: when a worker is saturated, and how much may wait. Types and defaults only.

Light to import: the command line reads its defaults and descriptions from here.
"""

from typing import Annotated, Literal, NamedTuple

from msgspec import Meta

Order = Literal["fcfs", "shortest_uncached"]


class BusyLimits(NamedTuple):
    """A worker above any of these limits is saturated: it gets no request that can wait or run elsewhere. 0: no limit."""

    prefill_tokens: Annotated[
        int,
        Meta(
            ge=0,
            description="a worker is saturated above this many prompt tokens routed to it and not yet computed; "
            "0 disables (default: 16 scheduler steps of 8,192 tokens)",
        ),
    ] = 131_072
    kv: Annotated[
        float,
        Meta(
            ge=0,
            description="a worker is saturated above this share of KV blocks in use by its requests, such as 0.9 "
            "(shared blocks count once per request); 0 disables",
        ),
    ] = 0.0
    waiting: int = 0
    """A worker is saturated above this many requests in its engine's own queue; 0 disables."""


class QueueLimits(NamedTuple):
    """Bounds of one router's queue.

    A prompt with more tokens than a bound allows may wait if it is the only one.
    """

    requests: Annotated[
        int, Meta(ge=0, description="maximum queued requests per router; beyond it clients get 429 or 503")
    ] = 4_096
    tokens: int = 33_554_432
    """Maximum queued prompt tokens per router."""
    tenant_share: Annotated[
        float,
        Meta(
            gt=0,
            le=1,
            description="share of both maxima that one tenant may use (the credential's, else x-headwater-tenant, else a digest of the API key)",
        ),
    ] = 0.5
    wait_s: Annotated[float, Meta(gt=0, description="maximum time a request may be queued, in seconds")] = (
        120.0
    )
    order: Annotated[
        Order,
        Meta(
            description="order within one tenant: first come first served, or fewest uncached prompt tokens first"
        ),
    ] = "fcfs"
    ageing_tokens_s: float = 4_096.0
    """Aging rate for shortest_uncached, tokens/s: a request with U uncached tokens waits at most U / rate seconds before it is served in arrival order."""


class QueueSettings(NamedTuple):
    """Saturation limits of the workers, and bounds of the queue."""

    busy: BusyLimits = BusyLimits()
    limits: QueueLimits = QueueLimits()
