"""Compiled loops that pack a snapshot (`pack`); each is one pass over memory."""

from typing import Any

import numpy as np

from headwater.router.index.update import FREE, PAGE_BITS, TOP
from headwater.schemas.jit import kernel

_0, _1, _32 = np.uint64(0), np.uint64(1), np.uint64(32)


@kernel
def squeeze(slab: Any, column: int, top: int, whole: bool, out: Any) -> int:
    """Copy a column, without free rows unless `whole`; stops at the end of `out`. Returns how many rows are in use."""
    count = 0
    for number in range(top):
        row = np.uint64(number)
        taken = slab[_0, row] != _0
        at = number if whole else count
        if (whole or taken) and at < out.shape[0]:
            out[at] = slab[np.uint64(column), row]
        if taken:
            count += 1
    return count


@kernel
def parents(slab: Any, top: int, whole: bool, at: Any, values: Any) -> int:
    """Parents that are not the previous row, with their positions; a free row has parent 0. Returns how many."""
    length = 0
    place = 0
    before = _0
    for number in range(top):
        row = np.uint64(number)
        key = slab[_0, row]
        if key == _0 and not whole:
            continue
        parent = slab[_1, row] if key != _0 else _0
        if place == 0 or parent != before:
            at[length] = place
            values[length] = parent
            length += 1
        before = key
        place += 1
    return length


@kernel
def runs(slab: Any, column: int, top: int, whole: bool, at: Any, values: Any) -> int:
    """The first value of each run of equal values, with its position. Returns how many."""
    length = 0
    place = 0
    before = _0
    for number in range(top):
        row = np.uint64(number)
        if not whole and slab[_0, row] == _0:
            continue
        value = slab[np.uint64(column), row]
        if place == 0 or value != before:
            at[length] = place
            values[length] = value
            length += 1
        before = value
        place += 1
    return length


@kernel
def fill_parents(slab: Any, top: int, at: Any, values: Any) -> None:
    """Undo `parents`."""
    for number in range(1, top):
        slab[_1, np.uint64(number)] = slab[_0, np.uint64(number - 1)]
    for i in range(at.shape[0]):
        slab[_1, np.uint64(at[i])] = values[i]


@kernel
def fill_runs(slab: Any, column: int, top: int, at: Any, values: Any) -> None:
    """Undo `runs`."""
    for i in range(at.shape[0]):
        last = np.int64(at[i + 1]) if i + 1 < at.shape[0] else top
        for number in range(np.int64(at[i]), last):
            slab[np.uint64(column), np.uint64(number)] = values[i]


@kernel
def link(slab: Any, scratch: Any, top: int) -> int:
    """Rebuild the list of free rows, in ascending order. Returns how many rows are in use."""
    after = _0
    taken = 0
    for number in range(top - 1, -1, -1):
        row = np.uint64(number)
        if slab[_0, row] != _0:
            taken += 1
            continue
        slab[_1, row] = after << _32
        if after:
            slab[_1, after - _1] |= row + _1
        after = row + _1
    scratch[TOP] = top
    scratch[FREE] = after
    return taken


@kernel
def count_pages(slab: Any, words: int, top: int, pages: Any) -> None:
    """Count each worker's bits in each page."""
    for number in range(top):
        row = np.uint64(number)
        for column in range(2, slab.shape[0]):
            bits = slab[np.uint64(column), row]
            slot = (column - 2) % words * 64
            while bits:
                if bits & _1:
                    pages[slot, number >> PAGE_BITS] += 1
                bits >>= _1
                slot += 1
