"""The prefix index as a readable tree: runs of blocks that the same workers hold.

A run is a maximal chain of blocks without a branch, held by the same workers on the same tiers. Runs are found in two passes
over the rows, about a second for 10 M blocks. Read-only: works on a live router's index or one from a snapshot, as
long as nothing is folded into it at the same time.
"""

from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from headwater.router.index.hash_table import NONE, seek
from headwater.router.index.prefix_index import WORD_BITS, PrefixIndex
from headwater.router.index.update import TOP
from headwater.schemas.events import TIER_NAMES
from headwater.schemas.hashing import U64
from headwater.schemas.jit import kernel

LIMIT = 50
NAMES_MAX = 6
_0, _1, _2 = np.uint64(0), np.uint64(1), np.uint64(2)

Rows = NDArray[np.int64]
Used = tuple[U64, Rows]
"""Hashes of blocks, and a time in ns of each."""


class TokenRun(msgspec.Struct, frozen=True, omit_defaults=True):
    """`blocks` blocks from `first` to `last` (hex). `parent`: the block before it, "" at the start of a prompt.

    `depth`: blocks before it in its prompt; -1 if unknown, because no worker holds the block before it: the run is
    parked, or starts the tree of a salt or LoRA adapter. `below`: blocks after it, on all branches.
    `level`: its number of ancestors. `held`: workers by tier name. `uses`: how many of the given uses are of a block in it or
    below it, and `used_ns` the latest of them (0: none).
    """

    first: str
    last: str
    parent: str
    depth: int
    level: int
    blocks: int
    below: int
    held: dict[str, tuple[str, ...]]
    uses: int = 0
    used_ns: int = 0


class Tree(msgspec.Struct, frozen=True):
    """The selected runs, each after its parent, and the total number of runs."""

    workers: int
    blocks: int
    refused: int
    total: int
    runs: tuple[TokenRun, ...]


def tree(
    index: PrefixIndex, *, worker: str = "", depth: int = -1, limit: int = LIMIT, used: Used | None = None
) -> Tree:
    """The `limit` runs with the most blocks in and below them, so that no run is shown without its ancestors.

    `worker`: only runs that it holds, and their ancestors. `depth`: only runs that start before this depth (-1: all). `used`:
    blocks that prompts used, and when, for the `uses` of the runs. Raises LookupError for a worker that is not in the index.
    """
    if worker and worker not in index.slots:
        names = ", ".join(sorted(index.slots)) or "none"
        raise LookupError(f"no worker {worker} in this index; workers: {names}")
    first, last, length, under, order, run_of = _runs(index)
    count = len(first)
    uses: Rows = np.zeros(count, np.int64)
    used_ns: Rows = np.zeros(count, np.int64)
    if used is not None:
        _count_uses(index.slab, index.table, run_of, *used, uses, used_ns)
    below: Rows = np.zeros(count, np.int64)
    depths: Rows = np.full(count, -1, np.int64)
    levels: Rows = np.zeros(count, np.int64)
    selected: NDArray[np.bool_] = np.ones(count, bool)
    if worker:
        selected = _held_by(index, worker, first)
    for run in order.tolist():
        parent = under[run]
        if parent >= 0:
            levels[run] = levels[parent] + 1
            depths[run] = depths[parent] + length[parent] if depths[parent] >= 0 else -1
        else:
            depths[run] = 0 if index.slab[1, first[run]] == 0 else -1
    for run in order[::-1].tolist():
        parent = under[run]
        if parent >= 0:
            below[parent] += length[run] + below[run]
            uses[parent] += uses[run]
            used_ns[parent] = max(used_ns[parent], used_ns[run])
            selected[parent] |= selected[run]
    if depth >= 0:
        selected = np.logical_and(selected, depths < depth)
    reached: Rows = order[selected[order]]
    weight = length[reached] + below[reached]
    shown = set(reached[np.lexsort((reached, -weight))][: max(0, limit)].tolist())
    by_slot = {slot: name for name, slot in index.slots.items()}
    runs = tuple(
        TokenRun(
            f"{int(index.slab[0, first[run]]):016x}",
            f"{int(index.slab[0, last[run]]):016x}",
            f"{int(index.slab[1, first[run]]):016x}" if index.slab[1, first[run]] else "",
            int(depths[run]),
            int(levels[run]),
            int(length[run]),
            int(below[run]),
            _holders(index, int(first[run]), by_slot),
            int(uses[run]),
            int(used_ns[run]),
        )
        for run in _walk(under, length + below, shown)
    )
    return Tree(len(index.slots), index.rows, index.refused, count, runs)


def text(prefix_tree: Tree) -> str:
    """Text output: one line per run, indented by its number of ancestors."""
    lines = [
        f"{prefix_tree.blocks} blocks in {prefix_tree.total} runs, {prefix_tree.workers} workers; "
        f"{len(prefix_tree.runs)} runs shown"
        + (f"; {prefix_tree.refused} blocks refused" if prefix_tree.refused else ""),
        "  blocks   below   depth  names and holders",
    ]
    for run in prefix_tree.runs:
        place = f"{run.depth:>7}" if run.depth >= 0 else "      ?"
        names = f"{run.first}..{run.last}" if run.blocks > 1 else run.first
        after = f" after {run.parent}, held by no worker" if run.depth < 0 and not run.level else ""
        held = "; ".join(f"{tier}: {_some(workers)}" for tier, workers in run.held.items())
        lines.append(f"{run.blocks:>8} {run.below:>7} {place}  {'  ' * run.level}{names}  {held}{after}")
    return "\n".join(lines)


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    more = len(listed) - NAMES_MAX
    return " ".join(listed[:NAMES_MAX]) + (f" and {more} more" if more > 0 else "")


