"""What rates, latencies and the use of prefixes are computed from, as arrays.

`Columns` has a line for each request in the order in which they were accepted, started or ended: of a window of 500 requests/s Python would
look at 150,000 objects each time; most have not changed since the last one. `PrefixUses` has a line for each decision with the cached prefix
that it found, up to a number of them.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from headwater.schemas.hashing import U64
from headwater.schemas.routing import Decision

Lines = NDArray[np.void]
"""Structured, with the fields of a `Columns`."""

ItemT = TypeVar("ItemT")

GROWTH: Final = 2


class Columns:
    """Lines of rows that are added in the order of their time, the first field; `line` gives that of a row.

    Each line is made when it is first asked for, and again if its row has changed. All have the fields `accepted_ns`, when their request was
    accepted, and `here`, whether it is shown.
    """

    def __init__(self, dtype: np.dtype[np.void], line: Callable[[Any], tuple[Any, ...]]) -> None:
        self.rows: list[Any] = []
        self._time = str(dtype.names[0]) if dtype.names else ""
        self._line = line
        self._lines: Lines = np.zeros(1_024, dtype)
        self._made = 0

    def add(self, row: Any) -> None:
        """A row whose time has come."""
        self.rows.append(row)

    def change(self, row: Any) -> None:
        """A row that was added has changed."""
        at = bisect_left(self.rows, getattr(row, self._time), key=self._time_of)
        self._made = min(self._made, at)

    def keep(self, keeps: Callable[[Any], bool]) -> None:
        """Drop all other rows."""
        mask = np.fromiter(map(keeps, self.rows), np.bool_, len(self.rows))
        self._lines = self.lines()[mask]
        self._made = len(self._lines)
        self.rows = list(compress(self.rows, mask.tolist()))

    def lines(self) -> Lines:
        """All lines."""
        count = len(self.rows)
        if count > len(self._lines):
            grown = np.zeros(GROWTH * count, self._lines.dtype)
            grown[: self._made] = self._lines[: self._made]
            self._lines = grown
        if count > self._made:
            new_lines = [self._line(row) for row in self.rows[self._made :]]
            self._lines[self._made : count] = np.array(new_lines, self._lines.dtype)
            self._made = count
        return self._lines[:count]

    def between(self, from_ns: int, to_ns: int) -> Lines:
        """The lines after one time and until another."""
        lines = self.lines()[self.places_between(from_ns, to_ns)]
        return lines if lines["here"].all() else lines[lines["here"]]

    def rows_between(self, from_ns: int, to_ns: int, most: int | None = None) -> Sequence[Any]:
        """The rows after one time and until another; of more than `most` some, evenly spaced."""
        places = self.places_between(from_ns, to_ns)
        is_present = self.lines()[places]["here"]
        selected = (
            range(places.start, places.stop)
            if is_present.all()
            else (np.flatnonzero(is_present) + places.start).tolist()
        )
        return [self.rows[at] for at in (spread(selected, most) if most else selected)]

    def places_between(self, from_ns: int, to_ns: int) -> slice:
        """Where the rows after one time and until another are."""
        start, end = np.searchsorted(self.lines()[self._time], (from_ns, to_ns), side="right").tolist()
        return slice(start, end)

    def _time_of(self, row: Any) -> int:
        time_ns: int = getattr(row, self._time)
        return time_ns


def spread(elements: Sequence[ItemT], most: int) -> Sequence[ItemT]:
    """At most so many of some, evenly spaced."""
    return elements[:: -(-len(elements) // most)] if len(elements) > most else elements


USES_MAX: Final = 500_000
"""Decisions kept (24 bytes each); beyond, the oldest tenth is dropped."""


class Uses(NamedTuple):
    """The deepest block of each prompt that a worker had when it was decided, and when that was (the router's clock, in ns)."""

    blocks: U64
    times_ns: NDArray[np.int64]


class PrefixUses:
    """Takes the decisions of a pool in the order of their positions. Those whose prompt no worker had a block of are left out."""

    def __init__(self) -> None:
        self._positions = array("q")
        self._blocks = array("Q")
        self._times_ns = array("q")

    def decide(self, decision: Decision, position: int) -> None:
        """Take a decision that is stored at a position. The second leg of a request, and what is encoded, uses no prefix again."""
        if not decision.deepest or decision.leg == "decode" or "encode" in decision.constraints.needs:
            return
        for column, value in zip(
            self._columns(), (position, decision.deepest, decision.wall_ns), strict=True
        ):
            column.append(value)
        if len(self._positions) > USES_MAX:
            for column in self._columns():
                del column[: USES_MAX // 10]

    def _columns(self) -> tuple["array[Any]", ...]:
        return self._positions, self._blocks, self._times_ns

    def between(self, from_ns: int, position: int) -> Uses:
        """The uses by decisions after a time that are stored up to a position."""
        until = bisect_right(self._positions, position)
        blocks = np.array(self._blocks[:until], np.uint64)
        times_ns = np.array(self._times_ns[:until], np.int64)
        recent = times_ns > from_ns
        return Uses(blocks[recent], times_ns[recent])
