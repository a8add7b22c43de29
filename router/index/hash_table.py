"""Compiled: the hash table from block hashes to rows. It is used only where a guess at the neighbouring row fails.

Open addressing over entries of 8 bytes. An entry is

    tag (32 bits of the block's hash, mixed) << 32  |  row + 1

and 0 is empty. A tag's home is `tag * capacity >> 32`: any capacity is possible, so the table grows in small steps instead of
doubling. Entries keep their order when it grows, so growing is one sequential pass over both tables that does not read the
rows. A removal shifts later entries back: there are no tombstones, and a table does not degrade.

Loops over many blocks are fast because cache misses overlap. Probing entry after entry does not overlap them by itself: each
mispredicted branch discards the loads in flight after it. So the homes of the next blocks are read first (`fetch`), with
nothing depending on them, and are in the nearest cache when they are examined. Indices are unsigned: numba
then omits its check for negative ones.
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
    wanted = tag << _32 | (row + _1)
    while table[hole] != wanted:
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
