"""Compiled loops of the prefix index.

The table is one uint64 array of shape (capacity, 2 + tiers * words), capacity a power of two. A row is

    key | parent | tier 0: `words` words of worker bits | tier 1: … | …

with key 0 for an empty row. A key's home is an even row, so that with up to 64 workers and two tiers (rows of
32 bytes) home and next row share a cache line; further collisions go on to the following rows. A removal shifts
later rows back: there are no tombstones, and a table never degrades.

What makes these loops fast is that cache misses overlap. Probing row after row does not do that by itself: each
mispredicted branch throws away the loads under way behind it. So the home rows of the next blocks are read
first, with nothing waiting on them (`_fetch`), and are in the nearest cache when they are examined. Arguments are few and plain, because each array costs a call from Python about a tenth of a microsecond.
Indices are unsigned: numba then leaves out its check for negative ones.
"""

from typing import Any

import numpy as np

from headwater.schemas.kernel import kernel

_0, _1, _2, _32 = np.uint64(0), np.uint64(1), np.uint64(2), np.uint64(32)
_MIX = np.uint64(0x9E3779B97F4A7C15)
_EVEN = np.uint64(0xFFFFFFFFFFFFFFFE)


AHEAD = 64


@kernel
def _fetch(table: Any, mask: Any, hashes: Any, start: int) -> Any:
    """Read the home rows of the next blocks. The sum is returned so that the compiler keeps the reads."""
    total = _0
    for i in range(start, min(start + AHEAD, hashes.shape[0])):
        key = hashes[i]
        total += table[(key ^ (key >> _32)) & mask & _EVEN, _0]
    return total


@kernel
def _seek(table: Any, mask: Any, key: Any) -> Any:
    """Row of `key`, or the empty row where it would go."""
    at = (key ^ (key >> _32)) & mask & _EVEN
    at += np.uint64(table[at | _1, _0] == key)
    while table[at, _0] != key and table[at, _0] != _0:
        at = (at + _1) & mask
    return at


