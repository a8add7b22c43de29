"""Some seeds run a crowded fleet: most workers are tainted, the others soon busy, and clients of all kinds wait."""

import random
from typing import Final

from headwater.actors.edge.http import Headers
from headwater.router.admission_queue import QueueSettings
from headwater.router.busy import BusyLimits
from headwater.router.waiting import Order, QueueLimits

TAINT: Final = "batch"
UNTAINTED: Final = (0, 3, 7)
"""Numbers of the engines that everybody may use: one of each role where prefill and decode are apart."""


def crowded(seed: int) -> bool:
    """Is it one of those seeds?"""
    return seed % 3 == 2


def queue_of(seed: int) -> QueueSettings | None:
    """When workers are busy in this seed, and how many may wait."""
    if not crowded(seed):
        return None
    draw = random.Random(f"queue {seed}")
    busy = draw.choice([BusyLimits(prefill_tokens=64), BusyLimits(kv=0.05), BusyLimits(kv=0.2, waiting=1)])
    order: Order = "shortest_uncached" if draw.random() < 0.5 else "fcfs"
    limits = QueueLimits(
        requests=draw.choice([2, 8, 64]), tenant_share=0.5, wait_s=draw.choice([2.0, 20.0]), order=order
    )
    return QueueSettings(busy, limits)


def taints_of(seed: int, engine: int) -> tuple[str, ...]:
    """What is kept away from an engine, by its number."""
    return (TAINT,) if crowded(seed) and engine not in UNTAINTED else ()


def wishes(draw: random.Random) -> Headers:
    """Headers of one client of a crowded fleet."""
    headers: Headers = [(b"x-headwater-tenant", draw.choice([b"a", b"a", b"a", b"b"]))]
    if draw.random() < 0.2:
        headers.append((b"x-headwater-tolerates", TAINT.encode()))
    if draw.random() < 0.2:
        headers.append((b"x-headwater-deadline-ms", b"%d" % draw.choice([200, 2_000, 20_000])))
    return headers
