"""`headwater bench index`: the prefix index alone, on one core.

Conversations of mixed lengths grow turn by turn on one worker each, some start with a popular prompt, and a full worker evicts
as engines do: the tail of the least recently used conversation, last block first, and only as much as required.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from headwater.ops.bench.report import Measure, Report
from headwater.router.index.prefix_index import PrefixIndex
from headwater.router.index.update import TOP
from headwater.schemas import hashing
from headwater.schemas.hashing import U64, as_read_only


class Chain(NamedTuple):
    """Blocks that a worker stores after `parent` (0: start of a prompt)."""

    worker: int
    parent: int
    blocks: U64


class IndexShape(NamedTuple):
    """Chains to store, in order, and prompts to find: `drawn` from all, and `popular` ones."""

    workers: int
    blocks: int
    chains: list[Chain]
    drawn: list[U64]
    popular: list[U64]


SHORT_BLOCKS = 64
SHORT_WORKERS = 16
LONG_BLOCKS = 8_192
LONG_SHARED = 7_168
LONG_WORKERS = 256
LONG_HOLDERS = 32
LONG_PREFIXES = 64


def short_prompts(blocks: int, finds: int) -> IndexShape:
    """Prompts of 64 blocks that share nothing, each on one of 16 workers; finds over all of them, and over 1,000."""
    rng = np.random.default_rng(0)
    names = as_read_only(rng.integers(1, 2**63, blocks // SHORT_BLOCKS * SHORT_BLOCKS, dtype=np.uint64))
    cut = [names[at : at + SHORT_BLOCKS] for at in range(0, len(names), SHORT_BLOCKS)]
    chains = [Chain(number % SHORT_WORKERS, 0, chain) for number, chain in enumerate(cut)]
    return IndexShape(
        SHORT_WORKERS,
        len(names),
        chains,
        # A query has its own copy of the hashes, not the memory from which they were stored.
        [as_read_only(cut[at].copy()) for at in rng.integers(0, len(cut), finds).tolist()],
        [as_read_only(cut[at].copy()) for at in rng.integers(0, min(1_000, len(cut)), finds).tolist()],
    )


def long_prompts(blocks: int, finds: int) -> IndexShape:
    """Prompts of 8,192 blocks over 256 workers: 64 prefixes of 7,168 blocks, each on 32 workers, with as many tails of 1,024
    as fill the index, each on two of those. Finds over all, and over 16 prompts.
    """
    rng = np.random.default_rng(0)
    tail = LONG_BLOCKS - LONG_SHARED
    tails = max(1, (blocks // LONG_PREFIXES - LONG_SHARED) // tail)
    names = as_read_only(
        rng.integers(1, 2**63, LONG_PREFIXES * (LONG_SHARED + tails * tail), dtype=np.uint64)
    )
    chains: list[Chain] = []
    prompts: list[tuple[U64, U64]] = []
    pieces = _cut(names, tails, tail)
    for prefix in pieces:
        holders = rng.choice(LONG_WORKERS, LONG_HOLDERS, replace=False).tolist()
        chains += [Chain(worker, 0, prefix) for worker in holders]
        for _ in range(tails):
            rest = next(pieces)
            chains += [Chain(w, int(prefix[-1]), rest) for w in rng.choice(holders, 2, False).tolist()]
            prompts.append((prefix, rest))
    return IndexShape(
        LONG_WORKERS,
        len(names),
        chains,
        [as_read_only(np.concatenate(prompts[at])) for at in rng.integers(0, len(prompts), finds).tolist()],
        [as_read_only(np.concatenate(prompts[at])) for at in range(min(16, len(prompts)))],
    )


def _cut(names: U64, tails: int, tail: int) -> Iterator[U64]:
    at = 0
    while at < len(names):
        for length in (LONG_SHARED, *[tail] * tails):
            yield names[at : at + length]
            at += length


# An aged index, whose content was replaced several times, as engines replace it.

WORKERS = 16
POPULAR, POPULAR_BLOCKS, POPULAR_SHARE = 200, 24, 0.3
CONTINUES = 0.5
TURN, LONGEST_TURN = 24, 512


class Conversation:
    """Its own blocks, `held` of which its worker has, after `parent`, the end of a popular prompt or 0."""

    def __init__(self, opening: U64, blocks: U64) -> None:
        self.opening = opening
        self.parent = int(opening[-1]) if len(opening) else 0
        self.blocks = blocks
        self.held = 0


class Churn:
    """Workers with full caches, and their index."""

    def __init__(self, blocks: int) -> None:
        self.index = PrefixIndex()
        self.names = [f"w{number}" for number in range(WORKERS)]
        self.room = max(blocks // WORKERS, 2 * LONGEST_TURN)
        self.stored = 0
        self._rng = np.random.default_rng(0)
        self._live: list[OrderedDict[int, Conversation]] = [OrderedDict() for _ in self.names]
        self._free = [self.room] * WORKERS
        self._begun = 0
        for name in self.names:
            self.index.add_worker(name)
        self._popular = [self._fresh(POPULAR_BLOCKS) for _ in range(POPULAR)]
        for prompt in self._popular:
            for name in self.names:
                self.index.store(name, 0, 0, prompt)

    def replace(self, times: int) -> None:
        """Fill the index, and store as many blocks again this many times."""
        end = self.stored + times * self.room * WORKERS
        while self.stored < end:
            draws = self._rng.random((4096, 4))
            lengths = np.minimum(self._rng.geometric(1 / TURN, 4096), LONGEST_TURN)
            for (which, continues, opening, recent), length in zip(
                draws.tolist(), lengths.tolist(), strict=True
            ):
                self._turn(
                    int(which * WORKERS), continues < CONTINUES, opening / POPULAR_SHARE, recent, length
                )

    def prompts(self, count: int) -> list[U64]:
        """The first 64 blocks of random conversations that have that many cached."""
        candidates = [
            np.concatenate([each.opening, each.blocks[: SHORT_BLOCKS - len(each.opening)]])
            for live in self._live
            for each in live.values()
            if len(each.opening) + each.held >= SHORT_BLOCKS
        ]
        return [candidates[at].copy() for at in self._rng.integers(0, len(candidates), count).tolist()]

    def in_order(self) -> PrefixIndex:
        """A new index of the same content."""
        fresh = PrefixIndex()
        for name in self.names:
            fresh.add_worker(name)
            for prompt in self._popular:
                fresh.store(name, 0, 0, prompt)
        for name, live in zip(self.names, self._live, strict=True):
            for each in live.values():
                fresh.store(name, 0, each.parent, each.blocks[: each.held])
        return fresh

    def behind_parents(self) -> float:
        """The share of blocks, in percent, in the row after their parent's."""
        slab, top = self.index.slab, int(self.index.scratch[TOP])
        in_use = slab[0, 1:top] != 0
        behind = (slab[1, 1:top] == slab[0, : top - 1]) & in_use
        return 100 * float(np.count_nonzero(behind)) / max(1, int(np.count_nonzero(in_use)))

    def _turn(self, worker: int, continues: bool, opening: float, recent: float, length: int) -> None:
        live = self._live[worker]
        number = self._begun - 1 - int(recent * recent * self._begun)
        # No conversation exceeds its worker's cache, so that there is always another to evict.
        if continues and number in live and len(live[number].blocks) <= self.room // 2:
            live.move_to_end(number)
            each = live[number]
            each.blocks = np.concatenate([each.blocks, self._fresh(length)])
        else:
            prompt = self._popular[int(opening * POPULAR)] if opening < 1 else self._popular[0][:0]
            number, each = self._begun, Conversation(prompt, self._fresh(length))
            live[number] = each
            self._begun += 1
        missing = each.blocks[each.held :]
        if self._free[worker] < len(missing):
            self._evict(worker, len(missing) - self._free[worker])
        before = each.blocks[each.held - 1] if each.held else each.parent
        self.index.store(self.names[worker], 0, int(before), missing)
        self._free[worker] -= len(missing)
        each.held = len(each.blocks)
        self.stored += len(missing)

    def _evict(self, worker: int, needed: int) -> None:
        live = self._live[worker]
        while needed > 0:
            number, oldest = next(iter(live.items()))
            remaining = max(0, oldest.held - needed)
            gone = oldest.blocks[remaining : oldest.held][::-1].copy()
            self.index.remove(self.names[worker], 0, gone)
            self._free[worker] += len(gone)
            needed -= len(gone)
            oldest.held = remaining
            if remaining == 0:
                del live[number]

    def _fresh(self, length: int) -> U64:
        return self._rng.integers(1, 2**63, length, dtype=np.uint64)


