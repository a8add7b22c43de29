"""A routing decision in plain Python, worker by worker: what the evaluation as arrays must equal, bit for bit."""

import math
from collections.abc import Mapping, Sequence

import msgspec

from headwater.router import cost
from headwater.router.candidates import allows, weighted_workers
from headwater.router.columns import LATE_MS
from headwater.router.context import ScoringContext
from headwater.router.cost import WorkEstimate, cost_weights, estimate_computed, estimate_times, weights_at
from headwater.router.estimates import StepModel, longer_ms
from headwater.router.load import Loads
from headwater.router.worker import Worker
from headwater.schemas.inference import Leg
from headwater.schemas.routing import Candidate


def score_candidates(scoring: ScoringContext) -> list[Candidate]:
    """See `candidates.score_candidates`."""
    wanted = scoring.constraints
    allowed = allowed_workers(scoring)
    decoders = [worker for worker in allowed if worker.role != "prefill"]
    weights = weights_at(cost_weights(scoring.weights), spare_capacity(scoring, allowed))
    estimates = estimate_work(scoring, allowed)
    if wanted.leg == "decode":
        return [
            _candidate(
                scoring, worker, estimates, "decode", cost.remote_decode(weights, estimates[worker.name])
            )
            for worker in allowed
        ]
    # The cheapest decode leg after a remote prefill, by the kind of hand-off and the revision that reach it.
    cheapest: dict[tuple[str, str], tuple[float, float, float]] = {}
    for worker in decoders if len(decoders) < len(allowed) else ():
        work = estimates[worker.name]
        best = (cost.remote_decode(weights, work), cost.transfer(weights, work), _itl_ms(worker, work))
        pair = (worker.pairs_with, worker.revision)
        cheapest[pair] = min(cheapest.get(pair, best), best, key=lambda one: one[:2])
    found: list[Candidate] = []
    for worker in allowed:
        work = estimates[worker.name]
        if wanted.pinned and worker.name != wanted.pinned:
            continue
        if worker.serves_whole and (worker.role != "prefill" or not decoders):
            # Without any decode worker, a prefill worker serves the whole request rather than none.
            extra = cost.interference(weights, work) if worker.role == "decode" else 0.0
            score = cost.aggregated(weights, work) + extra
            found.append(_candidate(scoring, worker, estimates, "", score))
        elif (
            worker.role == "prefill"
            and worker.pairs_with
            and (worker.pairs_with, worker.revision) in cheapest
        ):
            score, transfer, itl_ms = cheapest[worker.pairs_with, worker.revision]
            score += cost.prefill(weights, work)
            prefills = _candidate(scoring, worker, estimates, "prefill", score, transfer)
            found.append(msgspec.structs.replace(prefills, itl_ms=itl_ms))
    return found


def spare_capacity(scoring: ScoringContext, allowed: Sequence[Worker]) -> float:
    """How idle the workers are, 0 to 1."""
    used = 0.0
    for worker in allowed:
        tokens, blocks = worker.promised(scoring.context.wall_ns)
        share = max(blocks, worker.used_blocks) / worker.total_blocks if worker.total_blocks > 0 else 1.0
        used += 1.0 if tokens else min(1.0, share)
    count = len(allowed)
    return max(0.0, 1.0 - used / count / 0.4) * count / (count + 16.0) if count >= 16 else 0.0


def allowed_workers(scoring: ScoringContext) -> Sequence[Worker]:
    """Those that pass the filters and have not just failed this request."""
    wanted = scoring.constraints
    return [
        worker
        for worker in weighted_workers(scoring.loads, wanted)
        if allows(worker.traits, wanted) and f"{worker.name}.{worker.epoch}" not in wanted.exclude
    ]


