"""Packing of the index's slab into the arrays of a snapshot, and back.

Neighbouring rows are mostly neighbours in a chain and held by the same workers. So only parents that are not the previous row
are stored, and of owners the first of each run of equal values, both with their positions (`<name>-at`); a column is stored whole
if that is not shorter. Unused columns are omitted, and so is the hash table: it is rebuilt from the keys. If more than half
of the rows are free they are omitted too; else rows keep their positions, and the page counts of each worker are
stored with them.

Loading a large snapshot spends much of its time on first use of memory, which the system must provide. So keys are read
directly into what becomes the slab (`prepare`).
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headwater.router.index import hash_table
from headwater.router.index.match import state_size
from headwater.router.index.update import FREE, PAD, PAGE_BITS, TOP
from headwater.schemas.hashing import U64
from headwater.schemas.jit import kernel

_0, _1, _32 = np.uint64(0), np.uint64(1), np.uint64(32)


@kernel
def squeeze(slab: Any, column: int, top: int, include_free: bool, out: Any) -> int:
    """Copy a column, without free rows unless `include_free`; stops at the end of `out`. Returns how many rows are in use."""
    count = 0
    for number in range(top):
        row = np.uint64(number)
        is_used = slab[_0, row] != _0
        at = number if include_free else count
        if (include_free or is_used) and at < out.shape[0]:
            out[at] = slab[np.uint64(column), row]
        if is_used:
            count += 1
    return count


@kernel
def parents(slab: Any, top: int, include_free: bool, at: Any, values: Any) -> int:
    """Parents that are not the previous row, with their positions; a free row has parent 0. Returns how many."""
    length = 0
    place = 0
    before = _0
    for number in range(top):
        row = np.uint64(number)
        key = slab[_0, row]
        if key == _0 and not include_free:
            continue
        parent = slab[_1, row] if key != _0 else _0
        if place == 0 or parent != before:
            at[length] = place
            values[length] = parent
            length += 1
        before = key
        place += 1
    return length


@kernel
def runs(slab: Any, column: int, top: int, include_free: bool, at: Any, values: Any) -> int:
    """The first value of each run of equal values, with its position. Returns how many."""
    length = 0
    place = 0
    before = _0
    for number in range(top):
        row = np.uint64(number)
        if not include_free and slab[_0, row] == _0:
            continue
        value = slab[np.uint64(column), row]
        if place == 0 or value != before:
            at[length] = place
            values[length] = value
            length += 1
        before = value
        place += 1
    return length


@kernel
def fill_parents(slab: Any, top: int, at: Any, values: Any) -> None:
    """Undo `parents`."""
    for number in range(1, top):
        slab[_1, np.uint64(number)] = slab[_0, np.uint64(number - 1)]
    for i in range(at.shape[0]):
        slab[_1, np.uint64(at[i])] = values[i]


@kernel
def fill_runs(slab: Any, column: int, top: int, at: Any, values: Any) -> None:
    """Undo `runs`."""
    for i in range(at.shape[0]):
        last = np.int64(at[i + 1]) if i + 1 < at.shape[0] else top
        for number in range(np.int64(at[i]), last):
            slab[np.uint64(column), np.uint64(number)] = values[i]


@kernel
def link(slab: Any, scratch: Any, top: int) -> int:
    """Rebuild the list of free rows, in ascending order. Returns how many rows are in use."""
    after = _0
    rows_in_use = 0
    for number in range(top - 1, -1, -1):
        row = np.uint64(number)
        if slab[_0, row] != _0:
            rows_in_use += 1
            continue
        slab[_1, row] = after << _32
        if after:
            slab[_1, after - _1] |= row + _1
        after = row + _1
    scratch[TOP] = top
    scratch[FREE] = after
    return rows_in_use


@kernel
def count_pages(slab: Any, words: int, top: int, pages: Any) -> None:
    """Count each worker's bits in each page."""
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


# Packing and unpacking.

SPARE = 8
"""A loaded slab has one spare row for this many rows."""

ROWS_MIN = 1 << 10
AT = "-at"

Arrays = dict[str, NDArray[Any]]


class PackedSlab(NamedTuple):
    """An index's arrays (`update`). `used`: the columns that were written to."""

    slab: U64
    pages: NDArray[np.uint16]
    scratch: U64
    used: set[int]


def pack(slab: PackedSlab, words: int, rows: int) -> Arrays:
    """The arrays of a snapshot, which share no memory with the slab. The slab must not change until this returns; other threads run.

    Raises ValueError unless `rows` rows are in use: the slab was changed, or its count is wrong.
    """
    top = int(slab.scratch[TOP])
    include_free = 2 * rows >= top
    keys: U64 = np.empty(top if include_free else rows, np.uint64)
    count = squeeze(slab.slab, 0, top, include_free, keys)
    if count != rows:
        raise ValueError(f"the index has {count} rows, {rows} expected")
    arrays: Arrays = {"keys": keys}
    # Sized for the worst case: memory that is not written to is not allocated.
    at: NDArray[np.uint32] = np.empty(len(keys), np.uint32)
    values: U64 = np.empty(len(keys), np.uint64)
    for column in (1, *sorted(slab.used)):
        name = _name(column, words)
        if column == 1:
            length = parents(slab.slab, top, include_free, at, values)
        else:
            length = runs(slab.slab, column, top, include_free, at, values)
        if 3 * length > 2 * len(keys):
            arrays[name] = np.empty(len(keys), np.uint64)
            squeeze(slab.slab, column, top, include_free, arrays[name])
        else:
            arrays[name], arrays[name + AT] = values[:length].copy(), at[:length].copy()
    if include_free:
        arrays["pages"] = slab.pages[:, : (top >> PAGE_BITS) + 1].copy()
    return arrays


