"""The hash table from block hashes to rows, compiled. It is used only where a guess at the neighbouring row fails.

The table uses open addressing over entries of 8 bytes. An entry is

    tag (32 bits of the block's hash, mixed) << 32  |  row + 1

and 0 is empty. A tag's home is `tag * capacity >> 32`: any capacity is possible, so the table grows in small steps instead of
doubling. Entries keep their order when it grows, so growing is one sequential pass over both tables that does not read the
rows. A removal shifts later entries back: there are no tombstones, and a table does not degrade.

Loops over many blocks are fast because cache misses overlap. Probing entry after entry does not overlap them by itself: each
mispredicted branch discards the loads in flight after it. So the homes of the next blocks are read first (`fetch`), with
nothing depending on them, and are in the nearest cache when they are examined. Indices are unsigned: numba
then omits its check for negative ones.

A failed guess at the neighbouring row costs two dependent cache misses: the table entry, then the row that it refers to. For one
block at a time that is at least 300 nanoseconds each. So after a run of neighbours that was too short (SHORT_RUN), the
next AHEAD blocks are looked up together: first all their table entries are read, then all columns of the rows that they
refer to. Loads that do not depend on each other overlap.

An entry yields a candidate: 32 bits of the block's hash agree. The row's key confirms it.
"""

from typing import Any

import numpy as np

from headwater.schemas.jit import kernel

NONE = np.uint64(0xFFFFFFFFFFFFFFFF)
"""No row."""

AHEAD = 64
FILL_MAX = 0.8

_0, _1, _32 = np.uint64(0), np.uint64(1), np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)
_MIX = np.uint64(0x9E3779B1)


def capacity_for(rows: int) -> int:
    """Entries of a table for `rows` rows."""
    return int(rows / FILL_MAX) + 1


@kernel
def tag_of(key: Any) -> Any:
    """32 well-mixed bits of a block's hash, also for small or regular numbers."""
    return (((key ^ (key >> _32)) & _LOW) * _MIX) & _LOW


@kernel
def fetch(table: Any, hashes: Any, start: int) -> Any:
    """Prefetch the homes of the next blocks. The result only keeps the compiler from removing the reads."""
    capacity = np.uint64(table.shape[0])
    total = _0
    for i in range(start, min(start + AHEAD, hashes.shape[0])):
        total ^= table[tag_of(hashes[i]) * capacity >> _32]
    return total


@kernel
def seek(table: Any, slab: Any, key: Any) -> tuple[Any, Any]:
    """(row of `key` or NONE, its table index or that of the empty entry where it belongs)."""
    capacity = np.uint64(table.shape[0])
    tag = tag_of(key)
    at = tag * capacity >> _32
    while True:
        entry = table[at]
        if entry == _0:
            return NONE, at
        if entry >> _32 == tag:
            row = (entry & _LOW) - _1
            if slab[_0, row] == key:
                return row, at
        at += _1
        if at == capacity:
            at = _0


@kernel
def drop(table: Any, key: Any, row: Any) -> None:
    """Remove the entry of a block whose row is known, shifting back entries that were displaced by it."""
    capacity = np.uint64(table.shape[0])
    tag = tag_of(key)
    hole = tag * capacity >> _32
    target = tag << _32 | (row + _1)
    while table[hole] != target:
        hole += _1
        if hole == capacity:
            hole = _0
    at = hole
    while True:
        at += _1
        if at == capacity:
            at = _0
        entry = table[at]
        if entry == _0:
            break
        home = (entry >> _32) * capacity >> _32
        # The entry may move only if its home is not between the hole and its place.
        from_home = at - home if at >= home else at + capacity - home
        from_hole = at - hole if at >= hole else at + capacity - hole
        if from_home >= from_hole:
            table[hole] = entry
            hole = at
    table[hole] = _0


@kernel
def regrow(old: Any, new: Any) -> None:
    """Copy all entries into an empty table of another capacity."""
    capacity = np.uint64(new.shape[0])
    for index in range(old.shape[0]):
        entry = old[index]
        if entry != _0:
            at = (entry >> _32) * capacity >> _32
            while new[at] != _0:
                at += _1
                if at == capacity:
                    at = _0
            new[at] = entry


@kernel
def build(table: Any, keys: Any) -> Any:
    """Fill an empty table from the keys of all rows; 0: no row. The result is meaningless."""
    capacity = np.uint64(table.shape[0])
    fetched = _0
    for row in range(keys.shape[0]):
        if row % AHEAD == 0:
            fetched ^= fetch(table, keys, row)
        key = keys[row]
        if key != _0:
            tag = tag_of(key)
            at = tag * capacity >> _32
            while table[at] != _0:
                at += _1
                if at == capacity:
                    at = _0
            table[at] = tag << _32 | np.uint64(row + 1)
    return fetched


# Lookahead for chains whose rows are scattered.

SHORT_RUN = 4
"""Lookahead starts when a guess fails after fewer neighbouring rows than this."""

SCRATCH = AHEAD + 1
"""Words that `candidates` needs: a row for each block, and one unused."""

TOUCHED_COLUMNS = 8

_0, _1, _32 = np.uint64(0), np.uint64(1), np.uint64(32)
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
    """Return how many leading candidates, at most `most`, hold the prompt's blocks from `start`."""
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
