"""The compiled read-only loops of the prefix index: longest-prefix match for each worker, paths, the digest.

A prompt's blocks mostly lie in neighbouring rows, so after one hash table lookup a match is a sequential scan of memory, 32
blocks at a time: are the keys the prompt's, and which bits do all these rows have in common? Rows are examined one by one only
where a worker's prefix ends. The table is used again only where the guess at the next row fails: for one block, or,
where rows are scattered, for many at once (`hash_table.candidates`).

There is no binary search: workers lose blocks from the middle of a chain, and a jump would miss such a hole. A
summary of holes for each run of rows would have to be updated by every store and removal, which are as frequent as matches. The
gain would be small: for a prompt of 8,192 blocks of which 32 of 256 workers hold most, 380 KB are read, in 26 microseconds
in an index of 10 M blocks, or 19 if the prompt was matched just before.
"""

from typing import Any

import numpy as np

from headwater.router.index.hash_table import NONE, SCRATCH, SHORT_RUN, all_stay, candidates, matching, seek
from headwater.schemas.jit import kernel

CHUNK = 32
TOUCHED = 64
_0, _1, _2, _32 = np.uint64(0), np.uint64(1), np.uint64(2), np.uint64(32)
_ALL = np.uint64(0xFFFFFFFFFFFFFFFF)
_MIX = np.uint64(0x9E3779B97F4A7C15)
# Typed: numba would compile what they are passed to for the literals 0 and 1 as well.
_ZERO: Any = np.int64(0)
_ONE: Any = np.int64(1)


@kernel
def _note_depth(workers: Any, first: int, depth: int, out: Any) -> None:
    worker = first
    while workers:
        if workers & _1:
            out[worker] = depth
        workers >>= _1
        worker += 1


@kernel
def _same(slab: Any, row: Any, hashes: Any, start: int, most: int) -> int:
    """Return how many rows from `row`, at most `most`, hold the prompt's blocks from `start` in order."""
    if most == CHUNK:
        difference = _0
        for j in range(CHUNK):
            difference |= slab[_0, row + np.uint64(j)] ^ hashes[np.uint64(start + j)]
        if difference == _0:
            return CHUNK
    for j in range(most):
        if slab[_0, row + np.uint64(j)] != hashes[np.uint64(start + j)]:
            return j
    return most


@kernel
def _common(slab: Any, column: Any, step: Any, row: Any, length: int) -> tuple[Any, Any]:
    """Bits set in all these rows, on the GPU and on any tier."""
    gpu = _ALL
    columns = np.uint64(slab.shape[0])
    if column + step >= columns:
        if length == CHUNK:
            for j in range(CHUNK):
                gpu &= slab[column, row + np.uint64(j)]
        else:
            for j in range(length):
                gpu &= slab[column, row + np.uint64(j)]
        return gpu, gpu
    anywhere = _ALL
    for j in range(length):
        owners = slab[column, row + np.uint64(j)]
        gpu &= owners
        other = column + step
        while other < columns:
            owners |= slab[other, row + np.uint64(j)]
            other += step
        anywhere &= owners
    return gpu, anywhere


@kernel
def _narrow(slab: Any, words: int, row: Any, length: int, start: int, state: Any) -> int:
    """Drop workers that lack one of the blocks `start` to `start + length`, and note their depths.

    Returns `start + length` if a worker is left, else the depth of the last one that was dropped.
    """
    slots = words * 64
    columns = np.uint64(slab.shape[0])
    step = np.uint64(words)
    end = start
    for word in range(words):
        gpu, anywhere = state[word], state[words + word]
        if anywhere == _0:
            continue
        column = np.uint64(2 + word)
        all_gpu, all_any = _common(slab, column, step, row, length)
        if gpu & ~all_gpu or anywhere & ~all_any:
            for j in range(length):
                on_gpu = slab[column, row + np.uint64(j)]
                owners = on_gpu
                other = column + step
                while other < columns:
                    owners |= slab[other, row + np.uint64(j)]
                    other += step
                if gpu & ~on_gpu:
                    _note_depth(gpu & ~on_gpu, 2 * words + word * 64, start + j, state)
                    gpu &= on_gpu
                if anywhere & ~owners:
                    _note_depth(anywhere & ~owners, 2 * words + slots + word * 64, start + j, state)
                    anywhere &= owners
                    end = max(end, start + j)
                    if anywhere == _0:
                        break
            state[word], state[words + word] = gpu, anywhere
        if anywhere != _0:
            end = start + length
    return end


@kernel
def _narrow_rows(slab: Any, words: int, rows: Any, length: int, start: int, state: Any) -> int:
    """`_narrow` for rows that are not neighbours."""
    if all_stay(slab, words, rows, length, state):
        return start + length
    end = start
    for j in range(length):
        end = _narrow(slab, words, rows[np.uint64(j)], _ONE, start + j, state)
        if end == start + j:
            break
    return end


