"""What a snapshot holds of the index's slab: its columns as they are, as far as rows were ever used.

Unused columns are left out, and so is the table that finds rows: it is built anew from the names. Where more than
half of the rows are free they are left out too; else rows keep their places, and the
counts of each worker's bits by pages are kept with them.

Opening a large snapshot spends much of its time on memory that was not used before, which the system has to
give first. So columns are read into what becomes the slab (`prepare`).

Earlier releases wrote their table row by row, whole (0.1) or without its empty rows: `from_rows` reads both.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headwater.router import lookup
from headwater.router.kernels import PAD, PAGE_BITS
from headwater.schemas.hashing import U64
from headwater.schemas.kernel import kernel

_0, _1, _32 = np.uint64(0), np.uint64(1), np.uint64(32)
SPARE = 8
"""A slab that is read has room for one row more to each so many."""

Arrays = dict[str, NDArray[Any]]


class Slab(NamedTuple):
    """An index's arrays, as `kernels` describes them. `used`: its columns that were written to."""

    slab: U64
    pages: NDArray[np.uint16]
    head: NDArray[np.int64]
    used: set[int]


@kernel
def _copy(slab: Any, column: int, top: int, whole: bool, out: Any) -> int:
    """Copy a column, without the free rows if not `whole`. Returns how many rows are in use; copies what fits."""
    count = 0
    for number in range(top):
        row = np.uint64(number)
        taken = slab[_0, row] != _0
        at = number if whole else count
        if (whole or taken) and at < out.shape[0]:
            out[at] = slab[np.uint64(column), row]
        if taken:
            count += 1
    return count


@kernel
def _link(slab: Any, head: Any, top: int) -> int:
    """Make the list of free rows anew, the first one first. Returns how many rows are in use."""
    after = _0
    taken = 0
    for number in range(top - 1, -1, -1):
        row = np.uint64(number)
        if slab[_0, row] != _0:
            taken += 1
            continue
        slab[_1, row] = after << _32
        if after:
            slab[_1, after - _1] |= row + _1
        after = row + _1
    head[0] = top
    head[1] = np.int64(after)
    return taken


@kernel
def _count(slab: Any, words: int, top: int, pages: Any) -> None:
    """Count each worker's bits by pages."""
    for number in range(top):
        row = np.uint64(number)
        for column in range(2, slab.shape[0]):
            bits = slab[np.uint64(column), row]
            slot = (column - 2) % words * 64
            while bits:
                if bits & _1:
                    pages[slot, number >> PAGE_BITS] += 1
                bits >>= _1
                slot += 1


def pack(slab: Slab, words: int, rows: int) -> Arrays:
    """The arrays of a snapshot, sharing nothing. Nobody may change the slab meanwhile; other threads run.

    Raises ValueError if it has not `rows` rows in use: then it was changed, or its count is wrong.
    """
    top = int(slab.head[0])
    whole = 2 * rows >= top
    found: Arrays = {}
    for column in (0, 1, *sorted(slab.used)):
        out: U64 = np.empty(top if whole else rows, np.uint64)
        count = _copy(slab.slab, column, top, whole, out)
        if count != rows:
            raise ValueError(f"the index has {count} rows, {rows} were expected")
        found[_name(column, words)] = out
    if whole:
        found["pages"] = slab.pages[:, : (top >> PAGE_BITS) + 1].copy()
    return found


def unpack(arrays: Arrays, words: int, tiers: int, rows: int) -> tuple[Slab, U64]:
    """The index's arrays and its table. Raises ValueError where they do not fit each other.

    Arrays from `prepare` are used up.
    """
    columns = 2 + words * tiers
    by_column = {column: arrays[_name(column, words)] for column in range(2)}
    for column in range(2, columns):
        if _name(column, words) in arrays:
            by_column[column] = arrays[_name(column, words)]
    known = {_name(column, words) for column in by_column} | {"pages"}
    if not set(arrays) <= known or any(
        array.dtype != np.uint64 or array.shape != arrays["keys"].shape or array.ndim != 1
        for array in by_column.values()
    ):
        raise ValueError(f"arrays {sorted(arrays)} are no index of {tiers} tiers of {words} words")
    top = len(arrays["keys"])
    base = arrays["keys"].base
    if len(by_column) == columns and base is not None and _is_slab(base, by_column, columns):
        slab: U64 = base
    else:
        slab = _empty(columns, top)
        for column, array in by_column.items():
            slab[column, :top] = array
    used = {column for column in by_column if column > 1}
    return _finish(slab, used, words, top, rows, arrays.get("pages"))


def from_rows(table: U64, words: int, tiers: int, rows: int) -> tuple[Slab, U64]:
    """The same from rows of key, parent and bits as earlier releases wrote them, empty ones among them."""
    if table.dtype != np.uint64 or table.shape[1:] != (2 + tiers * words,):
        raise ValueError(f"rows of form {table.shape} for {tiers} tiers of {words} words")
    taken: U64 = table[table[:, 0] != 0].T
    top = taken.shape[1]
    slab = _empty(2 + tiers * words, top)
    slab[:, :top] = taken
    return _finish(slab, set(range(2, len(slab))), words, top, rows, None)


def prepare(arrays: Arrays) -> None:
    """Before they are read: replace the columns by room for them in a slab. Anything else stays."""
    names = [name for name in arrays if name == "keys" or name == "parents" or name.startswith("held-")]
    columns = [arrays[name] for name in names]
    if names[:2] != ["keys", "parents"] or any(
        array.dtype != np.uint64 or array.ndim != 1 or len(array) != len(columns[0]) for array in columns
    ):
        return
    top = len(columns[0])
    slab = _empty(len(names), top)
    for number, name in enumerate(names):
        arrays[name] = slab[number, :top]


def _name(column: int, words: int) -> str:
    if column < 2:
        return ("keys", "parents")[column]
    tier, word = divmod(column - 2, words)
    return f"held-{tier}-{word}"


def _empty(columns: int, top: int) -> U64:
    made: U64 = np.zeros((columns, max(top + top // SPARE, 1 << 10) + PAD), np.uint64)
    return made


def _is_slab(base: NDArray[Any], by_column: dict[int, NDArray[Any]], columns: int) -> bool:
    """Did `prepare` make these columns, in this order?"""
    return (
        base.dtype == np.uint64
        and base.ndim == 2
        and len(base) == columns
        and base.flags.c_contiguous
        and base.shape[1] >= len(by_column[0]) + PAD
        and all(
            array.ctypes.data == base.ctypes.data + column * base.strides[0] and array.strides == (8,)
            for column, array in by_column.items()
        )
    )


def _finish(
    slab: U64, used: set[int], words: int, top: int, rows: int, told: NDArray[Any] | None
) -> tuple[Slab, U64]:
    capacity = slab.shape[1] - PAD
    pages: NDArray[np.uint16] = np.zeros((64 * words, (capacity >> PAGE_BITS) + 1), np.uint16)
    shown = (top >> PAGE_BITS) + 1
    if told is None:
        _count(slab, words, top, pages)
    elif told.dtype != np.uint16 or told.shape != (64 * words, shown):
        raise ValueError(f"pages of form {told.shape} for {top} rows")
    else:
        pages[:, :shown] = told
    head: NDArray[np.int64] = np.zeros(2, np.int64)
    taken = _link(slab, head, top)
    if taken != rows:
        raise ValueError(f"{taken} rows are there, {rows} were expected")
    table: U64 = np.zeros(lookup.capacity_for(max(capacity, rows)), np.uint64)
    lookup.build(table, slab[0, :top])
    return Slab(slab, pages, head, used), table
