"""Who may take a request, with which part of it, and at what cost.

Where there are prefill workers, a request may go to one of them first (leg "prefill") and on from there: that costs
the prompt there, moving what the best decode worker lacks, and the memory there. It competes with doing all of it on
one worker (leg ""), where computing the prompt is in the way of those who decode.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from headwater.router import cost
from headwater.router.index import PrefixIndex
from headwater.router.load import Loads, Worker
from headwater.schemas.fleet import LORA_ON_DEMAND
from headwater.schemas.hashing import U64
from headwater.schemas.inference import Leg
from headwater.schemas.route import Candidate, RouteQuery, Weights


class Standing(NamedTuple):
    """Where a decision is made: everything but the query and the state."""

    number: int
    position: int
    seen: int
    wall_ns: int
    weights: Weights
    degraded: bool


class Scene(NamedTuple):
    """What all candidates of one decision are judged by. `depths[tier, slot]`: blocks of the prompt held."""

    prefixes: PrefixIndex
    depths: U64
    cold: set[str]
    query: RouteQuery
    standing: Standing


def candidates_for(scene: Scene, workers: Sequence[Worker]) -> list[Candidate]:
    """All that may be chosen, by name and, for one worker, the whole request only."""
    query = scene.query
    able = [worker for worker in workers if _able(worker, query)]
    behind = [worker for worker in able if worker.role != "prefill"]
    weights = scene.standing.weights
    works = {worker.name: _work(scene, worker) for worker in able}
    if query.asked == "decode":
        return [
            _candidate(scene, worker, works, "decode", cost.handed_over(weights, works[worker.name]))
            for worker in behind
            if worker.pairs_with == query.pairs_with
        ]
    # What is left of a request behind its prefill, at its cheapest, by whom it can be handed over to.
    rest: dict[str, float] = {}
    for worker in behind:
        score = cost.handed_over(weights, works[worker.name])
        rest[worker.pairs_with] = min(score, rest.get(worker.pairs_with, score))
    found: list[Candidate] = []
    for worker in able:
        work = works[worker.name]
        if query.pinned and worker.name != query.pinned:
            continue
        if worker.role != "prefill" or not behind:
            # With nobody to decode for it, a prefill worker does both rather than nothing.
            extra = cost.interference(weights, work) if worker.role == "decode" else 0.0
            found.append(_candidate(scene, worker, works, "", cost.whole(weights, work) + extra))
        elif worker.pairs_with and worker.pairs_with in rest:
            score = cost.prefill(weights, work) + rest[worker.pairs_with]
            found.append(_candidate(scene, worker, works, "prefill", score))
    return found


def in_question(scene: Scene, candidates: Sequence[Candidate], loads: Loads) -> Sequence[Candidate]:
    """The candidates among which cost decides: a short rest of a prompt is computed where it is decoded."""
    alone = [candidate for candidate in candidates if not candidate.leg]
    if not alone or len(alone) == len(candidates):
        return candidates
    nearest = loads.workers[min(alone, key=lambda candidate: candidate.score).worker]
    weights = scene.standing.weights
    if _work(scene, nearest).uncached_tokens <= weights.local_tokens:
        return alone
    return [candidate for candidate in candidates if candidate.leg] if weights.apart else candidates


def why_none(loads: Loads, query: RouteQuery) -> str:
    """What to tell a client for whom there is no worker."""
    if not loads.workers:
        return "no worker has joined this pool"
    if query.pinned and query.pinned not in loads.workers:
        return f"worker {query.pinned} is gone"
    count = len(loads.workers)
    if query.asked == "decode":
        return f"none of the {count} workers can decode behind that prefill (draining, just failed, or not its pair)"
    missing = [need for need in query.needs if not any(_has(w, need) for w in loads.workers.values())]
    if missing:
        return f"none of the {count} workers can do {', '.join(missing)}"
    if query.lora_name and not any(_serves_adapter(w, query.lora_name) for w in loads.workers.values()):
        return f"none of the {count} workers holds or may load adapter {query.lora_name}"
    if query.tier and not any(worker.tier == query.tier for worker in loads.workers.values()):
        return f"none of the {count} workers is of tier {query.tier}"
    return f"none of the {count} workers takes requests (tainted, draining, paused, asleep or just failed)"


def _able(worker: Worker, query: RouteQuery) -> bool:
    if not worker.takes_requests or f"{worker.name}.{worker.epoch}" in query.exclude:
        return False
    if query.lora_name and not _serves_adapter(worker, query.lora_name):
        return False
    if (query.tier and worker.tier != query.tier) or not set(worker.taints) <= set(query.tolerates):
        return False
    return all(_has(worker, need) for need in query.needs)


def _has(worker: Worker, need: str) -> bool:
    # Workers of releases that did not tell are taken for able: the engine refuses by itself.
    return not worker.capabilities or need in worker.capabilities


def _serves_adapter(worker: Worker, name: str) -> bool:
    return name in worker.loras or (worker.lora_slots > 0 and LORA_ON_DEMAND in worker.capabilities)


def _work(scene: Scene, worker: Worker) -> cost.Work:
    # An engine computes at least the last token itself, however much of the prompt it has.
    query = scene.query
    usable = max(0, query.prompt_tokens - 1) // worker.block_size
    slot = scene.prefixes.slots.get(worker.name)
    gpu = anywhere = 0
    if slot is not None and worker.name not in scene.cold:
        gpu = min(int(scene.depths[0, slot]), usable)
        anywhere = min(int(scene.depths[1, slot]), usable)
    prefill_tokens, decode_blocks = worker.promised(scene.standing.wall_ns)
    return cost.Work(
        worker.block_size,
        query.prompt_tokens,
        gpu,
        anywhere - gpu,
        prefill_tokens,
        decode_blocks,
        len(worker.requests),
    )


def _candidate(
    scene: Scene, worker: Worker, works: Mapping[str, cost.Work], leg: Leg, score: float
) -> Candidate:
    work = works[worker.name]
    name = scene.query.lora_name
    loads_lora = bool(name) and name not in worker.loras
    if loads_lora:
        # Where all slots are taken another adapter must go first.
        full = len(worker.loras) >= worker.lora_slots
        score += scene.standing.weights.lora_load * (2 if full else 1)
    return Candidate(
        worker=worker.name,
        epoch=worker.epoch,
        cached_blocks=work.cached_blocks,
        lower_blocks=work.lower_blocks,
        prefill_tokens=work.prefill_tokens,
        decode_blocks=work.decode_blocks,
        requests=work.requests,
        score=score,
        leg=leg,
        loads_lora=loads_lora,
    )
