"""Deciding: `decide(state, …) -> Decision`, pure, and the same again from a decision's record.

A decision keeps its prompt as a few numbers (count of blocks, deepest hash that anyone has, some of those behind it). The
matched path is in the index, by parents, so `recompute` gets the very same answer as long as it stands on the same state.
"""

from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from headwater.router.assumed import places
from headwater.router.candidates import Scene, Standing, candidates_for, in_question
from headwater.router.filters import why_none
from headwater.router.index import PrefixIndex
from headwater.router.load import Loads
from headwater.router.policies import POLICIES, CannotChoose, Choice
from headwater.schemas.hashing import U64, pack_hashes, unpack_hashes
from headwater.schemas.route import Candidate, Decision, RouteQuery, RouteRefused

NO_WORKER_RETRY_S = 1.0


class Prompt(NamedTuple):
    """What a decision needs of a prompt. `hashes` may stop behind the first block that nobody has."""

    blocks: int
    hashes: U64
    last: int


class CannotRecompute(ValueError):
    """The index does not hold the path that the decision says was matched."""


def prompt_of(query: RouteQuery) -> Prompt:
    """The prompt of a query."""
    hashes = unpack_hashes(query.hashes)
    return Prompt(len(hashes), hashes, int(hashes[-1]) if len(hashes) else 0)


def behind(prompt: Prompt, deepest: int) -> list[tuple[int, int]]:
    """(place, hash) of the blocks behind the deepest known one that a decision names."""
    if len(prompt.hashes) < prompt.blocks:
        # From the record of a release that named none.
        return []
    named = places(deepest, prompt.blocks)
    return list(zip(named, prompt.hashes[named].tolist(), strict=True)) if named else []


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
    """Choose a worker by the query's policy, or else the router's; what is left to chance is drawn by the recorded seed."""
    standing = standing._replace(
        policy=query.policy or standing.policy,
        temperature=query.temperature if query.temperature >= 0 else standing.temperature,
    )
    policy = POLICIES.get(standing.policy)
    if policy is None:
        return RouteRefused(f"unknown policy {standing.policy}: there are {', '.join(POLICIES)}", status=400)
    deepest, depths = index.find(prompt.hashes)
    named = behind(prompt, deepest)
    scene = Scene(index, depths, cold, query, standing, loads, loads.assumed.depths(named))
    candidates = candidates_for(scene)
    if not candidates:
        # Waiting helps against what passes. A first placement in a tier that no worker has is a mistake of its client.
        unknown = (
            query.waits and bool(query.tier) and not any(w.tier == query.tier for w in loads.workers.values())
        )
        reason = why_none(list(loads.workers.values()), query)
        return RouteRefused(
            reason, NO_WORKER_RETRY_S, final=unknown, code="no_worker_of_tier" if unknown else ""
        )
    seed = seed_of(query.request)
    try:
        chosen = policy(Choice(scene, in_question(scene, candidates), seed))
    except CannotChoose as error:
        return RouteRefused(str(error), status=400)
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
        policy=standing.policy,
        weights=standing.weights,
        seed=seed,
        worker=chosen.worker,
        epoch=chosen.epoch,
        candidates=tuple(candidates),
        degraded=standing.degraded,
        leg=chosen.leg,
        asked=query.asked,
        lora_name=query.lora_name,
        needs=query.needs,
        pairs_with=query.pairs_with or _pairs_with(loads, chosen),
        temperature=standing.temperature,
        session=query.session,
        tier=query.tier,
        tolerates=query.tolerates,
        assumed=pack_hashes(np.array([block for _, block in named], np.uint64)),
        waited_ms=standing.waited_ms,
    )


def _pairs_with(loads: Loads, chosen: Candidate) -> str:
    """Whom the KV of a prefill leg can be handed over to."""
    return loads.workers[chosen.worker].pairs_with if chosen.leg == "prefill" else ""


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
    # Only the named ones of what comes behind were looked at; the one after the path is always among them.
    hashes: U64 = np.zeros(recorded.blocks if recorded.assumed else len(path), np.uint64)
    hashes[: len(path)] = path
    if recorded.assumed:
        hashes[places(len(path), recorded.blocks)] = unpack_hashes(recorded.assumed)
    elif recorded.following:
        hashes = np.append(hashes, np.uint64(recorded.following))
    query = RouteQuery(
        recorded.request,
        recorded.prompt_tokens,
        recorded.max_tokens,
        b"",
        recorded.pinned,
        recorded.exclude,
        recorded.asked,
        recorded.lora_name,
        recorded.needs,
        recorded.pairs_with if recorded.asked == "decode" else "",
        policy=recorded.policy,
        temperature=recorded.temperature,
        session=recorded.session,
        tier=recorded.tier,
        tolerates=recorded.tolerates,
    )
    standing = Standing(
        recorded.number,
        recorded.position,
        recorded.seen,
        recorded.wall_ns,
        recorded.weights,
        recorded.degraded,
        waited_ms=recorded.waited_ms,
    )
    prompt = Prompt(recorded.blocks, hashes, recorded.last)
    return decide(index, loads, cold, prompt, query, standing)


__all__ = ["CannotRecompute", "Prompt", "Standing", "decide", "prompt_of", "recompute", "seed_of"]
