"""What each worker that may take a request would have to do for it, and at what cost.

Where there are prefill workers, a request may go to one of them first (leg "prefill") and on from there: that costs
the prompt there, moving what the best decode worker lacks, and the memory there. It competes with doing all of it on
one worker (leg ""), where computing the prompt is in the way of those who decode.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from headwater.router import cost, filters
from headwater.router.index import PrefixIndex
from headwater.router.load import Loads
from headwater.router.step_model import StepModel
from headwater.router.worker import Worker
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
    policy: str = "kv"
    temperature: float = 0.0
    waited_ms: int = 0


class Scene(NamedTuple):
    """What all candidates of one decision are judged by.

    `depths[tier, slot]`: blocks of the prompt held; `assumed`: blocks that workers are assumed to hold by now.
    """

    prefixes: PrefixIndex
    depths: U64
    cold: set[str]
    query: RouteQuery
    standing: Standing
    loads: Loads
    assumed: Mapping[str, int]


def candidates_for(scene: Scene) -> list[Candidate]:
    """All that may be chosen, by name and, for one worker, the whole request only."""
    query = scene.query
    able = filters.able([worker for _, worker in sorted(scene.loads.workers.items())], query)
    behind = [worker for worker in able if worker.role != "prefill"]
    weights = scene.standing.weights
    works = works_of(scene, able)
    if query.asked == "decode":
        return [
            _candidate(scene, worker, works, "decode", cost.handed_over(weights, works[worker.name]))
            for worker in able
        ]
    # What is left of a request behind its prefill, at its cheapest, by whom it can be handed over to.
    rest: dict[str, tuple[float, float]] = {}
    for worker in behind if len(behind) < len(able) else ():
        work = works[worker.name]
        best = (cost.handed_over(weights, work), cost.transfer(weights, work))
        rest[worker.pairs_with] = min(best, rest.get(worker.pairs_with, best))
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
            score, moved = rest[worker.pairs_with]
            score += cost.prefill(weights, work)
            found.append(_candidate(scene, worker, works, "prefill", score, moved))
    return found


def in_question(scene: Scene, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
    """The candidates among which cost decides: a short rest of a prompt is computed where it is decoded."""
    alone = [candidate for candidate in candidates if not candidate.leg]
    if not alone or len(alone) == len(candidates):
        return candidates
    nearest = min(alone, key=lambda candidate: candidate.score)
    weights = scene.standing.weights
    size = scene.loads.workers[nearest.worker].block_size
    held = (nearest.cached_blocks + nearest.lower_blocks) * size
    if scene.query.prompt_tokens - held <= weights.local_tokens:
        return alone
    return [candidate for candidate in candidates if candidate.leg] if weights.apart else candidates


def works_of(scene: Scene, workers: Sequence[Worker]) -> dict[str, cost.Work]:
    """What each would have to do; with times for all of them or, where one's are not known, for none."""
    models = [_model(scene.loads, worker) for worker in workers] if scene.standing.weights.estimate else []
    known = bool(models) and all(model.learned for model in models)
    return {
        worker.name: _work(scene, worker, models[number] if known else None)
        for number, worker in enumerate(workers)
    }


def _model(loads: Loads, worker: Worker) -> StepModel:
    own = worker.steps
    return own if own.learned else loads.steps.get(worker.engine, own)


def _work(scene: Scene, worker: Worker, model: StepModel | None) -> cost.Work:
    # An engine computes at least the last token itself, however much of the prompt it has.
    query = scene.query
    usable = max(0, query.prompt_tokens - 1) // worker.block_size
    slot = scene.prefixes.slots.get(worker.name)
    gpu = anywhere = 0
    if slot is not None and worker.name not in scene.cold:
        gpu = min(int(scene.depths[0, slot]), usable)
        anywhere = min(int(scene.depths[1, slot]), usable)
    held = max(gpu, min(scene.assumed.get(worker.name, 0), usable))
    now_ns = scene.standing.wall_ns
    prefill_tokens, decode_blocks = worker.promised(now_ns)
    work = cost.Work(
        worker.block_size,
        query.prompt_tokens,
        held,
        max(0, anywhere - held),
        prefill_tokens,
        decode_blocks,
        len(worker.requests),
        worker.total_blocks,
        held - gpu,
    )
    if model is None:
        return work
    # The engine knows what was generated since, and of requests that came to it otherwise.
    work = work._replace(decode_blocks=max(decode_blocks, worker.used_blocks))
    computed_ms = 0.0
    if prefill_tokens:
        since_ns, tokens = worker.computing_since(now_ns)
        # Clocks of two machines: never more than the whole prompt, never less than nothing.
        computed_ms = min(max(0.0, (now_ns - since_ns) / 1e6), model.predict(tokens))
    times = cost.times(model, work.uncached_tokens, prefill_tokens, computed_ms)
    return work._replace(times=times)


def _candidate(
    scene: Scene, worker: Worker, works: Mapping[str, cost.Work], leg: Leg, score: float, moved: float = 0.0
) -> Candidate:
    work = works[worker.name]
    name = scene.query.lora_name
    weights = scene.standing.weights
    loads_lora = bool(name) and name not in worker.loras
    if loads_lora:
        # Where all slots are taken another adapter must go first.
        full = len(worker.loras) >= worker.lora_slots
        score += weights.lora_load * (2 if full else 1) * cost.unit(work)
    times = work.times
    if leg == "decode":
        moved = cost.transfer(weights, work)
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
        assumed_blocks=work.assumed_blocks,
        queue_ms=times.queue if times is not None and leg != "decode" else 0.0,
        prefill_ms=times.prefill if times is not None and leg != "decode" else 0.0,
        transfer_ms=moved if times is not None else 0.0,
    )
