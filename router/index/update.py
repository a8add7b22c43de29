"""The compiled loops that change the prefix index: store blocks, remove blocks, remove all blocks of a worker.

Rows are in the *slab*, uint64 of shape (2 + tiers * words, rows), one line per column. A column that was never written to
takes no memory, and a scan reads only the columns it needs. The columns are

    key | parent | tier 0: `words` columns of worker bits | tier 1: … | …

A row with key 0 is free. Free rows below the highest one ever used form a doubly linked list in the parents' column:
(next + 1) << 32 | (previous + 1). It is doubly linked because a chain takes the row after its last block if that is free, wherever it is
in the list: neighbours in a chain stay neighbours in memory, also after much churn.

`scratch` (uint64) holds TOP, the number of rows ever used, and FREE, the first free row + 1. From CHAINS on it passes
arguments and results: each array argument adds about a tenth of a microsecond to a call from Python, so there are few.
`pages` (uint16, slots x pages) counts the bits of each worker in each 512 rows: removing a worker visits no other pages.
"""

from typing import Any

import numpy as np

from headwater.router.index.hash_table import (
    AHEAD,
    NONE,
    SCRATCH,
    SHORT_RUN,
    candidates,
    drop,
    fetch,
    seek,
    tag_of,
    touch,
)
from headwater.schemas.jit import kernel

TOP, FREE, CHAINS = 0, 1, 2
PAGE_BITS = 9
PAD = 72
"""Rows after the last one that stay free: loops may read the next few rows without a bounds check."""

_0, _1, _2, _32 = np.uint64(0), np.uint64(1), np.uint64(2), np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)
_HIGH = np.uint64(0xFFFFFFFF00000000)
_PAGE = np.uint64(PAGE_BITS)


@kernel
def _release(slab: Any, scratch: Any, row: Any) -> None:
    """Put a row at the head of the free list."""
    first = scratch[FREE]
    slab[_0, row] = _0
    slab[_1, row] = first << _32
    if first:
        slab[_1, first - _1] = (slab[_1, first - _1] & _HIGH) | (row + _1)
    scratch[FREE] = row + _1


@kernel
def _acquire(slab: Any, scratch: Any, previous: Any, remaining: Any) -> Any:
    """A free row: the one after `previous` if it is free, else the start of a run of free rows, else a new one.

    `remaining`: how many more blocks need a row. The caller ensures that there is one.
    """
    first = scratch[FREE]
    if first == _0:
        scratch[TOP] += _1
        return scratch[TOP] - _1
    row = first - _1
    # NONE + 1 is row 0.
    following = previous + _1
    if previous != NONE and following < scratch[TOP] and slab[_0, following] == _0:
        row = following
    elif row + _1 == scratch[TOP] or slab[_0, row + _1] != _0:
        # The end of a run of free rows: blocks removed in order leave their first row last in the list. Start at the first.
        while remaining > _0 and row > _0 and slab[_0, row - _1] == _0:
            row -= _1
            remaining -= _1
    links = slab[_1, row]
    after, before = links >> _32, links & _LOW
    if before:
        slab[_1, before - _1] = (slab[_1, before - _1] & _LOW) | after << _32
    else:
        scratch[FREE] = after
    if after:
        slab[_1, after - _1] = (slab[_1, after - _1] & _HIGH) | before
    return row


@kernel
def _add(
    slab: Any, table: Any, scratch: Any, key: Any, parent: Any, at: Any, previous: Any, remaining: Any
) -> Any:
    """A new row for a block, with its entry at index `at` of the table. `previous` and `remaining` as in `_acquire`."""
    row = _acquire(slab, scratch, previous, remaining)
    slab[_0, row] = key
    slab[_1, row] = parent
    table[at] = tag_of(key) << _32 | (row + _1)
    return row


@kernel
def _hold(slab: Any, pages: Any, slot: int, bits: Any, bit: Any, row: Any) -> bool:
    """Worker `slot` now holds the row, on the tier whose bits are in `bits`. False if it did already."""
    owners = slab[bits, row]
    if owners & bit:
        return False
    slab[bits, row] = owners | bit
    pages[slot, row >> _PAGE] += 1
    return True


