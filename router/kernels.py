"""Compiled loops of the prefix index.

The table is one uint64 array of shape (capacity, 2 + tiers * words), capacity a power of two. A row is

    key | parent | tier 0: `words` words of worker bits | tier 1: … | …

with key 0 for an empty row. Collisions go to the next row (linear probing); a removal shifts later rows back,
so there are no tombstones and a table never degrades. With up to 64 workers and two tiers a row is 32 bytes:
one cache line holds two, and a lookup touches one.

Indices are unsigned on purpose: numba then leaves out its check for negative ones.
"""

from typing import Any

import numpy as np

from headwater.schemas.kernel import kernel

_0, _1, _2, _32 = np.uint64(0), np.uint64(1), np.uint64(2), np.uint64(32)
_MIX = np.uint64(0x9E3779B97F4A7C15)
_ALL = np.uint64(0xFFFFFFFFFFFFFFFF)

AHEAD = 64


@kernel
def _fetch(table: Any, mask: Any, hashes: Any, start: int, stop: int) -> Any:
    """Read the home rows of some blocks with nothing waiting on them, so that the misses overlap.

    Probing row after row does not do that by itself: each mispredicted probe throws away the loads that
    were under way behind it. The sum is returned only so that the compiler keeps the loads.
    """
    total = _0
    for i in range(start, stop):
        key = hashes[i]
        total += table[(key ^ (key >> _32)) & mask, _0]
    return total


@kernel
def store(
    table: Any, mask: Any, parent: Any, hashes: Any, column: Any, bit: Any, repeated: Any, sink: Any
) -> tuple[int, int]:
    """Set `bit` in `column` for a chain of blocks behind `parent`, adding rows where needed.

    Indices of blocks that had the bit already go to `repeated`. Returns (rows added, blocks repeated). The
    caller has made sure that the table has room.
    """
    added = 0
    again = 0
    previous = parent
    for i in range(hashes.shape[0]):
        if i % AHEAD == 0:
            sink[0] = _fetch(table, mask, hashes, i, min(i + AHEAD, hashes.shape[0]))
        key = hashes[i]
        at = (key ^ (key >> _32)) & mask
        while table[at, _0] != key:
            if table[at, _0] == _0:
                table[at, _0] = key
                table[at, _1] = previous
                added += 1
                break
            at = (at + _1) & mask
        owners = table[at, column]
        if owners & bit:
            repeated[again] = i
            again += 1
        else:
            table[at, column] = owners | bit
        previous = key
    return added, again


@kernel
def _drop_row(table: Any, mask: Any, hole: Any) -> None:
    """Empty row `hole`, shifting back the rows that were pushed past it."""
    width = table.shape[1]
    at = hole
    while True:
        at = (at + _1) & mask
        key = table[at, _0]
        if key == _0:
            break
        home = (key ^ (key >> _32)) & mask
        # May the row move? Only if its home is not between the hole and where it stands.
        if ((at - home) & mask) >= ((at - hole) & mask):
            for column in range(width):
                table[hole, column] = table[at, column]
            hole = at
    for column in range(width):
        table[hole, column] = _0


@kernel
def remove(table: Any, mask: Any, hashes: Any, column: Any, bit: Any, sink: Any) -> tuple[int, int]:
    """Clear `bit` in `column` for each block. Returns (rows dropped, blocks that did not have the bit)."""
    dropped = 0
    absent = 0
    width = table.shape[1]
    for i in range(hashes.shape[0]):
        if i % AHEAD == 0:
            sink[0] = _fetch(table, mask, hashes, i, min(i + AHEAD, hashes.shape[0]))
        key = hashes[i]
        at = (key ^ (key >> _32)) & mask
        while table[at, _0] != key and table[at, _0] != _0:
            at = (at + _1) & mask
        if table[at, _0] == _0 or not table[at, column] & bit:
            absent += 1
            continue
        table[at, column] &= ~bit
        owned = _0
        for other in range(2, width):
            owned |= table[at, other]
        if owned == _0:
            _drop_row(table, mask, at)
            dropped += 1
    return dropped, absent


@kernel
def remove_worker(table: Any, mask: Any, words: int, word: int, bit: Any) -> tuple[int, int]:
    """Clear a worker's bit everywhere. Returns (rows dropped, bits cleared)."""
    dropped = 0
    cleared = 0
    width = table.shape[1]
    at = 0
    while at < table.shape[0]:
        if table[at, 0] != _0:
            hit = False
            owned = _0
            for column in range(2, width):
                if (column - 2) % words == word and table[at, column] & bit:
                    table[at, column] &= ~bit
                    cleared += 1
                    hit = True
                owned |= table[at, column]
            if hit and owned == _0:
                _drop_row(table, mask, np.uint64(at))
                dropped += 1
                # Another row may have moved here: look at it again.
                continue
        at += 1
    return dropped, cleared


