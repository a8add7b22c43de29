"""The distance of our policies from bounds: an unlimited cache, one shared cache, and a fleet that queues as well as any can.

See `ops.whatif.bounds.bound` for why no policy can beat the first and the last.
"""

from collections.abc import Sequence
from typing import Final

from headwater.ops.bench.zoo.compare import OURS, Cell, Row
from headwater.ops.process.text_table import table
from headwater.ops.whatif.bounds.bound import BoundFigures, TraceBounds

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


def bound_table(cells: Sequence[Cell], policy: str) -> str:
    """The figures of a policy divided by each bound, a row for each cell."""
    rows = []
    for cell in cells:
        mine = next((row for row in cell.rows if (row.replay, row.policy) == (OURS, policy)), None)
        if mine is not None and is_bounded(cell, mine):
            rows.append((cell.traffic, cell.workers, cell.load, *_ratios(cell.bounds, mine)))
    return table(("traffic", "workers", "load", *HEADS), rows)


def is_bounded(cell: Cell, row: Row) -> bool:
    """Do the figures have the same requests as the bounds? A peer's engines are others, and refused requests have no times."""
    return row.replay == OURS and cell.bounds is not None and row.served == cell.bounds.requests


def to_queueing(cell: Cell, row: Row) -> tuple[str, str]:
    """Mean TTFT and mean E2E of a row divided by the bound with queueing."""
    if not is_bounded(cell, row) or cell.bounds is None:
        return "-", "-"
    bound = cell.bounds.queueing
    return _shown(row.figures.ttft_mean, bound.ttft_mean), _shown(row.figures.e2e_mean, bound.e2e_mean)


def _ratios(bounds: TraceBounds | None, row: Row) -> list[str]:
    assert bounds is not None
    caches: tuple[BoundFigures, ...] = (bounds.unlimited, bounds.shared)
    every = (*caches, bounds.queueing)
    return [
        *(_shown(row.figures.reuse, one.reuse or 0.0) for one in caches),
        *(_shown(row.figures.ttft_mean, one.ttft_mean) for one in every),
        *(_shown(row.figures.e2e_mean, one.e2e_mean) for one in every),
    ]


def _shown(value: float, bound: float) -> str:
    return f"{value / bound:.3f}" if bound else "-"
