"""`headwater bench index`: the prefix index alone, on one core."""

import time
from collections.abc import Callable

import numpy as np

from headwater.ops.bench.report import Measure, Report
from headwater.router.index import PrefixIndex
from headwater.schemas.hashing import U64

BLOCKS = 8_000_000
WORKERS = 16
CHAIN = 64
FINDS = 200_000


def bench() -> Report:
    """Inserts, finds and removals of chains of 64 blocks over 16 workers, in a table with room for them.

    Finds are measured twice: on prompts drawn from the whole table (each block a cache miss), and on 1,000
    popular prompts (what a fleet mostly sees).
    """
    rng = np.random.default_rng(0)
    hashes: U64 = rng.integers(1, 2**63, BLOCKS, dtype=np.uint64)
    chains = [hashes[at : at + CHAIN] for at in range(0, BLOCKS, CHAIN)]
    names = [f"w{number}" for number in range(WORKERS)]
    index = PrefixIndex()
    for name in names:
        index.add_worker(name)
    growing_s = _timed(lambda: _insert(index, names, chains[: len(chains) // 4]))
    _remove(index, names, chains[: len(chains) // 4])
    index.reserve(BLOCKS)
    _warm(index, chains[0])
    insert_s = _timed(lambda: _insert(index, names, chains))
    remove_s = _timed(lambda: _remove(index, names, chains))
    _insert(index, names, chains)
    cold = [chains[at] for at in rng.integers(0, len(chains), FINDS).tolist()]
    hot = [chains[at] for at in rng.integers(0, 1_000, FINDS).tolist()]
    cold_s = _timed(lambda: _find_all(index, cold))
    hot_s = _timed(lambda: _find_all(index, hot))
    bytes_per_block = index.nbytes / index.rows
    return Report(
        "index",
        {"blocks": BLOCKS, "workers": WORKERS, "blocks per call": CHAIN, "cores used": 1},
        [
            Measure("inserts", BLOCKS / insert_s / 1e6, "M blocks/s", "at least 10"),
            Measure("inserts, table growing from nothing", BLOCKS / 4 / growing_s / 1e6, "M blocks/s"),
            Measure("removals", BLOCKS / remove_s / 1e6, "M blocks/s"),
            Measure("finds, drawn from all", FINDS / cold_s / 1e3, "k finds/s", "at least 500"),
            Measure("finds, popular prompts", FINDS / hot_s / 1e3, "k finds/s"),
            Measure("memory", bytes_per_block, "bytes/block"),
        ],
    )


def _insert(index: PrefixIndex, names: list[str], chains: list[U64]) -> None:
    for number, chain in enumerate(chains):
        index.store(names[number % WORKERS], 0, 0, chain)


def _remove(index: PrefixIndex, names: list[str], chains: list[U64]) -> None:
    for number, chain in enumerate(chains):
        index.remove(names[number % WORKERS], 0, chain)


def _find_all(index: PrefixIndex, queries: list[U64]) -> None:
    for query in queries:
        index.find(query)


def _timed(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _warm(index: PrefixIndex, chain: U64) -> None:
    index.store("w0", 0, 0, chain)
    index.find(chain)
    index.remove("w0", 0, chain)
