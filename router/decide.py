"""The decision: `decide` makes one, and `recompute` makes the same from its record. Pure.

A record keeps a few numbers of its prompt: the count of blocks, the deepest hash that any worker has, and some of those after it.
The matched path is in the index, by parents, so `recompute` on the same state gives the same decision, bit for bit. Of its candidates it
keeps a summary (`summarize`); `reevaluate` gives all of them.

The summary has a few candidates that explain the choice, and a digest over the costs of all, with which a recomputation can be compared. Workers
left out by name, of which a saturated fleet has many, are kept as bits, in order of their names.
"""

from hashlib import blake2b
from typing import Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from headwater.router import cost
from headwater.router.candidates import (
    Candidates,
    draw_policy,
    draw_trait,
    drawing_key,
    explain_no_worker,
    explain_weights,
    score_candidates,
    select_legs,
    weighted_workers,
)
from headwater.router.columns import F64, WorkerColumns
from headwater.router.context import ALGORITHM, RECOMPUTABLE, DecisionContext, ScoringContext
from headwater.router.encode_leg import estimate_encoding
from headwater.router.index.prefix_index import PrefixIndex
from headwater.router.load import Loads
from headwater.router.policies import POLICIES, Choice, PolicyError
from headwater.router.worker import sample_positions
from headwater.schemas.hashing import U64, pack_hashes, tenant_digest, unpack_hashes
from headwater.schemas.routing import (
    Candidate,
    Constraints,
    Decision,
    Draw,
    FlowControl,
    Preferences,
    RouteQuery,
    RouteRefused,
)

ALL_MAX: Final = 8
"""Up to this many candidates are all kept."""

BEST: Final = 5
"""The number of candidates with the lowest costs that are kept of more …"""

BEST_OFFERED: Final = 2
"""… and of the lowest cost among those that the policy could pick."""

NAMED_MAX: Final = 8
"""Up to so many workers that are left out are kept by name."""

DIGEST_BYTES: Final = 8


class Summary(NamedTuple):
    """`candidates` that are kept of the `scored` ones, and the `digest` of all."""

    candidates: tuple[Candidate, ...]
    scored: int
    digest: bytes


def summarize(
    candidates: Candidates, offered: Candidates, chosen: Candidate, columns: WorkerColumns
) -> Summary:
    """Summarize the candidates, of which the policy chose one of those `offered`.

    Besides the cheapest, it keeps the fastest to the first token, with its queue and without, and the one that holds most of
    the prompt: who asks for these of all candidates finds them in the record.
    """
    if len(candidates) <= ALL_MAX:
        recorded = list(candidates)
    else:
        rows = candidates.rows
        places = set(find_lowest(candidates.scores, BEST))
        kept_rows = [columns.rows[chosen.worker]]
        if offered is not candidates:
            kept_rows += offered.rows[find_lowest(offered.scores, BEST_OFFERED)].tolist()
        places.update(np.searchsorted(rows, kept_rows).tolist())
        served = candidates.times(cost.PREFILL_MS) + candidates.times(cost.TRANSFER_MS)
        places.add(int(served.argmin()))
        places.add(int((served + candidates.times(cost.QUEUE_MS)).argmin()))
        held = candidates.quantity(cost.CACHED) + candidates.quantity(cost.LOWER)
        places.add(int((held * columns.table["block_size"][rows]).argmax()))
        recorded = candidates.at(sorted(places))
    return Summary(tuple(recorded), len(candidates), digest_of(candidates, columns))


def find_lowest(values: F64, count: int) -> list[int]:
    """Return the positions of the `count` lowest values; of equal ones the first."""
    if len(values) <= count:
        return list(range(len(values)))
    limit = np.partition(values, count - 1)[count - 1]
    below: list[int] = (values < limit).nonzero()[0].tolist()
    equal: list[int] = (values == limit).nonzero()[0].tolist()
    return below + equal[: count - len(below)]


def digest_of(candidates: Candidates, columns: WorkerColumns) -> bytes:
    """A digest of who the candidates are, which leg each would do, and what it would cost, to the last bit."""
    digest = blake2b(columns.keys[candidates.rows].tobytes(), digest_size=DIGEST_BYTES)
    digest.update(candidates.quantity(cost.LEG).tobytes())
    digest.update(candidates.scores.tobytes())
    return digest.digest()


