"""The distance of our policies from bounds: an unlimited cache, one shared cache, and a fleet that queues as well as any can.

See `ops.whatif.bounds.bound` for why no policy can beat the first and the last.
"""

from collections.abc import Sequence

from headwater.ops.terminal import table
from tests.bench.bounds.ratios import HEADS, bound_ratios, show_ratio
from tests.bench.zoo.compare import OURS, Cell, Row


def bound_table(cells: Sequence[Cell], policy: str) -> str:
    """The figures of a policy divided by each bound, a row for each cell."""
    rows = []
    for cell in cells:
        mine = next((row for row in cell.rows if (row.replay, row.policy) == (OURS, policy)), None)
        if mine is not None and is_bounded(cell, mine):
            assert cell.bounds is not None
            found = mine.figures
            ratios = bound_ratios(cell.bounds, found.reuse, found.ttft_mean, found.e2e_mean)
            rows.append((cell.traffic, cell.workers, cell.load, *ratios))
    return table(("traffic", "workers", "load", *HEADS), rows)


def is_bounded(cell: Cell, row: Row) -> bool:
    """Do the figures have the same requests as the bounds? A peer's engines are others, and refused requests have no times."""
    return row.replay == OURS and cell.bounds is not None and row.served == cell.bounds.requests


def to_queueing(cell: Cell, row: Row) -> tuple[str, str]:
    """Mean TTFT and mean E2E of a row divided by the bound with queueing."""
    if not is_bounded(cell, row) or cell.bounds is None:
        return "-", "-"
    bound = cell.bounds.queueing
    return show_ratio(row.figures.ttft_mean, bound.ttft_mean), show_ratio(
        row.figures.e2e_mean, bound.e2e_mean
    )
