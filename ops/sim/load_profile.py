"""Seeds with a crowded fleet: most workers are tainted, the others soon saturated, and queries wait in the queue."""

import random
from typing import Final

from headwater.actors.http.asgi import Headers
from headwater.router.queue.limits import BusyLimits, Order, QueueLimits, QueueSettings

TAINT: Final = "batch"
UNTAINTED: Final = (0, 3, 7)
"""Numbers of the engines without taints: one of each role with disaggregation."""


def crowded(seed: int) -> bool:
    """Does this seed run a crowded fleet?"""
    return seed % 3 == 2


def queue_of(seed: int) -> QueueSettings | None:
    """The saturation thresholds and queue bounds of this seed."""
    if not crowded(seed):
        return None
    draw = random.Random(f"queue {seed}")
    busy = draw.choice(
        [BusyLimits(prefill_tokens=64), BusyLimits(0, kv=0.05), BusyLimits(0, kv=0.2, waiting=1)]
    )
    order: Order = "shortest_uncached" if draw.random() < 0.5 else "fcfs"
    limits = QueueLimits(
        requests=draw.choice([2, 8, 64]), tenant_share=0.5, wait_s=draw.choice([2.0, 20.0]), order=order
    )
    return QueueSettings(busy, limits)


def taints_of(seed: int, engine: int) -> tuple[str, ...]:
    """The taints of an engine, by its number."""
    return (TAINT,) if crowded(seed) and engine not in UNTAINTED else ()


def routing_headers(draw: random.Random) -> Headers:
    """Routing headers of one client of a crowded fleet."""
    headers: Headers = [(b"x-headwater-tenant", draw.choice([b"a", b"a", b"a", b"b"]))]
    if draw.random() < 0.2:
        headers.append((b"x-headwater-tolerates", TAINT.encode()))
    if draw.random() < 0.2:
        headers.append((b"x-headwater-deadline-ms", b"%d" % draw.choice([200, 2_000, 20_000])))
    return headers
