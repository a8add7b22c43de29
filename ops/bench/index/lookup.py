"""`headwater bench index`: the prefix index alone, on one core."""

import time
from collections.abc import Callable, Mapping
from typing import Protocol

from headwater.ops.bench.index.churn import Churn
from headwater.ops.bench.index.shapes import Chain, IndexShape, long_prompts, short_prompts
from headwater.ops.bench.report import Measure, Report
from headwater.router.index.prefix_index import PrefixIndex
from headwater.schemas.hashing import U64

BLOCKS = 10_000_000
SHORT_FINDS = 200_000
LONG_FINDS = 2_000
LONG_ROUNDS = 2
REPLACED = 4
CHURNED = 4
CHURN_BLOCKS = 2_000_000
CHURN_FINDS = 50_000


class OtherIndex(Protocol):
    """Another index to compare with: rates of its operations by the names of ours."""

    name: str

    def short(self, shape: IndexShape) -> Mapping[str, float]:
        """With prompts of 64 blocks."""
        ...

    def long(self, shape: IndexShape) -> Mapping[str, float]:
        """With prompts of 8,192 blocks."""
        ...


def bench(*, other: OtherIndex | None = None, blocks: int = BLOCKS) -> Report:
    """Inserts, removals and finds of prompts of 64 blocks, the finds again after much churn, then finds of prompts of 8,192,
    all with a full index.

    `index.shapes` describes the prompts. `other`: the same stores and finds on another index.
    """
    short = short_prompts(blocks, min(SHORT_FINDS, blocks))
    ours = _short(short)
    theirs = dict(other.short(short)) if other else {}
    del short
    ours += _worn(min(blocks, CHURN_BLOCKS))
    long = long_prompts(blocks, LONG_FINDS)
    ours += _long(long)
    if other:
        theirs |= other.long(long)
    measures: list[Measure] = []
    for measure in ours:
        measures.append(measure)
        if other and measure.name in theirs:
            value = theirs[measure.name]
            measures.append(Measure(f"  {other.name}", value, measure.unit))
            measures.append(Measure("  ratio", measure.value / value, "times"))
    conditions = {"blocks": blocks, "64 blocks": "16 workers", "8192 blocks": "256 workers", "cores used": 1}
    return Report("index", conditions | ({"peer": other.name} if other else {}), measures)