@kernel
def _note_drops(dropped: Any, base: int, depth: int, out: Any) -> None:
    worker = base
    while dropped:
        if dropped & _1:
            out[worker] = depth
        dropped >>= _1
        worker += 1


@kernel
def find(table: Any, mask: Any, words: int, hashes: Any, present: Any, depths: Any, sink: Any) -> int:
    """How far each worker holds the prompt from its start.

    `present` has `words` words of worker bits to ask about. `depths` has shape (2, 64 * words), zeroed by
    this function: row 0 counts blocks on tier 0 (GPU), row 1 blocks on any tier. Returns the deepest of row 1.
    """
    tiers = (table.shape[1] - 2) // words
    depths[:, :] = 0
    deepest = 0
    for word in range(words):
        gpu = present[word]
        anywhere = present[word]
        gpu_column = np.uint64(2 + word)
        i = 0
        while i < hashes.shape[0] and anywhere != _0:
            if i % AHEAD == 0:
                sink[0] = _fetch(table, mask, hashes, i, min(i + AHEAD, hashes.shape[0]))
            key = hashes[i]
            at = (key ^ (key >> _32)) & mask
            while table[at, _0] != key and table[at, _0] != _0:
                at = (at + _1) & mask
            on_gpu = table[at, gpu_column] if table[at, _0] == key else _0
            owners = on_gpu
            if table[at, _0] == key:
                for tier in range(1, tiers):
                    owners |= table[at, np.uint64(2 + tier * words + word)]
            if gpu & ~on_gpu:
                _note_drops(gpu & ~on_gpu, word * 64, i, depths[0])
                gpu &= on_gpu
            if anywhere & ~owners:
                _note_drops(anywhere & ~owners, word * 64, i, depths[1])
                anywhere &= owners
            i += 1
        _note_drops(gpu, word * 64, i, depths[0])
        _note_drops(anywhere, word * 64, i, depths[1])
        for worker in range(word * 64, word * 64 + 64):
            if depths[1, worker] > deepest:
                deepest = depths[1, worker]
    return deepest


@kernel
def path(table: Any, mask: Any, deepest: Any, out: Any) -> int:
    """The chain of hashes from the start of a prompt to `deepest`, by parents, into the end of `out`.

    Returns its length; -1 if a parent is missing or the chain is longer than `out`.
    """
    key = deepest
    length = 0
    while key != _0:
        if length == out.shape[0]:
            return -1
        at = (key ^ (key >> _32)) & mask
        while table[at, _0] != key and table[at, _0] != _0:
            at = (at + _1) & mask
        if table[at, _0] == _0:
            # A seeded root (LoRA, salt) is no row: the chain may end at it, but never start there.
            return length if length else -1
        length += 1
        out[out.shape[0] - length] = key
        key = table[at, _1]
    return length


@kernel
def rehash(old: Any, old_words: int, new: Any, new_words: int) -> None:
    """Copy all rows into an empty table that is larger, has more words or has more tiers."""
    mask = np.uint64(new.shape[0] - 1)
    tiers = (old.shape[1] - 2) // old_words
    for row in range(old.shape[0]):
        key = old[row, 0]
        if key == _0:
            continue
        at = (key ^ (key >> _32)) & mask
        while new[at, _0] != _0:
            at = (at + _1) & mask
        new[at, _0] = key
        new[at, _1] = old[row, 1]
        for tier in range(tiers):
            for word in range(old_words):
                new[at, np.uint64(2 + tier * new_words + word)] = old[row, 2 + tier * old_words + word]


@kernel
def digest(table: Any, words: int) -> Any:
    """A number that depends on what the table holds and not on where its rows lie."""
    total = _0
    for row in range(table.shape[0]):
        if table[row, 0] == _0:
            continue
        state = table[row, 0] * _MIX ^ table[row, 1]
        state ^= state >> _32
        for column in range(2, table.shape[1]):
            bits = table[row, column]
            if bits:
                # Tier and word, not column: a table that was widened on the way holds the same.
                place = np.uint64(((column - 2) // words) * 65536 + (column - 2) % words + 1)
                state += (bits ^ place * _MIX) * _MIX
                state ^= state >> _32
                state *= _MIX
        total += state ^ (state >> _32)
    return total