# The benchmark.

BLOCKS = 10_000_000
SHORT_FINDS = 200_000
LONG_FINDS = 2_000
LONG_ROUNDS = 2
REPLACED = 4
CHURNED = 4
CHURN_BLOCKS = 2_000_000
CHURN_FINDS = 50_000


def bench(blocks: int = BLOCKS) -> Report:
    """Inserts, removals and finds of prompts of 64 blocks, the finds again after much churn, then finds of prompts of 8,192,
    all with a full index.

    `IndexShape` describes the prompts.
    """
    measures = _short(short_prompts(blocks, min(SHORT_FINDS, blocks)))
    measures += _worn(min(blocks, CHURN_BLOCKS))
    measures += _long(long_prompts(blocks, LONG_FINDS))
    conditions = {"blocks": blocks, "64 blocks": "16 workers", "8192 blocks": "256 workers", "cores used": 1}
    return Report("index", conditions, measures)


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


# `headwater bench hash`: tokens to sequence hashes.

TOKENS = 131_072
REPEATS = 200


def bench_hashing() -> Report:
    """Best and median time to hash a prompt of 131,072 tokens at block sizes 16 and 64, on one core."""
    tokens = np.random.default_rng(0).integers(0, 150_000, TOKENS, dtype=np.uint32)
    measures: list[Measure] = []
    for size in (16, 64):
        hashing.sequence_hashes(tokens, size)
        times: list[float] = []
        for _ in range(REPEATS):
            began = time.perf_counter()
            hashing.sequence_hashes(tokens, size)
            times.append((time.perf_counter() - began) * 1000)
        target = "at most 0.3" if size == 16 else ""
        measures.append(Measure(f"block size {size}, median", sorted(times)[REPEATS // 2], "ms", target))
        measures.append(Measure(f"block size {size}, best", min(times), "ms"))
    plain = tokens[:16_384].tolist()
    began = time.perf_counter()
    hashing.chain_plain(plain, 16, 0)
    per_prompt = (time.perf_counter() - began) * 1000 * TOKENS / len(plain)
    measures.append(Measure("plain Python, block size 16", per_prompt, "ms"))
    return Report("hash", {"tokens": TOKENS, "repeats": REPEATS}, measures)
