"""Compiled: lookahead for chains whose rows are scattered.

A failed guess at the neighbouring row costs two dependent cache misses: the table entry, then the row that it refers to. For one
block at a time that is at least 300 nanoseconds each. So after a run of neighbours that was too short (SHORT_RUN), the
next AHEAD blocks are looked up together: first all their table entries are read, then all columns of the rows that they
refer to. Loads that do not depend on each other overlap.

An entry yields a candidate: 32 bits of the block's hash agree. The row's key confirms it.
"""

from typing import Any

import numpy as np

from headwater.router.index.hash_table import AHEAD, NONE, fetch, tag_of
from headwater.schemas.jit import kernel

SHORT_RUN = 4
"""Lookahead starts when a guess fails after fewer neighbouring rows than this."""

SCRATCH = AHEAD + 1
"""Words that `candidates` needs: a row for each block, and one unused."""

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
    """Write the rows that may hold the next AHEAD blocks from `start` to `rows`; NONE: the block is not in the index.

    Returns the number of leading blocks that have a candidate.
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
    """How many leading candidates, at most `most`, hold the prompt's blocks from `start`."""
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
    """Do all workers that match so far (`state`, as in `match.find`) hold these rows too?"""
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
    """Prefetch the columns of these rows that a removal reads. The result is meaningless."""
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
