"""Compiled loops of the prefix index that change it: blocks stored, removed, all of a worker's gone.

Rows lie in the *slab*, uint64 of shape (2 + tiers * words, rows): one line of it per column, so that a column that
nobody wrote to takes no memory and a scan reads only what it asks about. The columns are

    key | parent | tier 0: `words` columns of worker bits | tier 1: … | …

A row with key 0 is free. Free rows below the highest one ever used are a list linked both ways in the parents'
column: (next + 1) << 32 | (previous + 1). Both ways, because a chain takes the row behind its last block if that
is free, wherever in the list it is: neighbours in a chain are neighbours in memory, also after much churn.

`desk` (uint64) holds TOP, the rows ever used, and FREE, the first free row + 1; what is behind them serves to hand things
over: each array costs a call from Python about a tenth of a microsecond, so there are few. `pages` (uint16, slots x pages) counts the
bits that each worker has in each 512 rows: removing a worker looks at no other pages.
"""

from typing import Any

import numpy as np

from headwater.router.lookup import AHEAD, NONE, drop, fetch, seek, tag_of
from headwater.router.scattered import SCRATCH, SHORT_RUN, candidates, touch
from headwater.schemas.kernel import kernel

TOP, FREE, CHAINS = 0, 1, 2
PAGE_BITS = 9
PAD = 72
"""Rows behind the last one that stay free: loops may look at the next row, or the next few, without asking."""

_0, _1, _2, _32 = np.uint64(0), np.uint64(1), np.uint64(2), np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)
_HIGH = np.uint64(0xFFFFFFFF00000000)
_PAGE = np.uint64(PAGE_BITS)


@kernel
def _release(slab: Any, desk: Any, row: Any) -> None:
    """Put a row before the free ones."""
    first = desk[FREE]
    slab[_0, row] = _0
    slab[_1, row] = first << _32
    if first:
        slab[_1, first - _1] = (slab[_1, first - _1] & _HIGH) | (row + _1)
    desk[FREE] = row + _1


@kernel
def _acquire(slab: Any, desk: Any, previous: Any, left: Any) -> Any:
    """A free row: the one behind `previous` if it can be had, else the start of some free rows, else a new one.

    `left`: how many more blocks will want a row. The caller has made sure that there is one.
    """
    first = desk[FREE]
    if first == _0:
        desk[TOP] += _1
        return desk[TOP] - _1
    row = first - _1
    # NONE + 1 is row 0.
    behind = previous + _1
    if previous != NONE and behind < desk[TOP] and slab[_0, behind] == _0:
        row = behind
    elif row + _1 == desk[TOP] or slab[_0, row + _1] != _0:
        # The end of some free rows: blocks that left the first one first freed it last. Start where they began.
        while left > _0 and row > _0 and slab[_0, row - _1] == _0:
            row -= _1
            left -= _1
    links = slab[_1, row]
    after, before = links >> _32, links & _LOW
    if before:
        slab[_1, before - _1] = (slab[_1, before - _1] & _LOW) | after << _32
    else:
        desk[FREE] = after
    if after:
        slab[_1, after - _1] = (slab[_1, after - _1] & _HIGH) | before
    return row


@kernel
def store(
    slab: Any,
    table: Any,
    pages: Any,
    desk: Any,
    slot: int,
    column: int,
    room: int,
    chains: int,
    hashes: Any,
) -> tuple[int, int, int, Any]:
    """A worker holds chains of blocks on a tier; rows are added where needed.

    `column`: where the tier's bits for `slot` are. `room`: rows that may be added. `chains`: how many; their parents and
    lengths are in turn on the desk from CHAINS on, and chain i is the next so many of `hashes`. Behind them go the indices of blocks
    that it held already.
    Returns (rows added, blocks repeated, blocks refused for want of room, nothing of use).
    """
    bits = np.uint64(column)
    bit = _1 << np.uint64(slot % 64)
    repeated = CHAINS + 2 * chains
    added = 0
    again = 0
    refused = 0
    chain = -1
    left = np.uint64(0)
    parent = _0
    row = NONE
    fetched = _0
    for i in range(hashes.shape[0]):
        if i % AHEAD == 0:
            fetched ^= fetch(table, hashes, i)
        while left == _0:
            chain += 1
            parent = desk[CHAINS + 2 * chain]
            left = desk[CHAINS + 2 * chain + 1]
            row = NONE
            if parent != _0 and left != _0:
                row = seek(table, slab, parent)[0]
        left -= _1
        key = hashes[i]
        if row != NONE and slab[_0, row + _1] == key:
            row += _1
        else:
            found, at = seek(table, slab, key)
            if found == NONE:
                if added == room:
                    refused += 1
                    parent = key
                    row = NONE
                    continue
                found = _acquire(slab, desk, row, left)
                slab[_0, found] = key
                slab[_1, found] = parent
                table[at] = tag_of(key) << _32 | (found + _1)
                added += 1
            row = found
        parent = key
        owners = slab[bits, row]
        if owners & bit:
            desk[repeated + again] = i
            again += 1
        else:
            slab[bits, row] = owners | bit
            pages[slot, row >> _PAGE] += 1
    return added, again, refused, fetched