@kernel
def store(
    slab: Any,
    table: Any,
    pages: Any,
    scratch: Any,
    slot: int,
    column: int,
    room: int,
    chains: int,
    hashes: Any,
) -> tuple[int, int, int, Any]:
    """A worker now holds chains of blocks on a tier; rows are added as needed.

    `column` holds the tier's bits of `slot`. At most `room` rows are added. The parents and lengths of the `chains` chains
    alternate in `scratch` from CHAINS on; chain i is the next lengths[i] of `hashes`. After them, `scratch` receives the
    indices of blocks that the worker held already.
    Returns (rows added, blocks repeated, blocks refused for lack of room, a meaningless value).
    """
    bits = np.uint64(column)
    bit = _1 << np.uint64(slot % 64)
    repeated = CHAINS + 2 * chains
    added = 0
    again = 0
    refused = 0
    chain = -1
    remaining = np.uint64(0)
    parent = _0
    row = NONE
    fetched = _0
    for i in range(hashes.shape[0]):
        if i % AHEAD == 0:
            fetched ^= fetch(table, hashes, i)
        while remaining == _0:
            chain += 1
            parent = scratch[CHAINS + 2 * chain]
            remaining = scratch[CHAINS + 2 * chain + 1]
            row = NONE
            if parent != _0 and remaining != _0:
                row = seek(table, slab, parent)[0]
        remaining -= _1
        key = hashes[i]
        if row != NONE and slab[_0, row + _1] == key:
            row += _1
        else:
            block_row, at = seek(table, slab, key)
            if block_row == NONE:
                if added == room:
                    refused += 1
                    parent = key
                    row = NONE
                    continue
                block_row = _add(slab, table, scratch, key, parent, at, row, remaining)
                added += 1
            row = block_row
        parent = key
        if not _hold(slab, pages, slot, bits, bit, row):
            scratch[repeated + again] = i
            again += 1
    return added, again, refused, fetched


@kernel
def _unheld(slab: Any, row: Any) -> bool:
    """Is the row held by no worker, on any tier?"""
    column = _2
    while column < np.uint64(slab.shape[0]):
        if slab[column, row]:
            return False
        column += _1
    return True


@kernel
def remove(
    slab: Any, table: Any, pages: Any, scratch: Any, slot: int, column: int, hashes: Any
) -> tuple[int, int, Any]:
    """Worker `slot` no longer holds these blocks on the tier whose bits are in `column`.

    Returns (rows freed, blocks that it did not hold there, a meaningless value).
    """
    bit = _1 << np.uint64(slot % 64)
    bits = np.uint64(column)
    dropped = 0
    absent = 0
    row = NONE
    fetched = _0
    rows = scratch[CHAINS : CHAINS + SCRATCH]
    # Candidates exist for blocks `first` to `until`; `begun`: where the run of neighbouring rows began.
    first = until = 0
    begun = -SHORT_RUN
    for i in range(hashes.shape[0]):
        if i % AHEAD == 0:
            fetched ^= fetch(table, hashes, i)
        key = hashes[i]
        # Evictions follow a chain, forwards or backwards.
        if row != NONE and slab[_0, row + _1] == key:
            block_row = row + _1
        elif row != NONE and row > _0 and slab[_0, row - _1] == key:
            block_row = row - _1
        else:
            if i >= until and i - begun < SHORT_RUN:
                first, until = i, min(i + AHEAD, hashes.shape[0])
                candidates(table, hashes, i, rows)
                fetched ^= touch(slab, bits, rows, until - first)
            if i < until:
                # Removals since then moved table entries, but no rows. The row may belong to a block with the same tag, or be free.
                block_row = rows[i - first]
                if block_row != NONE and slab[_0, block_row] != key:
                    block_row = seek(table, slab, key)[0]
            else:
                block_row = seek(table, slab, key)[0]
            begun = i
        if block_row == NONE or not slab[bits, block_row] & bit:
            absent += 1
            continue
        row = block_row
        slab[bits, row] &= ~bit
        pages[slot, row >> _PAGE] -= 1
        if _unheld(slab, row):
            drop(table, key, row)
            _release(slab, scratch, row)
            dropped += 1
    return dropped, absent, fetched


@kernel
def remove_worker(
    slab: Any, table: Any, pages: Any, scratch: Any, words: int, slot: int, blocks: int
) -> tuple[int, Any]:
    """Remove all `blocks` of worker `slot`, counted on each tier.

    Visits the 512 rows of each page in which it has a block. Returns (rows freed, a meaningless value).
    """
    bit = _1 << np.uint64(slot % 64)
    word = np.uint64(2 + slot // 64)
    step = np.uint64(words)
    capacity = np.uint64(table.shape[0])
    columns = np.uint64(slab.shape[0])
    top = int(scratch[TOP])
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
            is_held = False
            column = word
            while column < columns:
                if slab[column, row] & bit:
                    slab[column, row] &= ~bit
                    is_held = True
                column += step
            if is_held and _unheld(slab, row):
                fetched ^= table[tag_of(slab[_0, row]) * capacity >> _32]
                gone += 1
        # From the end, so that the free list starts with the first row.
        number = last
        while gone > 0:
            number -= 1
            row = np.uint64(number)
            key = slab[_0, row]
            if key != _0 and _unheld(slab, row):
                drop(table, key, row)
                _release(slab, scratch, row)
                dropped += 1
                gone -= 1
    return dropped, fetched