def _short(shape: IndexShape) -> list[Measure]:
    names = [f"w{number}" for number in range(shape.workers)]
    _warm(shape)
    index = _index(names)
    before = _resident()
    growing_s = _timed(lambda: _insert(index, names, shape.chains))
    resident = (_resident() - before) / index.rows
    _remove(index, names, shape.chains)
    insert_s = _timed(lambda: _insert(index, names, shape.chains))
    part = shape.chains[: len(shape.chains) // REPLACED]
    part_s = _timed(lambda: _remove(index, names, part))
    remove_s = part_s + _timed(lambda: _remove(index, names, shape.chains[len(part) :]))
    _insert(index, names, shape.chains)
    drawn_s = _timed(lambda: _find_all(index, shape.drawn))
    stored = [chain.blocks for chain in shape.chains]
    step = max(1, len(stored) * 7 // 11)
    cold = [stored[at * step % len(stored)] for at in range(len(shape.drawn))]
    cold_s = _timed(lambda: _find_all(index, cold))
    popular_s = _timed(lambda: _find_all(index, shape.popular))
    held = index.blocks[names[0]]
    clear_s = _timed(lambda: index.clear(names[0]))
    index.store(names[0], 0, 0, stored[0])
    small_s = _timed(lambda: index.clear(names[0]))
    finds = len(shape.drawn)
    return [
        Measure("inserts", shape.blocks / insert_s / 1e6, "M blocks/s", "at least 10"),
        Measure("inserts, growing from nothing", shape.blocks / growing_s / 1e6, "M blocks/s"),
        Measure("removals", shape.blocks / remove_s / 1e6, "M blocks/s", "at least 10"),
        Measure("finds of 64, drawn from all", finds / drawn_s / 1e3, "k finds/s", "at least 500"),
        Measure("finds of 64, the query in cold memory too", finds / cold_s / 1e3, "k finds/s"),
        Measure("finds of 64, popular prompts", finds / popular_s / 1e3, "k finds/s"),
        Measure(f"removal of a worker with {held} blocks", clear_s * 1e3, "ms"),
        Measure("removal of a worker with 64 blocks", small_s * 1e6, "us"),
        Measure("memory, right after the table grew", _worst(names, shape), "bytes/block", "at most 40"),
        Measure("memory, resident when grown to this", resident, "bytes/block", "at most 40"),
    ]


def _worn(blocks: int) -> list[Measure]:
    churn = Churn(blocks)
    churn.replace(1 + CHURNED)
    drawn = churn.prompts(min(CHURN_FINDS, blocks))
    worn_s = _timed(lambda: _find_all(churn.index, drawn))
    fresh = churn.in_order()
    assert fresh.digest() == churn.index.digest(), "they have the same content"
    fresh_s = _timed(lambda: _find_all(fresh, drawn))
    return [
        Measure(
            f"finds of 64, {blocks} blocks all replaced {CHURNED} times",
            len(drawn) / worn_s / 1e3,
            "k finds/s",
        ),
        Measure("  the same content, new", len(drawn) / fresh_s / 1e3, "k finds/s"),
        Measure("  blocks directly after their parents", churn.behind_parents(), "%"),
    ]


def _long(shape: IndexShape) -> list[Measure]:
    names = [f"w{number}" for number in range(shape.workers)]
    index = _index(names)
    _insert(index, names, shape.chains)
    _find_all(index, shape.drawn[:1])
    drawn_s = _timed(lambda: _find_all(index, shape.drawn * LONG_ROUNDS)) / LONG_ROUNDS
    often = shape.popular * (len(shape.drawn) // len(shape.popular))
    popular_s = _timed(lambda: _find_all(index, often))
    return [
        Measure(
            "finds of 8192, drawn from all", len(shape.drawn) / drawn_s / 1e3, "k finds/s", "at least 20"
        ),
        Measure("finds of 8192, popular prompts", len(often) / popular_s / 1e3, "k finds/s"),
        Measure("memory with 256 workers", index.nbytes / index.rows, "bytes/block"),
    ]


def _worst(names: list[str], shape: IndexShape) -> float:
    """Bytes per block right after the table grew for the last time before all blocks are stored."""
    index = _index(names)
    worst = 0.0
    capacity = len(index.table)
    for chain in shape.chains[: len(shape.chains) // REPLACED]:
        index.store(names[chain.worker], 0, chain.parent, chain.blocks)
        if len(index.table) != capacity:
            capacity = len(index.table)
            worst = index.nbytes / index.rows
    return worst or index.nbytes / max(1, index.rows)


def _index(names: list[str]) -> PrefixIndex:
    index = PrefixIndex()
    for name in names:
        index.add_worker(name)
    return index


def _insert(index: PrefixIndex, names: list[str], chains: list[Chain]) -> None:
    for worker, parent, blocks in chains:
        index.store(names[worker], 0, parent, blocks)


def _remove(index: PrefixIndex, names: list[str], chains: list[Chain]) -> None:
    for worker, _, blocks in chains:
        index.remove(names[worker], 0, blocks)


def _find_all(index: PrefixIndex, queries: list[U64]) -> None:
    for query in queries:
        index.find(query)


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _resident() -> int:
    """Bytes of memory that this process uses. Linux; 0 elsewhere."""
    try:
        with open("/proc/self/smaps_rollup") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Rss:"))
    except (OSError, StopIteration):
        return 0


def _warm(shape: IndexShape) -> None:
    """Compile, or load compiled code, before the measurement."""
    index = _index(["w"])
    blocks = shape.chains[0].blocks
    index.store("w", 0, 0, blocks)
    index.find(blocks)
    index.remove("w", 0, blocks)
    index.store("w", 0, 0, blocks)
    index.clear("w")
    index.reserve(2 * index.capacity)
