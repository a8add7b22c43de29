"""Compiled: sorts rows into chain order, so that blocks of a chain are neighbours.

Parents precede their children, and a block's first child follows it directly: the index's guesses at the next row depend
on that. Only rows of early snapshots need this; the index itself stores chains in order.
"""

from typing import Any

import numpy as np

from headwater.router.index import hash_table
from headwater.router.index.hash_table import AHEAD, NONE, seek
from headwater.router.index.prefetch import SCRATCH, candidates
from headwater.schemas.hashing import U64
from headwater.schemas.jit import kernel

_0 = np.uint64(0)


def chain_order(keys: U64, parents: U64) -> U64:
    """All row numbers in chain order. `keys` and `parents`: uint64, shape (n,); no key is 0.

    Depth first from each block whose parent has no row, in the order of the rows. Blocks that are their own ancestors, which
    no engine produces, come last.
    """
    size = len(keys)
    table: U64 = np.zeros(hash_table.capacity_for(size), np.uint64)
    hash_table.build(table, keys)
    # Row numbers + 1, as in the table; 0: none. 32 bits, since they are read in random order.
    relatives = np.zeros((3, size), np.uint32)
    _relate(table, keys.reshape(1, -1), parents, relatives, np.empty(SCRATCH, np.uint64))
    order: U64 = np.empty(size, np.uint64)
    _walk(relatives, order)
    return order


@kernel
def _relate(table: Any, slab: Any, parents: Any, relatives: Any, rows: Any) -> None:
    """Find each row's parent, its first child, and the next child of its parent."""
    size = parents.shape[0]
    # Backwards, so that children are linked in the order of their rows.
    end = size
    while end > 0:
        start = max(0, end - AHEAD)
        candidates(table, parents[:end], start, rows)
        for number in range(end - 1, start - 1, -1):
            parent = rows[np.uint64(number - start)]
            if parents[number] == _0:
                parent = NONE
            elif parent != NONE and slab[_0, parent] != parents[number]:
                parent = seek(table, slab, parents[number])[0]
            if parent != NONE:
                relatives[0, number] = parent + np.uint64(1)
                relatives[2, number] = relatives[1, parent]
                relatives[1, parent] = number + 1
        end = start


@kernel
def _walk(relatives: Any, order: Any) -> None:
    """Visit all rows depth first."""
    size = order.shape[0]
    placed = 0
    reached = np.zeros(size, np.bool_)
    for root in range(size):
        if relatives[0, root] != 0:
            continue
        row: Any = root
        while True:
            order[placed] = row
            reached[row] = True
            placed += 1
            following = np.int64(relatives[1, row])
            while following == 0 and row != root:
                following = np.int64(relatives[2, row])
                row = np.int64(relatives[0, row]) - 1
            if following == 0:
                break
            row = following - 1
    if placed < size:
        for left in range(size):
            if not reached[left]:
                order[placed] = left
                placed += 1