@kernel
def _touch(hashes: Any, slab: Any, row: Any, columns: Any) -> Any:
    """Prefetch the cache lines of the first 64 blocks, so that their misses overlap."""
    total = _0
    for j in range(0, min(TOUCHED, hashes.shape[0]), 8):
        for column in range(columns):
            total ^= slab[np.uint64(2 * column), row + np.uint64(j)]
    return total


@kernel
def _match_first(slab: Any, words: int, row: Any, state: Any) -> None:
    """Every worker that holds the first block, in `row`, matches so far."""
    columns = np.uint64(slab.shape[0])
    step = np.uint64(words)
    for word in range(words):
        column = np.uint64(2 + word)
        owners = slab[column, row]
        state[word] = owners
        column += step
        while column < columns:
            owners |= slab[column, row]
            column += step
        state[words + word] = owners


def state_size(words: int) -> int:
    """Words that `find` needs after the rows of the slab's first column."""
    return words * 2 * (1 + 64) + SCRATCH


@kernel
def find(slab: Any, table: Any, words: int, hashes: Any) -> int:
    """Longest-prefix match for each worker. Returns the greatest depth on any tier.

    Writes to the end of the slab's first column, after all rows: the bits of workers that match so far, on the GPU and on
    any tier, `words` each; for each slot its depth on the GPU, then on any tier; scratch words.
    """
    count = hashes.shape[0]
    spare = words * 130
    state = slab[0, slab.shape[1] - (spare + SCRATCH) :]
    for word in range(2 * words, spare):
        state[word] = _0
    if count == 0:
        return 0
    total = _0
    for j in range(0, min(TOUCHED, count), 8):
        total ^= hashes[j]
    row = seek(table, slab, hashes[0])[0]
    if row == NONE:
        return 0
    if count > 1 and slab[_0, row + _1] == hashes[1]:
        state[spare] = total ^ _touch(hashes, slab, row, 2)
    _match_first(slab, words, row, state)
    i: int = _ZERO
    # Where the present run of neighbouring rows began.
    begun = i
    end = i
    while i < count:
        if slab[_0, row] != hashes[i]:
            if i - begun < SHORT_RUN:
                rows = state[spare:]
                length = candidates(table, hashes, i, rows)
                if length == 0:
                    break
                length = matching(slab, rows, hashes, i, length)
                if length > 0:
                    end = _narrow_rows(slab, words, rows, length, i, state)
                    i += length
                    if end < i:
                        return end
                    row = rows[length - 1] + _1
                    begun = i
                    continue
            row = seek(table, slab, hashes[i])[0]
            if row == NONE:
                break
            begun = i
        length = _same(slab, row, hashes, i, min(CHUNK, count - i))
        end = _narrow(slab, words, row, length, i, state)
        i += length
        row += np.uint64(length)
        if end < i:
            return end
    slots = words * 64
    for word in range(words):
        _note_depth(state[word], 2 * words + word * 64, i, state)
        _note_depth(state[words + word], 2 * words + slots + word * 64, i, state)
    return i


@kernel
def path(slab: Any, table: Any, high: int, low: int, out: Any) -> int:
    """Follow parents from a block to the start of its prompt; writes the hashes, in order, to the end of `out`.

    `high` and `low` are the halves of the block's hash. Returns the length; -1 if the block is not in the index or the chain is
    longer than `out`. A chain ends at a parent without a row: 0, or the seed of a LoRA adapter or a salt.
    """
    key = (np.uint64(high) << _32) | np.uint64(low)
    length = 0
    row = NONE
    while key != _0:
        if row != NONE and row > _0 and slab[_0, row - _1] == key:
            row -= _1
        else:
            row = seek(table, slab, key)[0]
            if row == NONE:
                return length if length else -1
        if length == out.shape[0]:
            return -1
        length += 1
        out[out.shape[0] - length] = key
        key = slab[_1, row]
    return length


@kernel
def digest(slab: Any, words: int, top: int) -> Any:
    """A digest of the content that does not depend on the order of rows."""
    total = _0
    for number in range(top):
        row = np.uint64(number)
        key = slab[_0, row]
        if key == _0:
            continue
        state = key * _MIX ^ slab[_1, row]
        state ^= state >> _32
        for column in range(2, slab.shape[0]):
            bits = slab[np.uint64(column), row]
            if bits:
                # By tier and word, not by column: widening the slab must not change the digest.
                place = np.uint64(((column - 2) // words) * 65536 + (column - 2) % words + 1)
                state += (bits ^ place * _MIX) * _MIX
                state ^= state >> _32
                state *= _MIX
        total += state ^ (state >> _32)
    return total