def pack_rows(rows: list[int], count: int) -> bytes:
    """Rows of a fleet of `count` workers as bits."""
    bits: NDArray[np.bool_] = np.zeros(count, np.bool_)
    bits[rows] = True
    return np.packbits(bits).tobytes()


def unpack_rows(packed: bytes, count: int) -> list[int] | None:
    """The rows; None if they are of a fleet of another size."""
    if len(packed) != (count + 7) // 8:
        return None
    rows: list[int] = np.unpackbits(np.frombuffer(packed, np.uint8), count=count).nonzero()[0].tolist()
    return rows


# Deciding and recomputing.

NO_WORKER_RETRY_S: Final = 1.0
RECOMPUTED: Final = FlowControl()
"""A recomputed query does not wait: it was admitted when it was recorded."""


class Prompt(NamedTuple):
    """The block hashes of a prompt. `hashes` may stop after the first block that no worker has."""

    blocks: int
    hashes: U64
    last: int


class Draws(NamedTuple):
    """The draws of one decision, each None where nothing was drawn."""

    engine: Draw | None
    revision: Draw | None
    policy: Draw | None


class Evaluation(NamedTuple):
    """A decision and what it was made from: all candidates, and those that the policy was offered.

    Read the candidates before the fold changes.
    """

    decision: Decision
    candidates: Candidates
    offered: Candidates


class CannotRecompute(ValueError):
    """The state is not the one that the decision was made on, or this release lacks its algorithm."""


def prompt_of(query: RouteQuery) -> Prompt:
    """The prompt of a query. Raises ValueError if its bytes are no packed hashes."""
    hashes = unpack_hashes(query.hashes)
    return Prompt(len(hashes), hashes, int(hashes[-1]) if len(hashes) else 0)


def sample_uncached(prompt: Prompt, deepest: int) -> tuple[list[int], U64]:
    """Positions and hashes of a sample of the blocks after the deepest known one: those credited to the chosen worker."""
    # The record of a release that did not sample has fewer hashes.
    positions = sample_positions(deepest, prompt.blocks) if len(prompt.hashes) >= prompt.blocks else []
    return positions, prompt.hashes[positions] if positions else prompt.hashes[:0]


def seed_of(request: str) -> int:
    """The decision's random seed: 64 bits of the request id's digest, equal on every machine."""
    return int.from_bytes(blake2b(request.encode(), digest_size=8).digest(), "little")


def decide(
    index: PrefixIndex,
    loads: Loads,
    cold: set[str],
    prompt: Prompt,
    query: RouteQuery,
    context: DecisionContext,
) -> Decision | RouteRefused:
    """Choose a worker by the query's policy, or else the router's. Random draws use the recorded seed."""
    evaluation = evaluate(index, loads, cold, prompt, query, context)
    return evaluation.decision if isinstance(evaluation, Evaluation) else evaluation


def evaluate(
    index: PrefixIndex,
    loads: Loads,
    cold: set[str],
    prompt: Prompt,
    query: RouteQuery,
    context: DecisionContext,
) -> Evaluation | RouteRefused:
    """`decide`, with all candidates."""
    stated, seed = query.preferences, seed_of(query.request)
    key, splits = drawing_key(stated, seed), context.algorithm > 1
    policy_draw = draw_policy(loads, key, POLICIES.keys()) if splits and not stated.policy else None
    preferences = msgspec.structs.replace(
        stated,
        policy=stated.policy or (policy_draw.used if policy_draw is not None else context.policy),
        temperature=stated.temperature if stated.temperature >= 0 else context.temperature,
    )
    policy = POLICIES.get(preferences.policy)
    if policy is None:
        return RouteRefused(
            f"unknown policy {preferences.policy}: available are {', '.join(POLICIES)}", status=400
        )
    deepest, depths = index.find(prompt.hashes)
    positions, sample = sample_uncached(prompt, deepest)
    credited = loads.credit.depths(positions, sample.tolist())
    scoring = ScoringContext(index, depths, cold, query, context, loads, credited, preferences)
    candidates = score_candidates(scoring)
    if not candidates:
        return _refuse(loads, query)
    draw = draw_trait(loads, query.constraints, key, "engine", candidates)
    offered = candidates if draw is None else candidates.having("engine", draw.used)
    revision_draw = draw_trait(loads, query.constraints, key, "revision", offered) if splits else None
    offered = offered if revision_draw is None else offered.having("revision", revision_draw.used)
    try:
        choice = Choice(scoring, select_legs(scoring, offered), seed)
        chosen = policy(choice)
    except PolicyError as error:
        return RouteRefused(str(error), status=400)
    draws = Draws(draw, revision_draw, policy_draw)
    decision = _record(choice, chosen, candidates, draws, prompt, deepest, sample)
    return Evaluation(decision, candidates, choice.candidates)


