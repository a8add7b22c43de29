"""The whole benchmark: the intake alone, then a running edge."""

from headwater.ops.bench.report import Report
from tests.bench.media import event_loop, running_edge
from tests.bench.media.picture import SIDE


async def bench() -> Report:
    """See the package."""
    return Report(
        "media",
        {
            "image": f"PNG, {SIDE} x {SIDE}, 20.3 MB",
            "intake": f"{event_loop.ROUNDS} images one at a time, {event_loop.ROUNDS} {event_loop.AT_ONCE} at a time",
            "edge": f"{running_edge.STREAMS} streams of other clients; {running_edge.ROUNDS} images one at a time by each API",
            "probe": f"every {event_loop.PROBE_S * 1000:g} ms",
            "clients, server, router and engines share": "this machine",
        },
        [*await event_loop.measure(), *await running_edge.measure()],
    )