def select_legs(scoring: ScoringContext, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
    """See `candidates.select_legs`."""
    aggregated = [candidate for candidate in candidates if not candidate.leg]
    if not aggregated or len(aggregated) == len(candidates):
        return candidates
    cheapest = min(aggregated, key=lambda candidate: candidate.score)
    block_size = scoring.loads.workers[cheapest.worker].block_size
    cached = (cheapest.cached_blocks + cheapest.lower_blocks) * block_size
    if scoring.query.prompt_tokens - cached <= scoring.weights.local_tokens:
        return aggregated
    return [candidate for candidate in candidates if candidate.leg] if scoring.weights.apart else candidates


def estimate_work(scoring: ScoringContext, workers: Sequence[Worker]) -> dict[str, WorkEstimate]:
    """The work at each worker. Times are given for all of them, or for none if the step times of one are unknown."""
    models = [_model(scoring.loads, worker) for worker in workers] if scoring.weights.estimate else []
    known = bool(models) and all(model.learned for model in models)
    return {
        worker.name: _work(scoring, worker, models[number] if known else None)
        for number, worker in enumerate(workers)
    }


def _model(loads: Loads, worker: Worker) -> StepModel:
    return loads.steps.get(worker.step_kind) or StepModel()


def _work(scoring: ScoringContext, worker: Worker, model: StepModel | None) -> WorkEstimate:
    # An engine computes at least the last token itself, even of a fully cached prompt.
    prompt_tokens = scoring.query.prompt_tokens
    usable = max(0, prompt_tokens - 1) // worker.block_size
    slot = scoring.prefixes.slots.get(worker.name)
    gpu = any_tier = 0
    if slot is not None and worker.name not in scoring.cold:
        gpu = min(int(scoring.depths[0, slot]), usable)
        any_tier = min(int(scoring.depths[1, slot]), usable)
    cached = max(gpu, min(scoring.credited.get(worker.name, 0), usable))
    now_ns = scoring.context.wall_ns
    prefill_tokens, decode_blocks = worker.promised(now_ns)
    work = WorkEstimate(
        worker.block_size,
        prompt_tokens,
        cached,
        max(0, any_tier - cached),
        prefill_tokens,
        decode_blocks,
        len(worker.requests),
        worker.total_blocks,
        cached - gpu,
        queued_prompts=worker.queued_prompts(now_ns),
    )
    if model is None:
        return work
    kinds = model.tokens, model.ms, len(model.kinds)
    longer = longer_ms(*kinds)
    # The engine's own count includes generated tokens, and requests that did not come through this pool's routers.
    work = work._replace(decode_blocks=max(decode_blocks, worker.used_blocks))
    computed_ms, left_tokens = 0.0, prefill_tokens
    queue = worker.list_queue(now_ns) if worker.signal_age_ms >= LATE_MS else []
    if queue:
        done = estimate_computed(
            *kinds,
            worker.pace,
            queue,
            len(queue),
            worker.computing_since(now_ns)[0],
            worker.signal_age_ms,
            now_ns,
        )
        left_tokens, computed_ms = prefill_tokens - done.tokens, done.spent_ms
        work = work._replace(queued_prompts=work.queued_prompts - done.prompts)
    elif prefill_tokens:
        since_ns, tokens = worker.computing_since(now_ns)
        # The clocks of two machines may differ: clamp to between nothing and the whole prompt.
        computed_ms = min(max(0.0, (now_ns - since_ns) / 1e6), worker.pace * model.predict(tokens))
    uncached = cost.uncached_tokens(work)
    times = estimate_times(*kinds, longer, worker.pace, worker.block_size, uncached, left_tokens, computed_ms)
    return work._replace(timed=True, times=times)


def _candidate(
    scoring: ScoringContext,
    worker: Worker,
    estimates: Mapping[str, WorkEstimate],
    leg: Leg,
    score: float,
    transfer: float = 0.0,
) -> Candidate:
    work = estimates[worker.name]
    lora_name = scoring.constraints.lora_name
    weights = cost_weights(scoring.weights)
    loads_lora = bool(lora_name) and lora_name not in worker.loras
    if loads_lora:
        # With all slots taken, another adapter must be unloaded first.
        full = len(worker.loras) >= worker.lora_slots
        score += cost.lora_load(weights, work, 2 if full else 1)
    times = work.times if work.timed else None
    if leg == "decode":
        transfer = cost.transfer(weights, work)
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
        transfer_ms=transfer if times is not None else 0.0,
        itl_ms=_itl_ms(worker, work),
    )


def _itl_ms(worker: Worker, work: WorkEstimate) -> float:
    return cost.itl_ms(worker.decode_model.line, work, worker.used_blocks, max(1, worker.max_running))


def pick_lowest_cost(candidates: Sequence[Candidate], temperature: float, seed: int) -> Candidate:
    """See `policies.pick_lowest_cost`."""
    best = min(candidate.score for candidate in candidates)
    if temperature <= 0:
        ties = [candidate for candidate in candidates if candidate.score == best]
        return ties[seed % len(ties)]
    scale = temperature * max(abs(best), 1e-9)
    shares = [math.exp((best - candidate.score) / scale) for candidate in candidates]
    total = 0.0
    for share in shares:
        total += share
    left = seed / 2**64 * total
    for candidate, share in zip(candidates, shares, strict=True):
        left -= share
        if left < 0:
            return candidate
    return candidates[-1]


def pick_least_loaded(loads: Loads, candidates: Sequence[Candidate], seed: int) -> Candidate:
    """See `policies.pick_least_loaded`."""
    found = [_load(loads, one) for one in candidates]
    ties = [one for one, load in zip(candidates, found, strict=True) if load == min(found)]
    return ties[seed % len(ties)]


def pick_within_limits(scoring: ScoringContext, candidates: Sequence[Candidate], seed: int) -> Candidate:
    """See `policies.pick_within_limits`."""
    workers, limits = scoring.loads.workers, scoring.weights

    def ttft_ms(one: Candidate) -> float:
        return one.queue_ms + one.prefill_ms + one.transfer_ms

    def itl_ms(one: Candidate) -> float:
        return workers[one.worker].step_ms * (one.requests + 1) / one.requests if one.requests else 0.0

    in_time = [one for one in candidates if ttft_ms(one) <= limits.ttft_limit_ms]
    meeting: list[Candidate] = []
    if in_time and any(ttft_ms(one) for one in candidates):
        least = min(_uncached(scoring, one) for one in in_time)
        meeting = [
            one for one in in_time if _uncached(scoring, one) == least and itl_ms(one) <= limits.itl_limit_ms
        ]
    if not meeting:
        return pick_lowest_cost(candidates, scoring.preferences.temperature, seed)
    loads = [_load(scoring.loads, one) for one in meeting]
    ties = [one for one, load in zip(meeting, loads, strict=True) if load == max(loads)]
    return ties[seed % len(ties)]


def pick_lowest_product(scoring: ScoringContext, candidates: Sequence[Candidate], seed: int) -> Candidate:
    """See `policies.pick_lowest_product`."""
    products = [_uncached(scoring, one) * (one.requests + 1) for one in candidates]
    ties = [one for one, product in zip(candidates, products, strict=True) if product == min(products)]
    return ties[seed % len(ties)]


def _uncached(scoring: ScoringContext, one: Candidate) -> int:
    held = one.cached_blocks + one.lower_blocks
    return scoring.query.prompt_tokens - held * scoring.loads.workers[one.worker].block_size


def _load(loads: Loads, one: Candidate) -> float:
    worker = loads.workers[one.worker]
    return (one.decode_blocks + one.prefill_tokens / worker.block_size) / worker.total_blocks