@kernel
def store(
    table: Any, words: int, slot: int, tier: int, parents: Any, lengths: Any, hashes: Any, repeated: Any
) -> tuple[int, int, Any]:
    """Worker `slot` holds chains of blocks on `tier`; rows are added where needed.

    Chain i is the next `lengths[i]` of `hashes`, behind `parents[i]`. Indices of blocks it held already go to
    `repeated`. Returns (rows added, blocks repeated, nothing of use). The caller has made sure that the table has
    room.
    """
    mask = np.uint64(table.shape[0] - 1)
    column = np.uint64(2 + tier * words + slot // 64)
    bit = _1 << np.uint64(slot % 64)
    added = 0
    again = 0
    previous = _0
    chain = -1
    left = 0
    fetched = _0
    for i in range(hashes.shape[0]):
        if i % AHEAD == 0:
            fetched += _fetch(table, mask, hashes, i)
        while left == 0:
            chain += 1
            left = lengths[chain]
            previous = parents[chain]
        left -= 1
        key = hashes[i]
        at = _seek(table, mask, key)
        if table[at, _0] == _0:
            table[at, _0] = key
            table[at, _1] = previous
            added += 1
        owners = table[at, column]
        if owners & bit:
            repeated[again] = i
            again += 1
        table[at, column] = owners | bit
        previous = key
    return added, again, fetched


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
        home = (key ^ (key >> _32)) & mask & _EVEN
        # May the row move? Only if its home is not between the hole and where it stands.
        if ((at - home) & mask) >= ((at - hole) & mask):
            for column in range(width):
                table[hole, column] = table[at, column]
            hole = at
    for column in range(width):
        table[hole, column] = _0


@kernel
def remove(table: Any, words: int, slot: int, tier: int, hashes: Any) -> tuple[int, int, Any]:
    """Worker `slot` no longer holds these blocks on `tier`.

    Returns (rows dropped, blocks that it did not hold there, nothing of use).
    """
    mask = np.uint64(table.shape[0] - 1)
    column = np.uint64(2 + tier * words + slot // 64)
    bit = _1 << np.uint64(slot % 64)
    dropped = 0
    absent = 0
    width = np.uint64(table.shape[1])
    fetched = _0
    for i in range(hashes.shape[0]):
        if i % AHEAD == 0:
            fetched += _fetch(table, mask, hashes, i)
        at = _seek(table, mask, hashes[i])
        if not table[at, column] & bit:
            absent += 1
            continue
        table[at, column] &= ~bit
        owned = _0
        other = _2
        while other < width:
            owned |= table[at, other]
            other += _1
        if owned == _0:
            _drop_row(table, mask, at)
            dropped += 1
    return dropped, absent, fetched


@kernel
def remove_worker(table: Any, words: int, slot: int) -> int:
    """Worker `slot` holds nothing any more. Returns the rows dropped."""
    mask = np.uint64(table.shape[0] - 1)
    word = slot // 64
    bit = _1 << np.uint64(slot % 64)
    dropped = 0
    width = table.shape[1]
    at = 0
    while at < table.shape[0]:
        if table[at, 0] != _0:
            hit = False
            owned = _0
            for column in range(2, width):
                if (column - 2) % words == word and table[at, column] & bit:
                    table[at, column] &= ~bit
                    hit = True
                owned |= table[at, column]
            if hit and owned == _0:
                _drop_row(table, mask, np.uint64(at))
                dropped += 1
                # Another row may have moved here: look at it again.
                continue
        at += 1
    return dropped


@kernel
def _note_depth(workers: Any, first: int, depth: int, out: Any) -> None:
    worker = first
    while workers:
        if workers & _1:
            out[worker] = depth
        workers >>= _1
        worker += 1


@kernel
def find(table: Any, words: int, hashes: Any, state: Any) -> int:
    """How far each worker holds the prompt from its start.

    `state` is uint64 of length words * (1 + 2 * 64) + 1: the bits of the workers to ask about, then for each slot the
    blocks it holds on tier 0 (GPU), then those it holds on any tier; a scratch word. All but the bits are
    written here. Returns the greatest depth on any tier.
    """
    mask = np.uint64(table.shape[0] - 1)
    tiers = (table.shape[1] - 2) // words
    slots = words * 64
    depth_gpu = state[words : words + slots]
    depth_any = state[words + slots : words + 2 * slots]
    depth_gpu[:] = _0
    depth_any[:] = _0
    deepest = 0
    for word in range(words):
        gpu = state[word]
        anywhere = state[word]
        i = 0
        while i < hashes.shape[0] and anywhere != _0:
            if i % AHEAD == 0:
                state[words + 2 * slots] = _fetch(table, mask, hashes, i)
            key = hashes[i]
            at = _seek(table, mask, key)
            on_gpu = table[at, np.uint64(2 + word)]
            owners = on_gpu
            for tier in range(1, tiers):
                owners |= table[at, np.uint64(2 + tier * words + word)]
            if gpu & ~on_gpu:
                _note_depth(gpu & ~on_gpu, word * 64, i, depth_gpu)
                gpu &= on_gpu
            if anywhere & ~owners:
                _note_depth(anywhere & ~owners, word * 64, i, depth_any)
                anywhere &= owners
                if anywhere == _0:
                    break
            i += 1
        _note_depth(gpu, word * 64, i, depth_gpu)
        _note_depth(anywhere, word * 64, i, depth_any)
        deepest = max(deepest, i)
    return deepest


@kernel
def path(table: Any, high: int, low: int, out: Any) -> int:
    """The chain of hashes from the start of a prompt to a block, by parents, into the end of `out`.

    `high` and `low` are the halves of the block's hash. Returns the length; -1 if the block is not held or the chain is longer than `out`. A chain ends at a
    parent that is no row: 0, or the seed of a LoRA adapter or a salt.
    """
    mask = np.uint64(table.shape[0] - 1)
    key = (np.uint64(high) << _32) | np.uint64(low)
    length = 0
    while key != _0:
        at = _seek(table, mask, key)
        if table[at, _0] == _0:
            return length if length else -1
        if length == out.shape[0]:
            return -1
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
        at = _seek(new, mask, key)
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
