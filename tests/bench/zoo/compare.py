"""Cells of the zoo: every replay of one trace, and one policy of ours compared with the best of all others.

Replays of other programs differ from ours in details of their mock engines: one release emits the first token a decode step
earlier. Their times are therefore compared relative to their own round robin, which needs no router, scaled to our round robin.
"""

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from tests.bench.bounds.bound import TraceBounds
from tests.bench.zoo.figures import HIGHER_IS_BETTER, NAMES, Figures

OURS: Final = "headwater"

REFERENCE: Final = "round_robin"

WORSE_MAX: Final = {"ttft_mean": 1.01, "ttft_p99": 1.02, "itl": 1.01, "e2e_mean": 1.01, "e2e_p99": 1.02}
"""Goal: the maximum ratio to the best of all others."""

REFERENCES_AGREE: Final = 0.05
"""If a peer's round robin differs from ours by more than this share in a time, the comparison with it is rough."""


class Row(msgspec.Struct, frozen=True):
    """One replay of a cell's trace: by `headwater`, or by a release of the peer. `served` requests got an answer."""

    replay: str
    policy: str
    figures: Figures
    served: int = 0

    @property
    def label(self) -> str:
        """Its name in tables."""
        return self.policy if self.replay == OURS else f"{self.replay} {self.policy}"


class Best(msgspec.Struct, frozen=True):
    """The best of the others in one figure, scaled to our replay; `ratio` is ours divided by it.

    `deviation`: of its replay's round robin from ours, the greatest of all times, as a share.
    """

    label: str
    value: float
    ratio: float
    deviation: float

    @property
    def rough(self) -> bool:
        """Do the replays differ too much without a router for a close comparison?"""
        return self.deviation > REFERENCES_AGREE


class Cell(msgspec.Struct, frozen=True):
    """One class of traffic at one load of one fleet of `workers`. `rate` is in requests per second.

    `fleet` says how its workers differ, if they do; `not_run` why a replay did not run.
    """

    traffic: str
    load: str
    workers: int
    blocks: int
    requests: int
    rate: float
    rows: list[Row]
    best: dict[str, Best] = {}
    fleet: str = ""
    bounds: TraceBounds | None = None
    not_run: dict[str, str] = {}

    @property
    def name(self) -> str:
        """As printed."""
        return f"{self.traffic}, {self.workers} workers, {self.load}"


def compared(cell: Cell, policy: str) -> Cell:
    """The cell with `policy` of ours compared with the best of the others."""
    mine = next(row for row in cell.rows if (row.replay, row.policy) == (OURS, policy))
    others = [row for row in cell.rows if row is not mine and (row.replay == OURS or row.policy != REFERENCE)]
    best = {}
    for name in NAMES:
        value = getattr(mine.figures, name)
        scaled = [(scale_to_ours(cell, row, name), row) for row in others]
        known = [(found, row) for found, row in scaled if found is not None]
        if value is None or not known:
            continue
        found, row = (max if name in HIGHER_IS_BETTER else min)(known, key=lambda one: one[0])
        if found:
            best[name] = Best(row.label, found, value / found, deviation_of(cell, row.replay))
    return msgspec.structs.replace(cell, best=best)


def scale_to_ours(cell: Cell, row: Row, name: str) -> float | None:
    """A figure as our replay would have it: shares as they are, times relative to the replay's own round robin."""
    value: float | None = getattr(row.figures, name)
    if value is None or row.replay == OURS or name in HIGHER_IS_BETTER:
        return value
    own: float = getattr(_reference(cell, row.replay), name)
    ours: float = getattr(_reference(cell, OURS), name)
    return value * ours / own if own else None


def deviation_of(cell: Cell, replay: str) -> float:
    """How far a replay's round robin is from ours, the greatest of all times, as a share."""
    theirs, ours = _reference(cell, replay), _reference(cell, OURS)
    pairs = [(getattr(theirs, name), getattr(ours, name)) for name in WORSE_MAX]
    return max((abs(value / mine - 1) for value, mine in pairs if mine), default=0.0)


def _reference(cell: Cell, replay: str) -> Figures:
    return next(row.figures for row in cell.rows if (row.replay, row.policy) == (replay, REFERENCE))


def behind(cells: Sequence[Cell]) -> Iterator[str]:
    """What is worse than the best of all others by more than the limits, in words."""
    for cell in cells:
        for name, limit in WORSE_MAX.items():
            best = cell.best.get(name)
            if best and best.ratio > limit:
                rough = f" (rough: its round robin differs by {best.deviation:.0%})" if best.rough else ""
                yield f"{cell.name}: {name} is {best.ratio:.3f} of {best.label}{rough}"
