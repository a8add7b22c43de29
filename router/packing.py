"""The index's table without its empty rows: what a snapshot holds of it.

A table is at most seven tenths full, often much less. Packed, it is the occupied rows in their order and one
bit per row of the table; unpacked, every row is where it was, so the copy is exact, and both ways are one pass
over memory.

Opening a large snapshot spends much of its time on memory that was not used before, which the system has to
give first. So rows are read into the end of what becomes their table (`prepare`) and move forward within it: a row never has more
empty ones before it than the table has in all, so no row is written over before it has moved.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headwater.schemas.hashing import U64
from headwater.schemas.kernel import kernel

_0, _1 = np.uint64(0), np.uint64(1)
WORD_BITS = 64
PART_WORDS = 1 << 14
"""Words of the bit map that one thread unpacks at a time: a million rows."""

THREADS = 2


class Packed(NamedTuple):
    """`rows`: uint64 (occupied rows, columns). `taken`: uint64 (table rows / 64), bit i of word w: row 64 w + i."""

    rows: U64
    taken: U64


@kernel
def _pack(table: Any, rows: Any, taken: Any) -> int:
    """Copy occupied rows to `rows` and mark them in `taken`. Returns how many there are; copies what fits."""
    width = table.shape[1]
    count = 0
    for word in range(taken.shape[0]):
        bits = _0
        for bit in range(64):
            at = word * 64 + bit
            if table[at, 0] != _0:
                bits |= _1 << np.uint64(bit)
                if count < rows.shape[0]:
                    for column in range(width):
                        rows[count, column] = table[at, column]
                count += 1
        taken[word] = bits
    return count


@kernel
def _unpack(rows: Any, taken: Any, table: Any, first: int, last: int, start: int) -> None:
    """Write the table's rows of words `first` to `last` of `taken`; `rows[start]` is the first of them."""
    width = table.shape[1]
    row = start
    for word in range(first, last):
        bits = taken[word]
        for bit in range(64):
            at = word * 64 + bit
            if bits & (_1 << np.uint64(bit)):
                for column in range(width):
                    table[at, column] = rows[row, column]
                row += 1
            else:
                for column in range(width):
                    table[at, column] = _0


def pack(table: U64, count: int) -> Packed:
    """Pack a table with `count` occupied rows. Nobody may change it meanwhile; other threads run.

    Raises ValueError if it has another number of rows: then it was changed, or its count is wrong.
    """
    rows: U64 = np.empty((count, table.shape[1]), np.uint64)
    taken: U64 = np.empty(table.shape[0] // WORD_BITS, np.uint64)
    found = _pack(table, rows, taken)
    if found != count:
        raise ValueError(f"the table has {found} rows, {count} were expected")
    return Packed(rows, taken)


def unpack(packed: Packed) -> U64:
    """The table. Raises ValueError where bits and rows do not fit each other or a table's form.

    Rows from `prepare` are used up.
    """
    rows, taken = packed
    capacity = taken.shape[0] * WORD_BITS
    if rows.ndim != 2 or taken.ndim != 1 or rows.dtype != np.uint64 or taken.dtype != np.uint64:
        raise ValueError("packed rows are not of the form of a table")
    if not capacity or capacity & (capacity - 1):
        raise ValueError(f"a table of {capacity} rows: that is no power of two")
    firsts = np.arange(0, taken.shape[0], PART_WORDS)
    counts: NDArray[np.int64] = np.add.reduceat(np.bitwise_count(taken).astype(np.int64), firsts)
    if int(counts.sum()) != rows.shape[0]:
        raise ValueError(f"{int(counts.sum())} rows are marked and {rows.shape[0]} are there")
    prepared = rows.base
    if prepared is not None and _is_end_of(rows, prepared, capacity):
        _unpack(rows, taken, prepared, 0, taken.shape[0], 0)
        return prepared
    starts = np.cumsum(counts) - counts
    table: U64 = np.empty((capacity, rows.shape[1]), np.uint64)

    def part(first: int, start: int) -> None:
        _unpack(rows, taken, table, first, min(first + PART_WORDS, taken.shape[0]), start)

    if len(firsts) == 1:
        part(0, 0)
        return table
    with ThreadPoolExecutor(THREADS, "unpack") as threads:
        list(threads.map(part, firsts.tolist(), starts.tolist()))
    return table


def prepare(arrays: dict[str, NDArray[Any]]) -> None:
    """Before they are read: replace `rows` by room for them at the end of a table. Anything else stays."""
    rows, taken = arrays.get("rows"), arrays.get("taken")
    if rows is None or taken is None or rows.dtype != np.uint64 or (rows.ndim, taken.ndim) != (2, 1):
        return
    capacity = taken.shape[0] * WORD_BITS
    if 0 < rows.shape[0] <= capacity:
        table: U64 = np.empty((capacity, rows.shape[1]), np.uint64)
        arrays["rows"] = table[capacity - rows.shape[0] :]


def _is_end_of(rows: U64, table: NDArray[Any], capacity: int) -> bool:
    """Did `prepare` make these rows for a table of this size?"""
    return (
        table.dtype == np.uint64
        and table.shape == (capacity, rows.shape[1])
        and table.flags.c_contiguous
        and rows.flags.c_contiguous
        and rows.ctypes.data + rows.nbytes == table.ctypes.data + table.nbytes
    )
