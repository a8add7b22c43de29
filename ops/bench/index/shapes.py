"""The data of the index benchmark: stores and prompts of two shapes, the same for Headwater and a peer."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

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
