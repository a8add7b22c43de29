"""Deciding: `decide(state, …) -> Decision`, pure, and the same again from a decision's record.

A decision keeps its prompt as four numbers (count of blocks, deepest hash that anyone has, the one after it,
the last). The matched path is in the index, by parents, so `recompute` gets the very same answer as long as
it stands on the same state.
"""

from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from headwater.router.cost import score
from headwater.router.index import PrefixIndex
from headwater.router.load import Loads, Worker
from headwater.schemas.hashing import U64, unpack_hashes
from headwater.schemas.route import Candidate, Decision, RouteQuery, RouteRefused, Weights

POLICY = "kv"
NO_WORKER_RETRY_S = 1.0


class Prompt(NamedTuple):
    """What a decision needs of a prompt. `hashes` may stop behind the first block that nobody has."""

    blocks: int
    hashes: U64
    last: int


class Standing(NamedTuple):
    """Where a decision is made: everything but the query and the state."""

    number: int
    position: int
    seen: int
    wall_ns: int
    weights: Weights
    degraded: bool


class CannotRecompute(ValueError):
    """The index does not hold the path that the decision says was matched."""


def prompt_of(query: RouteQuery) -> Prompt:
    """The prompt of a query."""
    hashes = unpack_hashes(query.hashes)
    return Prompt(len(hashes), hashes, int(hashes[-1]) if len(hashes) else 0)


def seed_of(request: str) -> int:
    """The decision's random seed, from the request's id: recorded, and the same everywhere."""
    return int.from_bytes(blake2b(request.encode(), digest_size=8).digest(), "little")


def decide(
    index: PrefixIndex,
    loads: Loads,
    cold: set[str],
    prompt: Prompt,
    query: RouteQuery,
    standing: Standing,
) -> Decision | RouteRefused:
    """Choose the worker with the least cost; equal costs are drawn by the recorded seed."""
    deepest, depths = index.find(prompt.hashes)
    candidates = [
        _candidate(worker, index, depths, cold, prompt, query, standing)
        for name, worker in sorted(loads.workers.items())
        if _eligible(worker, query)
    ]
    if not candidates:
        return RouteRefused(_why_none(loads, query), NO_WORKER_RETRY_S)
    seed = seed_of(query.request)
    best = min(candidate.score for candidate in candidates)
    ties = [candidate for candidate in candidates if candidate.score == best]
    chosen = ties[seed % len(ties)]
    hashes = prompt.hashes
    return Decision(
        number=standing.number,
        position=standing.position,
        seen=standing.seen,
        wall_ns=standing.wall_ns,
        request=query.request,
        prompt_tokens=query.prompt_tokens,
        max_tokens=query.max_tokens,
        blocks=prompt.blocks,
        deepest=int(hashes[deepest - 1]) if deepest else 0,
        following=int(hashes[deepest]) if deepest < len(hashes) else 0,
        last=prompt.last,
        pinned=query.pinned,
        exclude=query.exclude,
        policy=POLICY,
        weights=standing.weights,
        seed=seed,
        worker=chosen.worker,
        epoch=chosen.epoch,
        candidates=tuple(candidates),
        degraded=standing.degraded,
    )


def recompute(
    index: PrefixIndex, loads: Loads, cold: set[str], recorded: Decision
) -> Decision | RouteRefused:
    """Decide again from the record alone. Raises `CannotRecompute` if the index lacks the matched path."""
    path: U64 = np.zeros(0, np.uint64)
    if recorded.deepest:
        found = index.path(recorded.deepest, recorded.blocks)
        if found is None:
            raise CannotRecompute(f"block {recorded.deepest:016x} and its parents are not in the index")
        path = found
    tail = [recorded.following] if recorded.following else []
    hashes = np.concatenate([path, np.array(tail, np.uint64)])
    query = RouteQuery(
        recorded.request,
        recorded.prompt_tokens,
        recorded.max_tokens,
        b"",
        recorded.pinned,
        recorded.exclude,
    )
    standing = Standing(
        recorded.number,
        recorded.position,
        recorded.seen,
        recorded.wall_ns,
        recorded.weights,
        recorded.degraded,
    )
    prompt = Prompt(recorded.blocks, hashes, recorded.last)
    return decide(index, loads, cold, prompt, query, standing)


def _eligible(worker: Worker, query: RouteQuery) -> bool:
    if worker.draining or f"{worker.name}.{worker.epoch}" in query.exclude:
        return False
    return not query.pinned or worker.name == query.pinned


def _candidate(
    worker: Worker,
    index: PrefixIndex,
    depths: U64,
    cold: set[str],
    prompt: Prompt,
    query: RouteQuery,
    standing: Standing,
) -> Candidate:
    # An engine computes at least the last token itself, however much of the prompt it has.
    usable = max(0, query.prompt_tokens - 1) // worker.block_size
    slot = index.slots.get(worker.name)
    gpu = anywhere = 0
    if slot is not None and worker.name not in cold:
        gpu, anywhere = min(int(depths[0, slot]), usable), min(int(depths[1, slot]), usable)
    prefill_tokens, decode_blocks = worker.promised(standing.wall_ns)
    return Candidate(
        worker=worker.name,
        epoch=worker.epoch,
        cached_blocks=gpu,
        lower_blocks=anywhere - gpu,
        prefill_tokens=prefill_tokens,
        decode_blocks=decode_blocks,
        requests=len(worker.requests),
        score=score(
            standing.weights,
            block_size=worker.block_size,
            prompt_tokens=query.prompt_tokens,
            cached_blocks=gpu,
            lower_blocks=anywhere - gpu,
            prefill_tokens=prefill_tokens,
            decode_blocks=decode_blocks,
        ),
    )


def _why_none(loads: Loads, query: RouteQuery) -> str:
    if not loads.workers:
        return "no worker has joined this pool"
    if query.pinned and query.pinned not in loads.workers:
        return f"worker {query.pinned} is gone"
    return f"none of the {len(loads.workers)} workers takes requests (draining or just failed)"