def _holders(index: PrefixIndex, row: int, by_slot: dict[int, str]) -> dict[str, tuple[str, ...]]:
    by_tier: dict[str, tuple[str, ...]] = {}
    for tier in range(index.tiers):
        names: list[str] = []
        for word in range(index.words):
            bits = int(index.slab[2 + tier * index.words + word, row])
            while bits:
                names.append(by_slot[word * WORD_BITS + (bits & -bits).bit_length() - 1])
                bits &= bits - 1
        if names:
            by_tier[TIER_NAMES[tier] if tier < len(TIER_NAMES) else str(tier)] = tuple(sorted(names))
    return by_tier


def _held_by(index: PrefixIndex, worker: str, rows: Rows) -> NDArray[np.bool_]:
    word, bit = divmod(index.slots[worker], WORD_BITS)
    columns = index.slab[2 + word :: index.words, rows]
    return np.asarray((columns >> np.uint64(bit) & np.uint64(1)).any(axis=0), np.bool_)


def _walk(under: Rows, weight: Rows, shown: set[int]) -> list[int]:
    """The shown runs, each followed by its children, the largest first."""
    below: dict[int, list[int]] = {}
    for run in sorted(shown, key=lambda run: (int(weight[run]), -run)):
        below.setdefault(int(under[run]), []).append(run)
    ordered: list[int] = []
    rest = below.pop(-1, [])
    while rest:
        run = rest.pop()
        ordered.append(run)
        rest += below.get(run, [])
    return ordered


def _runs(index: PrefixIndex) -> tuple[Rows, Rows, Rows, Rows, Rows, Rows]:
    """Return for each run its first row, last row, length and parent run (-1: none); an order with parents first; and the run of each row."""
    top = int(index.scratch[TOP])
    up: Rows = np.full(top, -1, np.int64)
    only: Rows = np.full(top, -1, np.int64)
    first: Rows = np.empty(top, np.int64)
    count = _heads(index.slab, index.table, top, up, only, first)
    first = first[:count].copy()
    last, length = np.empty_like(first), np.empty_like(first)
    run_of: Rows = np.full(top, -1, np.int64)
    _follow(only, first, last, length, run_of)
    under: Rows = np.where(up[first] >= 0, run_of[up[first]], -1) if top else first
    # Layer by layer from the roots. Blocks that are each other's parents in a ring have no root, cannot be reached by a
    # prompt, and are omitted.
    by_parent = np.argsort(under, kind="stable")
    starts = np.searchsorted(under[by_parent], np.arange(-1, count + 1))
    order: list[int] = by_parent[starts[0] : starts[1]].tolist() if count else []
    for run in order:
        order += by_parent[starts[run + 1] : starts[run + 2]].tolist()
    return first, last, length, under, np.array(order, np.int64), run_of


@kernel
def _count_uses(
    slab: Any, table: Any, run_of: Any, hashes: Any, times_ns: Any, uses: Any, used_ns: Any
) -> None:
    """Count to `uses` the blocks in each run, and note the latest time of one; blocks that are not in the index are left out."""
    for number in range(hashes.shape[0]):
        row = seek(table, slab, hashes[number])[0]
        # Rows of a ring are in no run.
        if row != NONE and run_of[row] >= 0:
            run = run_of[row]
            uses[run] += 1
            used_ns[run] = max(used_ns[run], times_ns[number])


@kernel
def _heads(slab: Any, table: Any, top: int, up: Any, only: Any, first: Any) -> int:
    """Write each row's parent row to `up`, the only row that continues its run to `only` (-1: none), and first rows to `first`."""
    for number in range(top):
        row = np.uint64(number)
        if slab[_0, row] == _0:
            continue
        parent = slab[_1, row]
        if parent == _0:
            continue
        parent_row = row - _1 if row > _0 and slab[_0, row - _1] == parent else seek(table, slab, parent)[0]
        if parent_row != NONE:
            up[number] = np.int64(parent_row)
            # -1: no child so far, -2: several.
            only[parent_row] = number if only[parent_row] == -1 else -2
    count = 0
    for number in range(top):
        row = np.uint64(number)
        if slab[_0, row] == _0:
            continue
        parent_row = up[number]
        begins = parent_row < 0 or only[parent_row] != number
        if not begins:
            for column in range(2, slab.shape[0]):
                if slab[np.uint64(column), row] != slab[np.uint64(column), np.uint64(parent_row)]:
                    begins = True
        if begins:
            first[count] = number
            count += 1
            if parent_row >= 0:
                only[parent_row] = -2
    return count


@kernel
def _follow(only: Any, first: Any, last: Any, length: Any, run_of: Any) -> None:
    """Follow each run from its first row to its last."""
    for run in range(first.shape[0]):
        row = first[run]
        count = 1
        run_of[row] = run
        while only[row] >= 0:
            row = only[row]
            run_of[row] = run
            count += 1
        last[run] = row
        length[run] = count