@kernel
def _unheld(slab: Any, row: Any) -> bool:
    """Does nobody hold it, on any tier?"""
    column = _2
    while column < np.uint64(slab.shape[0]):
        if slab[column, row]:
            return False
        column += _1
    return True


@kernel
def remove(
    slab: Any, table: Any, pages: Any, desk: Any, slot: int, column: int, hashes: Any
) -> tuple[int, int, Any]:
    """Worker `slot`, whose bits of a tier are in `column`, no longer holds these blocks there.

    Returns (rows dropped, blocks that it did not hold there, nothing of use).
    """
    bit = _1 << np.uint64(slot % 64)
    bits = np.uint64(column)
    dropped = 0
    absent = 0
    row = NONE
    fetched = _0
    rows = desk[CHAINS : CHAINS + SCRATCH]
    # Candidates are known from block `first` to `known`; `begun`: where the run of neighbours began.
    first = known = 0
    begun = -SHORT_RUN
    for i in range(hashes.shape[0]):
        if i % AHEAD == 0:
            fetched ^= fetch(table, hashes, i)
        key = hashes[i]
        # Evictions come in the order of a chain, or against it.
        if row != NONE and slab[_0, row + _1] == key:
            found = row + _1
        elif row != NONE and row > _0 and slab[_0, row - _1] == key:
            found = row - _1
        else:
            if i >= known and i - begun < SHORT_RUN:
                first, known = i, min(i + AHEAD, hashes.shape[0])
                candidates(table, hashes, i, rows)
                fetched ^= touch(slab, bits, rows, known - first)
            if i < known:
                # Removals meanwhile moved table entries, but no rows. The row may be another's whose tag is the same, or free by now.
                found = rows[i - first]
                if found != NONE and slab[_0, found] != key:
                    found = seek(table, slab, key)[0]
            else:
                found = seek(table, slab, key)[0]
            begun = i
        if found == NONE or not slab[bits, found] & bit:
            absent += 1
            continue
        row = found
        slab[bits, row] &= ~bit
        pages[slot, row >> _PAGE] -= 1
        if _unheld(slab, row):
            drop(table, key, row)
            _release(slab, desk, row)
            dropped += 1
    return dropped, absent, fetched


@kernel
def remove_worker(
    slab: Any, table: Any, pages: Any, desk: Any, words: int, slot: int, blocks: int
) -> tuple[int, Any]:
    """Worker `slot` holds nothing any more: it held `blocks`, counted on each tier.

    Looks at 512 rows for each page in which it has a block. Returns (rows dropped, nothing of use).
    """
    bit = _1 << np.uint64(slot % 64)
    word = np.uint64(2 + slot // 64)
    step = np.uint64(words)
    capacity = np.uint64(table.shape[0])
    columns = np.uint64(slab.shape[0])
    top = int(desk[TOP])
    dropped = 0
    fetched = _0
    for page in range((top + (1 << PAGE_BITS) - 1) >> PAGE_BITS):
        if blocks == 0:
            break
        if pages[slot, page] == 0:
            continue
        blocks -= int(pages[slot, page])
        pages[slot, page] = 0
        first, last = page << PAGE_BITS, min(top, (page + 1) << PAGE_BITS)
        gone = 0
        for number in range(first, last):
            row = np.uint64(number)
            mine = False
            column = word
            while column < columns:
                if slab[column, row] & bit:
                    slab[column, row] &= ~bit
                    mine = True
                column += step
            if mine and _unheld(slab, row):
                fetched ^= table[tag_of(slab[_0, row]) * capacity >> _32]
                gone += 1
        # From the end: the free rows then begin with the first.
        number = last
        while gone > 0:
            number -= 1
            row = np.uint64(number)
            key = slab[_0, row]
            if key != _0 and _unheld(slab, row):
                drop(table, key, row)
                _release(slab, desk, row)
                dropped += 1
                gone -= 1
    return dropped, fetched
