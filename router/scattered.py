"""Compiled: looking ahead where the rows of a chain lie in no order.

A failed guess at the neighbouring row costs two cache misses, one behind the other: the table's entry, then the row that it
names. Block by block that is 300 nanoseconds or more each. So after a run of neighbours that was too short to be worth it
(SHORT_RUN) the next AHEAD blocks are looked up together: first all of their table entries are read, with nothing waiting on them,
then, by the rows these name, all that will be asked of those rows. Loads that do not wait on each other overlap.

An entry names a candidate: 32 bits of the block's name agree. That it is the block is told by the row's key, as ever.
"""

from typing import Any

import numpy as np

from headwater.router.lookup import AHEAD, NONE, fetch, tag_of
from headwater.schemas.kernel import kernel

SHORT_RUN = 4
"""A guess that fails after fewer blocks than this in neighbouring rows makes the loops look ahead."""

SCRATCH = AHEAD + 1
"""Words that `candidates` needs: a row for each block, and one word of no use."""

TOUCHED_COLUMNS = 8

_0, _1, _32 = np.uint64(0), np.uint64(1), np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)
_ALL = np.uint64(0xFFFFFFFFFFFFFFFF)


@kernel
def _probe(table: Any, tag: Any, at: Any, capacity: Any) -> Any:
    """The row of the first entry with this tag, or NONE."""
    while True:
        entry = table[at]
        if entry == _0:
            return NONE
        if entry >> _32 == tag:
            return (entry & _LOW) - _1
        at += _1
        if at == capacity:
            at = _0


@kernel
def candidates(table: Any, hashes: Any, start: int, rows: Any) -> int:
    """The rows that may hold the next AHEAD blocks from `start`, into `rows`; NONE where a block is surely not held.

    Returns how many of the first ones have a candidate.
    """
    capacity = np.uint64(table.shape[0])
    rows[AHEAD] = fetch(table, hashes, start)
    most: int = min(AHEAD, hashes.shape[0] - start)
    leading = most
    for j in range(most):
        tag = tag_of(hashes[np.uint64(start + j)])
        at = tag * capacity >> _32
        row = _probe(table, tag, at, capacity)
        if row == NONE:
            leading = min(leading, j)
        rows[np.uint64(j)] = row
    return leading


@kernel
def matching(slab: Any, rows: Any, hashes: Any, start: int, most: int) -> int:
    """For how many blocks, at most `most`, the candidates are the prompt's blocks from `start`."""
    difference = _0
    for j in range(most):
        difference |= slab[_0, rows[np.uint64(j)]] ^ hashes[np.uint64(start + j)]
    if difference == _0:
        return most
    for j in range(most):
        if slab[_0, rows[np.uint64(j)]] != hashes[np.uint64(start + j)]:
            return j
    return most


@kernel
def all_stay(slab: Any, words: int, rows: Any, length: int, state: Any) -> bool:
    """Do all who hold everything so far (`state`, as `finding.find` keeps it) hold these rows too?"""
    columns = np.uint64(slab.shape[0])
    step = np.uint64(words)
    for word in range(words):
        if state[words + word] == _0:
            continue
        column = np.uint64(2 + word)
        gpu = _ALL
        if column + step >= columns:
            for j in range(length):
                gpu &= slab[column, rows[np.uint64(j)]]
            anywhere = gpu
        else:
            anywhere = _ALL
            for j in range(length):
                row = rows[np.uint64(j)]
                owners = slab[column, row]
                gpu &= owners
                other = column + step
                while other < columns:
                    owners |= slab[other, row]
                    other += step
                anywhere &= owners
        if state[word] & ~gpu or state[words + word] & ~anywhere:
            return False
    return True


@kernel
def touch(slab: Any, column: Any, rows: Any, count: int) -> Any:
    """Read what a removal will want of these rows, all at once. Returns nothing of use."""
    columns = np.uint64(min(slab.shape[0], TOUCHED_COLUMNS))
    total = _0
    for j in range(count):
        row = rows[np.uint64(j)]
        if row != NONE:
            total ^= slab[column, row]
            other = _0
            while other < columns:
                total ^= slab[other, row]
                other += _1
    return total
