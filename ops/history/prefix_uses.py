"""Which cached prefixes the decisions of a pool found: in columns, a row for each decision, up to a number of them."""

from array import array
from bisect import bisect_right
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headwater.schemas.events.route import Decision
from headwater.schemas.hashing import U64

USES_MAX: Final = 500_000
"""Decisions kept (24 bytes each); beyond, the oldest tenth is dropped."""


class Uses(NamedTuple):
    """The deepest block of each prompt that a worker had when it was decided, and when that was (the router's clock, in ns)."""

    blocks: U64
    times_ns: NDArray[np.int64]


class PrefixUses:
    """Takes the decisions of a pool in the order of their positions. Those whose prompt no worker had a block of are left out."""

    def __init__(self, uses_max: int = USES_MAX) -> None:
        self._positions = array("q")
        self._blocks = array("Q")
        self._times_ns = array("q")
        self._uses_max = uses_max

    def decide(self, decision: Decision, position: int) -> None:
        """Take a decision that is stored at a position. The second leg of a request, and what is encoded, uses no prefix again."""
        if not decision.deepest or decision.leg == "decode" or "encode" in decision.constraints.needs:
            return
        for column, value in zip(
            self._columns(), (position, decision.deepest, decision.wall_ns), strict=True
        ):
            column.append(value)
        if len(self._positions) > self._uses_max:
            for column in self._columns():
                del column[: max(1, self._uses_max // 10)]

    def _columns(self) -> tuple["array[Any]", ...]:
        return self._positions, self._blocks, self._times_ns

    def between(self, from_ns: int, position: int) -> Uses:
        """The uses by decisions after a time that are stored up to a position."""
        until = bisect_right(self._positions, position)
        blocks = np.array(self._blocks[:until], np.uint64)
        times_ns = np.array(self._times_ns[:until], np.int64)
        recent = times_ns > from_ns
        return Uses(blocks[recent], times_ns[recent])