def unpack(arrays: Arrays, words: int, tiers: int, rows: int) -> tuple[PackedSlab, U64]:
    """The index's arrays and its table. Raises ValueError or LookupError where they do not fit each other.

    Names from `prepare` are used up.
    """
    columns = 2 + words * tiers
    held = {column: name for column in range(2, columns) if (name := _name(column, words)) in arrays}
    names = ["keys", "parents", *held.values()]
    if not set(arrays) <= {"pages", *names, *(name + AT for name in names[1:])}:
        raise ValueError(f"arrays {sorted(arrays)} are no index of {tiers} tiers of {words} words")
    keys = arrays["keys"]
    top = len(keys) if keys.ndim == 1 else -1
    _check(arrays, names, top)
    base = keys.base
    if base is not None and _is_slab(base, keys, columns, words):
        slab: U64 = base
    else:
        slab = _roomy(words, tiers, top)
        slab[0, :top] = keys
    for column, name in ((1, "parents"), *held.items()):
        if name + AT not in arrays:
            slab[column, :top] = arrays[name]
        elif column == 1:
            fill_parents(slab, top, arrays[name + AT], arrays[name])
        else:
            fill_runs(slab, column, top, arrays[name + AT], arrays[name])
    return _finish(slab, set(held), words, top, rows, arrays.get("pages"))


def prepare(arrays: Arrays) -> None:
    """Replace the names of arrays that are not read yet by room for them in a slab. Anything else stays."""
    keys = arrays.get("keys")
    if keys is None or keys.dtype != np.uint64 or keys.ndim != 1 or "parents" not in arrays:
        return
    held = [name.split("-") for name in arrays if name.startswith("held-") and not name.endswith(AT)]
    if not all(len(parts) == 3 and parts[1].isdecimal() and parts[2].isdecimal() for parts in held):
        return
    tiers = 1 + max((int(parts[1]) for parts in held), default=0)
    words = 1 + max((int(parts[2]) for parts in held), default=0)
    if tiers * words == max(1, len(held)):
        arrays["keys"] = _roomy(words, tiers, len(keys))[0, : len(keys)]


def _name(column: int, words: int) -> str:
    if column == 1:
        return "parents"
    tier, word = divmod(column - 2, words)
    return f"held-{tier}-{word}"


def _check(arrays: Arrays, names: list[str], top: int) -> None:
    """Types, lengths, and that places are in order and within the rows: compiled loops rely on it."""
    for name in names:
        values, at = arrays[name], arrays.get(name + AT)
        sound = values.dtype == np.uint64 and values.ndim == 1
        if at is None:
            sound = sound and len(values) == top
        else:
            sound = sound and at.dtype == np.uint32 and at.shape == values.shape
            # The first row is always stored: there is no row before it.
            sound = sound and (not top or (len(at) > 0 and at[0] == 0 and int(at[-1]) < top))
            sound = sound and bool((at[1:] > at[:-1]).all())
        if not sound:
            raise ValueError(f"array {name} does not fit the {top} rows of this index")


def empty_slab(words: int, tiers: int, capacity: int) -> U64:
    """A slab for `capacity` rows, with the padding that `update` and `match` need after them."""
    slab: U64 = np.zeros((2 + tiers * words, capacity + PAD + state_size(words)), np.uint64)
    return slab


def _roomy(words: int, tiers: int, top: int) -> U64:
    return empty_slab(words, tiers, max(top + top // SPARE, ROWS_MIN))


def _is_slab(base: NDArray[Any], keys: NDArray[Any], columns: int, words: int) -> bool:
    """Was this array allocated by `prepare`, for this many columns?"""
    return (
        base.dtype == np.uint64
        and base.ndim == 2
        and len(base) == columns
        and base.flags.c_contiguous
        and base.shape[1] >= len(keys) + PAD + state_size(words)
        and keys.ctypes.data == base.ctypes.data
    )


def _finish(
    slab: U64, used: set[int], words: int, top: int, rows: int, stored: NDArray[Any] | None
) -> tuple[PackedSlab, U64]:
    capacity = slab.shape[1] - PAD - state_size(words)
    pages: NDArray[np.uint16] = np.zeros((64 * words, (capacity >> PAGE_BITS) + 1), np.uint16)
    shown = (top >> PAGE_BITS) + 1
    if stored is None:
        count_pages(slab, words, top, pages)
    elif stored.dtype != np.uint16 or stored.shape != (64 * words, shown):
        raise ValueError(f"pages of form {stored.shape} for {top} rows")
    else:
        pages[:, :shown] = stored
    scratch: U64 = np.zeros(2, np.uint64)
    rows_in_use = link(slab, scratch, top)
    if rows_in_use != rows:
        raise ValueError(f"{rows_in_use} rows found, {rows} expected")
    table: U64 = np.zeros(hash_table.capacity_for(max(capacity, rows)), np.uint64)
    hash_table.build(table, slab[0, :top])
    return PackedSlab(slab, pages, scratch, used), table