def _record(
    choice: Choice,
    chosen: Candidate,
    candidates: Candidates,
    draws: Draws,
    prompt: Prompt,
    deepest: int,
    sample: U64,
) -> Decision:
    """The record of the choice of `chosen`: all that `recompute` needs, and a summary of the candidates.

    The `deepest` leading blocks of the prompt are on some worker; `sample` has hashes of the following ones.
    """
    scoring = choice.scoring
    query, context, loads = scoring.query, scoring.context, scoring.loads
    hashes, columns, constraints = prompt.hashes, loads.columns, query.constraints
    tenant = context.tenant or tenant_digest(query.flow.tenant)
    expected = loads.outputs.expect(query.max_tokens, query.prompt_tokens, tenant)
    summary, excluded = summarize(candidates, choice.candidates, chosen, columns), b""
    if len(candidates.excluded) > NAMED_MAX:
        excluded = pack_rows(list(candidates.excluded), len(columns.names))
        constraints = msgspec.structs.replace(constraints, exclude=())
    return Decision(
        number=context.number,
        position=context.position,
        seen=context.seen,
        wall_ns=context.wall_ns,
        request=query.request,
        prompt_tokens=query.prompt_tokens,
        max_tokens=query.max_tokens,
        blocks=prompt.blocks,
        deepest=int(hashes[deepest - 1]) if deepest else 0,
        following=int(hashes[deepest]) if deepest < len(hashes) else 0,
        last=prompt.last,
        constraints=constraints,
        preferences=scoring.preferences,
        weights=context.weights,
        seed=choice.seed,
        worker=chosen.worker,
        epoch=chosen.epoch,
        candidates=summary.candidates,
        degraded=context.degraded,
        leg=chosen.leg,
        pairs_with=_pairs_with(loads, chosen),
        assumed=pack_hashes(sample),
        waited_ms=context.waited_ms,
        draw=draws.engine,
        algorithm=context.algorithm,
        scored=summary.scored,
        digest=summary.digest,
        excluded=excluded,
        output_tokens=expected.mean,
        encoding=estimate_encoding(loads, chosen, query.prompt_tokens, query.reader),
        output_deviation=expected.deviation,
        tenant=tenant,
        spare=candidates.spare,
        revision=loads.workers[chosen.worker].revision if context.algorithm > 1 else "",
        revision_draw=draws.revision,
        policy_draw=draws.policy,
    )


def _refuse(loads: Loads, query: RouteQuery) -> RouteRefused:
    """No worker passed the filters. Most reasons pass; a tier that no worker has is the client's mistake."""
    workers, constraints = list(loads.workers.values()), query.constraints
    unknown = (
        query.flow.waits
        and bool(constraints.tier)
        and all(worker.tier != constraints.tier for worker in workers)
    )
    code = "no_worker_of_tier" if unknown else ""
    weighted = weighted_workers(loads, constraints)
    reason = (
        explain_no_worker(weighted, constraints)
        if weighted or not workers
        else explain_weights(loads, constraints)
    )
    return RouteRefused(reason, NO_WORKER_RETRY_S, final=unknown, code=code)


def _pairs_with(loads: Loads, chosen: Candidate) -> str:
    """The kind of hand-off that the KV of a prefill leg needs."""
    return loads.workers[chosen.worker].pairs_with if chosen.leg == "prefill" else ""


