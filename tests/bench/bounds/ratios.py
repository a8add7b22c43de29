"""Figures of a run divided by its bounds, as tables show them."""

from typing import Final

from tests.bench.bounds.bound import BoundFigures, TraceBounds

HEADS: Final = (
    "reuse/unlimited",
    "reuse/shared",
    "TTFT/unlimited",
    "TTFT/shared",
    "TTFT/queueing",
    "E2E/unlimited",
    "E2E/shared",
    "E2E/queueing",
)

NOTE: Final = (
    "unlimited: an unlimited cache, no queueing. shared: one LRU cache of the size of all workers' together, no queueing. queueing: an unlimited "
    "cache, and work that is divided among all workers at will, shortest first. No policy has more reuse than unlimited, or a lower mean than "
    "unlimited and queueing; shared is a reference."
)


def bound_ratios(bounds: TraceBounds, reuse: float, ttft_mean: float, e2e_mean: float) -> list[str]:
    """Figures divided by each bound, in the order of `HEADS`. Times are milliseconds."""
    caches: tuple[BoundFigures, ...] = (bounds.unlimited, bounds.shared)
    every = (*caches, bounds.queueing)
    return [
        *(show_ratio(reuse, one.reuse or 0.0) for one in caches),
        *(show_ratio(ttft_mean, one.ttft_mean) for one in every),
        *(show_ratio(e2e_mean, one.e2e_mean) for one in every),
    ]


def show_ratio(value: float, bound: float) -> str:
    """A figure divided by its bound; "-" where there is none."""
    return f"{value / bound:.3f}" if bound else "-"