def recompute(
    index: PrefixIndex, loads: Loads, cold: set[str], recorded: Decision
) -> Decision | RouteRefused:
    """Decide again from the record alone; the result has the form of the record. Raises `CannotRecompute`."""
    evaluation = reevaluate(index, loads, cold, recorded)
    return evaluation if isinstance(evaluation, RouteRefused) else evaluation.decision


def constraints_of(loads: Loads, recorded: Decision) -> Constraints:
    """The constraints of a decision with all workers that it left out by name. Raises `CannotRecompute` on another fleet."""
    if not recorded.excluded:
        return recorded.constraints
    columns = loads.columns
    columns.refresh()
    rows = unpack_rows(recorded.excluded, len(columns.names))
    if rows is None:
        raise CannotRecompute(f"it leaves out workers of another fleet than these {len(columns.names)}")
    excluded = tuple(f"{columns.names[row]}.{columns.workers[row].epoch}" for row in rows)
    return msgspec.structs.replace(recorded.constraints, exclude=excluded)


def reevaluate(
    index: PrefixIndex, loads: Loads, cold: set[str], recorded: Decision
) -> Evaluation | RouteRefused:
    """Decide again from the record alone, with all candidates. Raises `CannotRecompute`."""
    if recorded.algorithm not in RECOMPUTABLE:
        versions = " and ".join(map(str, sorted(RECOMPUTABLE)))
        raise CannotRecompute(
            f"it was made by version {recorded.algorithm} of the algorithm, and this release has {versions}"
        )
    constraints = constraints_of(loads, recorded)
    path: U64 = np.zeros(0, np.uint64)
    if recorded.deepest:
        indexed_path = index.path(recorded.deepest, recorded.blocks)
        if indexed_path is None:
            raise CannotRecompute(f"block {recorded.deepest:016x} and its parents are not in the index")
        path = indexed_path
    # Of the blocks after the path only the sampled ones matter; the first of them is always in the sample.
    hashes: U64 = np.zeros(recorded.blocks if recorded.assumed else len(path), np.uint64)
    hashes[: len(path)] = path
    if recorded.assumed:
        assumed, positions = unpack_hashes(recorded.assumed), sample_positions(len(path), recorded.blocks)
        if len(assumed) != len(positions):
            raise CannotRecompute(f"block {recorded.deepest:016x} is at another depth of the index")
        hashes[positions] = assumed
    elif recorded.following:
        hashes = np.append(hashes, np.uint64(recorded.following))
    query = RouteQuery(
        request=recorded.request,
        prompt_tokens=recorded.prompt_tokens,
        max_tokens=recorded.max_tokens,
        hashes=b"",
        constraints=constraints,
        preferences=_stated(recorded),
        flow=RECOMPUTED,
        reader=recorded.encoding.reader if recorded.encoding is not None else "",
    )
    context = DecisionContext(
        number=recorded.number,
        position=recorded.position,
        seen=recorded.seen,
        wall_ns=recorded.wall_ns,
        weights=recorded.weights,
        degraded=recorded.degraded,
        waited_ms=recorded.waited_ms,
        tenant=recorded.tenant,
        algorithm=recorded.algorithm,
    )
    prompt = Prompt(recorded.blocks, hashes, recorded.last)
    return evaluate(index, loads, cold, prompt, query, context)


def _stated(recorded: Decision) -> Preferences:
    """The preferences of the query: a policy that was drawn was not among them."""
    preferences = recorded.preferences
    return preferences if recorded.policy_draw is None else msgspec.structs.replace(preferences, policy="")


def with_policy(recorded: Decision, policy: str) -> Decision:
    """The record as if its query had requested `policy`, without a random draw: what to recompute for a comparison."""
    preferences = msgspec.structs.replace(recorded.preferences, policy=policy, temperature=0.0)
    return msgspec.structs.replace(recorded, preferences=preferences, policy_draw=None)


__all__ = [
    "ALGORITHM",
    "RECOMPUTABLE",
    "CannotRecompute",
    "DecisionContext",
    "Evaluation",
    "Prompt",
    "decide",
    "evaluate",
    "prompt_of",
    "recompute",
    "reevaluate",
    "seed_of",
    "with_policy",
]
