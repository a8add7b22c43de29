"""The scorer: what a request would cost on a worker. Pure arithmetic.

The cost estimates the time to the first token in milliseconds: queued prefill work + uncached prompt tokens + KV transfer
(disaggregated only). What others lose is added: `crowding`, `queued`, `arrivals` and `memory` (see `Weights`). Until the step
times of all candidates are known, the unit is the work for one block. `itl_ms`, the estimated time between two tokens, is
recorded, but is not part of the cost.

The formula is here once, for one worker. `score_workers`, at the end, is the loop over a fleet: numba compiles the same functions
into it, so its costs equal those of the plain functions bit for bit.

Where a worker's load reports are late, it has computed more of its queue than they say: as much as its step times predict.
"""

from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np

from headwater.router.estimates import (
    BLOCK_FROM,
    BLOCK_TO,
    DecodeLine,
    longer_ms,
    predict_ms,
    predict_step_ms,
)
from headwater.schemas.jit import jitable, kernel
from headwater.schemas.routing import Weights

UTILIZATION_BUSY: Final = 0.4
"""Mean utilization of workers from which on none of it counts as spare."""

SPARE_WORKERS_MIN: Final = 16.0
"""The number of workers of which half counts as spare; of fewer nothing does, of more a larger share."""


class CostWeights(NamedTuple):
    """The fields of `Weights` that the formula uses."""

    prefill: float
    decode: float
    lower_tier: float
    transfer: float
    interference: float
    lora_load: float
    crowding: float
    memory: float
    arrivals: float
    queued: float
    crowding_spare: float


@lru_cache(64)
def cost_weights(weights: Weights) -> CostWeights:
    """The numbers that the formula uses."""
    return CostWeights(*[float(getattr(weights, name)) for name in CostWeights._fields])


@jitable
def utilization_of(prefill_tokens: int, held_blocks: int, total_blocks: int) -> float:
    """Return how much of a worker is in use, 0 to 1: all while it has prompts to compute, or without KV blocks, else its share of KV blocks in use."""
    if prefill_tokens or total_blocks <= 0:
        return 1.0
    return min(1.0, held_blocks / total_blocks)


@jitable
def spare_capacity(utilization: float, workers: int) -> float:
    """Return how idle this many workers are, 0 to 1, from their mean utilization.

    0 from `UTILIZATION_BUSY` on. The mean of a few workers at one moment says little: with 8, prompts waited up to 2 % longer for nothing.
    """
    if workers < SPARE_WORKERS_MIN:
        return 0.0
    return max(0.0, 1.0 - utilization / UTILIZATION_BUSY) * workers / (workers + SPARE_WORKERS_MIN)


@jitable
def weights_at(weights: CostWeights, spare: float) -> CostWeights:
    """The weights where workers have spare capacity, 0 to 1.

    To spread requests costs further copies of their prefixes, which is nothing while workers are idle and much when all are
    busy. So the delay of running requests counts more the more is spare.
    """
    return CostWeights(
        weights.prefill,
        weights.decode,
        weights.lower_tier,
        weights.transfer,
        weights.interference,
        weights.lora_load,
        weights.crowding * (1.0 + weights.crowding_spare * spare),
        weights.memory,
        weights.arrivals,
        weights.queued,
        weights.crowding_spare,
    )


class Times(NamedTuple):
    """Estimates in milliseconds.

    `queue`: until the worker has computed its queued prompts; `prefill`: to compute the uncached part of this prompt;
    `block`: to compute one block of a prompt.
    """

    queue: float
    prefill: float
    block: float


class WorkEstimate(NamedTuple):
    """What a prompt would add to a worker, and what the worker already has to do.

    `cached_blocks` leading blocks of the prompt are on its GPU (`assumed_blocks` of them are credit); `lower_blocks` more
    are on a lower tier. `prefill_tokens` are queued and not computed yet; `decode_blocks` of its `total_blocks` are held
    by its `requests`. `times` mean something only if step times are known (`timed`). `queued_prompts` were routed to the worker and are not computed.
    """

    block_size: int
    prompt_tokens: int
    cached_blocks: int
    lower_blocks: int
    prefill_tokens: int
    decode_blocks: int
    requests: int
    total_blocks: int = 1
    assumed_blocks: int = 0
    timed: bool = False
    times: Times = Times(0.0, 0.0, 1.0)
    queued_prompts: int = 0


class Asked(NamedTuple):
    """What all candidates of one query have in common, as the loop reads it.

    `pinned` is the row of the only worker allowed (-1: any; -2: one that is not there). `decode`: the query is for a decode leg.
    `estimate`: use step times where all are known.
    """

    prompt_tokens: int
    now_ns: int
    pinned: int
    decode: bool
    estimate: bool


NO_CANDIDATE, WHOLE, PREFILL, DECODE = range(4)
"""What a worker would do of the request, as `LEG` has it."""

LEG, CACHED, LOWER, TOKENS, BLOCKS, REQUESTS, ASSUMED, LOADS_LORA = range(8)
"""Columns of `counts`."""

SCORE, QUEUE_MS, PREFILL_MS, TRANSFER_MS, ITL_MS = range(5)
"""Columns of `costs`."""


# Milliseconds until a worker has computed a prompt: for the queue before it, and for itself.

PREFILL_ASSUMED: Final = 0.5
"""Share of a report's age in which prompts may have been computed. A prompt that is taken for computed and is not costs more than one that is
computed and not taken for it: with 1, sessions that reuse nearly everything waited 2 % longer, and no other traffic less."""


class Computed(NamedTuple):
    """Prompts of a queue, and their tokens, that are computed by now, and the milliseconds spent on the next one."""

    prompts: int
    tokens: int
    spent_ms: float


@jitable
def estimate_computed(
    lengths: Any,
    times: Any,
    classes: int,
    pace: float,
    queue: Any,
    length: int,
    since_ns: int,
    age_ms: float,
    now_ns: int,
) -> Computed:
    """Return what a worker has computed of its queue between its latest report and now.

    The first three describe a `StepModel`. The worker computes its prompts in order; those that were routed to it before the one
    before is done are computed together, so that the fixed time of a step is not paid for each. It began the first of `length`
    prompts at `since_ns`. `queue` has a row for each: when it was routed to the worker, and its uncached tokens. `age_ms` ago it
    was not done, or the report of that would be here: until then, a prediction that says otherwise was wrong. Only `ASSUMED` of
    that time is assumed to have been used.
    """
    prompts = computed = together = 0
    began_ms = done_ms = (since_ns - now_ns) / 1e6
    for at in range(length):
        if at and (queue[at][0] - now_ns) / 1e6 > done_ms:
            began_ms = done_ms = (queue[at][0] - now_ns) / 1e6
            together = 0
        together += queue[at][1]
        took_ms = pace * predict_ms(lengths, times, classes, together)
        if at == 0:
            began_ms = done_ms = max(began_ms, -PREFILL_ASSUMED * age_ms - took_ms)
        if began_ms + took_ms >= 0.0:
            return Computed(prompts, computed, max(0.0, -done_ms))
        done_ms = began_ms + took_ms
        prompts += 1
        computed += queue[at][1]
    return Computed(prompts, computed, 0.0)


@jitable
def estimate_times(
    lengths: Any,
    times: Any,
    classes: int,
    longer: float,
    pace: float,
    block_size: int,
    uncached: int,
    queued: int,
    computed_ms: float,
) -> Times:
    """Times for a prompt with `uncached` tokens to compute, after `queued` tokens of earlier prompts.

    `computed_ms` has already been spent on the first of those. The first three describe a `StepModel`; `longer` is its `longer_ms`.
    """
    prefill_ms = pace * predict_ms(lengths, times, classes, uncached)
    queue = 0.0
    if queued:
        # Queued prompts are computed together: the fixed time of a step is not paid for each.
        queue = max(
            0.0, pace * predict_ms(lengths, times, classes, queued + uncached) - prefill_ms - computed_ms
        )
    return Times(queue, prefill_ms, pace * longer / (BLOCK_TO - BLOCK_FROM) * block_size)


# The formula.


@jitable
def uncached_tokens(work: WorkEstimate) -> int:
    """Prompt tokens to compute."""
    return work.prompt_tokens - (work.cached_blocks + work.lower_blocks) * work.block_size


@jitable
def new_blocks(work: WorkEstimate) -> int:
    """Blocks to allocate for the prompt."""
    return max(0, -(-work.prompt_tokens // work.block_size) - work.cached_blocks)


@jitable
def itl_ms(line: DecodeLine, work: WorkEstimate, used_blocks: int, max_running: int) -> float:
    """Milliseconds between two tokens of a worker that runs this request too; 0 until it has reported any."""
    requests = min(work.requests + 1, max_running)
    return predict_step_ms(line, requests, min(used_blocks + new_blocks(work), work.total_blocks))


@jitable
def block(work: WorkEstimate) -> float:
    """Cost of computing one block, in the unit of all costs."""
    return work.times.block if work.timed else 1.0


@jitable
def delay_of_others(
    crowding: float, arrivals: float, requests: int, queue: float, prefill_ms: float
) -> float:
    """Return what other requests lose by a prompt that takes `prefill_ms` ms, after `queue` ms of earlier ones.

    Each of the `requests` that run is delayed by the whole prompt. A request that arrives while the worker has work waits for the rest of it: the
    prompt adds (queue + prefill_ms)² - queue² to twice the sum of those waits, for each request that arrives in a millisecond. That is the value
    function of a queue with arrivals at random (Hyytiä, Penttinen, Aalto: Size- and state-aware dispatching problem with
    queue-specific job sizes, 2012), where `arrivals` is the rate over the share of time in which the worker is idle.
    """
    later = arrivals / 1000.0 * (2.0 * queue + prefill_ms) * prefill_ms / 2.0
    return prefill_ms * (crowding * requests) + later


@jitable
def delay_of_queued(weights: CostWeights, work: WorkEstimate) -> float:
    """Return what queued prompts lose: a step that computes several ends later for all of them by what this one adds, without a step's fixed time."""
    return weights.queued * work.queued_prompts * work.times.block * (uncached_tokens(work) / work.block_size)


@jitable
def prefill(weights: CostWeights, work: WorkEstimate) -> float:
    """Cost of computing the uncached part of the prompt, and of the queue before it.

    Loading a block from a lower tier costs `weights.lower_tier` of computing it. With known times, the delay of others is added.
    """
    lower = weights.lower_tier * work.lower_blocks * block(work) if work.lower_blocks else 0.0
    if not work.timed:
        queued = (uncached_tokens(work) + work.prefill_tokens) / work.block_size
        return weights.prefill * (queued + lower)
    queue, prefill_ms = work.times.queue, work.times.prefill
    others = delay_of_others(weights.crowding, weights.arrivals, work.requests, queue, prefill_ms)
    waits = weights.prefill * (queue + prefill_ms + lower)
    return waits + others + delay_of_queued(weights, work)


@jitable
def decode(weights: CostWeights, work: WorkEstimate) -> float:
    """Cost of KV-cache pressure: blocks held by the worker's requests, plus those that this prompt adds."""
    held = work.decode_blocks + new_blocks(work)
    if not work.timed:
        return weights.decode * held
    # A load report may say that there are none.
    return weights.decode * weights.memory * held / max(1, work.total_blocks)


@jitable
def aggregated(weights: CostWeights, work: WorkEstimate) -> float:
    """Cost of prefill and decode on one worker."""
    return prefill(weights, work) + decode(weights, work)


@jitable
def transfer(weights: CostWeights, work: WorkEstimate) -> float:
    """Cost of moving the blocks that the worker lacks from another worker."""
    return weights.transfer * new_blocks(work) * block(work)


@jitable
def remote_decode(weights: CostWeights, work: WorkEstimate) -> float:
    """Cost of decoding on a worker that receives the prompt's KV from a prefill worker."""
    return transfer(weights, work) + decode(weights, work)


@jitable
def interference(weights: CostWeights, work: WorkEstimate) -> float:
    """Delay that computing the prompt causes to requests decoding on the same worker."""
    if not work.requests:
        return 0.0
    prompt_cost = work.times.prefill if work.timed else uncached_tokens(work) / work.block_size
    return weights.interference * prompt_cost


@jitable
def lora_load(weights: CostWeights, work: WorkEstimate, changes: float) -> float:
    """Cost of loading an adapter: one change of a slot, or two if another must be unloaded first."""
    return weights.lora_load * changes * block(work)


_PREFILL_ROLE, _DECODE_ROLE = 1, 2


@jitable
def _model_at(model: Any, at: int) -> tuple[Any, Any, int, float]:
    """One row of (classes, lengths, times): what `estimate_times` needs of a `StepModel`."""
    classes, lengths, times = model[0][at], model[1][at], model[2][at]
    return lengths, times, classes, longer_ms(lengths, times, classes) if classes else 0.0


@jitable
def _cached(depths: Any, slot: int, credit: int, usable: Any) -> tuple[int, int, int]:
    """Of the leading `usable` blocks of the prompt: how many are on a worker's GPU, how many more on a lower tier, and how many of the first are credit."""
    gpu = any_tier = 0
    if slot >= 0:
        gpu = min(np.int64(depths[0, slot]), usable)
        any_tier = min(np.int64(depths[1, slot]), usable)
    cached = max(gpu, min(credit, usable))
    return cached, max(0, any_tier - cached), cached - gpu


@jitable
def _work(
    table: Any,
    queues: Any,
    steps: Any,
    row: int,
    query: Asked,
    timed: bool,
    slots: Any,
    credited: Any,
    depths: Any,
) -> WorkEstimate:
    """What the prompt would add to the worker of a row, and what that worker has to do."""
    worker = table[row]
    size, queued, pace = worker["block_size"], worker["prefill_tokens"], worker["pace"]
    # An engine computes at least the last token itself, even of a fully cached prompt.
    usable = max(0, query.prompt_tokens - 1) // size
    cached, lower, assumed = _cached(depths, slots[row], credited[row], usable)
    prompts, held, times = worker["queued_prompts"], worker["decode_blocks"], Times(0.0, 0.0, 1.0)
    if timed:
        lengths, known_ms, classes, longer = steps
        # The engine's own count includes generated tokens, and requests that did not come through this pool's routers.
        held = max(held, worker["used_blocks"])
        computed_ms, remaining = 0.0, queued
        if worker["queue_length"]:
            done = estimate_computed(
                lengths,
                known_ms,
                classes,
                pace,
                queues[row],
                worker["queue_length"],
                worker["computing_ns"],
                worker["signal_age_ms"],
                query.now_ns,
            )
            remaining, prompts, computed_ms = remaining - done.tokens, prompts - done.prompts, done.spent_ms
        elif queued:
            # The clocks of two machines may differ: clamp to between nothing and the whole prompt.
            computed_ms = min(
                max(0.0, (query.now_ns - worker["computing_ns"]) / 1e6),
                pace * predict_ms(lengths, known_ms, classes, worker["computing_tokens"]),
            )
        uncached = query.prompt_tokens - (cached + lower) * size
        times = estimate_times(
            lengths, known_ms, classes, longer, pace, size, uncached, remaining, computed_ms
        )
    return WorkEstimate(
        size,
        query.prompt_tokens,
        cached,
        lower,
        queued,
        held,
        worker["requests"],
        worker["total_blocks"],
        assumed,
        timed,
        times,
        prompts,
    )


@jitable
def _itl_ms(worker: Any, work: WorkEstimate) -> float:
    line = DecodeLine(worker["base_ms"], worker["request_ms"], worker["block_ms"], worker["least_ms"])
    return itl_ms(line, work, worker["used_blocks"], worker["max_running"])


class _Fleet(NamedTuple):
    """Of the allowed workers: how many, how many that may decode, their spare capacity, 0 to 1, and whether the step times of all are known."""

    workers: int
    decoders: int
    spare: float
    timed: bool


@jitable
def _fleet(table: Any, model: Any, allowed: Any) -> _Fleet:
    """What the scores of all workers depend on."""
    timed, workers, decoders, used = True, 0, 0, 0.0
    for row in range(table.shape[0]):
        if allowed[row]:
            workers += 1
            worker = table[row]
            used += utilization_of(
                worker["prefill_tokens"],
                max(worker["decode_blocks"], worker["used_blocks"]),
                worker["total_blocks"],
            )
            if worker["role"] != _PREFILL_ROLE:
                decoders += 1
            if model[0][worker["model"]] == 0:
                timed = False
    return _Fleet(workers, decoders, spare_capacity(used / workers, workers) if workers else 0.0, timed)


@jitable
def _find_decode_legs(
    table: Any,
    queues: Any,
    model: Any,
    allowed: Any,
    slots: Any,
    credited: Any,
    depths: Any,
    query: Asked,
    timed: bool,
    weights: CostWeights,
    cheapest: Any,
) -> None:
    """Fill `cheapest`: of the cheapest decode leg after a remote prefill its cost, the transfer in it, and its `itl_ms`, by the kind of hand-off that reaches it."""
    at, steps = 0, _model_at(model, 0)
    for row in range(table.shape[0]):
        if allowed[row] and table[row]["role"] != _PREFILL_ROLE:
            if table[row]["model"] != at:
                at = table[row]["model"]
                steps = _model_at(model, at)
            work = _work(table, queues, steps, row, query, timed, slots, credited, depths)
            cost, moved = remote_decode(weights, work), transfer(weights, work)
            pairs = table[row]["pairs"]
            if cost < cheapest[0, pairs] or (cost == cheapest[0, pairs] and moved < cheapest[1, pairs]):
                cheapest[0, pairs], cheapest[1, pairs] = cost, moved
                cheapest[2, pairs] = _itl_ms(table[row], work)


@jitable
def _leg(worker: Any, decode: bool, decoders: int, cheapest: Any) -> int:
    """What a worker would do of the request."""
    if decode:
        return DECODE
    if worker["serves_whole"] and (worker["role"] != _PREFILL_ROLE or decoders == 0):
        # Without any decode worker, a prefill worker serves the whole request rather than none.
        return WHOLE
    if worker["role"] == _PREFILL_ROLE and worker["pairs"] and cheapest[0, worker["pairs"]] < np.inf:
        return PREFILL
    return NO_CANDIDATE


@jitable
def _score_leg(
    leg: int, worker: Any, weights: CostWeights, work: WorkEstimate, cheapest: Any
) -> tuple[float, float, float]:
    """The cost of what a worker would do, the transfer in it, and the `itl_ms` of the worker that decodes."""
    if leg == DECODE:
        return remote_decode(weights, work), transfer(weights, work), _itl_ms(worker, work)
    if leg == PREFILL:
        pairs = worker["pairs"]
        return cheapest[0, pairs] + prefill(weights, work), cheapest[1, pairs], cheapest[2, pairs]
    extra = interference(weights, work) if worker["role"] == _DECODE_ROLE else 0.0
    return aggregated(weights, work) + extra, 0.0, _itl_ms(worker, work)


@jitable
def _note_counts(counts: Any, leg: int, work: WorkEstimate, changes: float) -> None:
    """Fill the row of `counts` of a candidate."""
    counts[LEG] = leg
    counts[CACHED] = work.cached_blocks
    counts[LOWER] = work.lower_blocks
    counts[TOKENS] = work.prefill_tokens
    counts[BLOCKS] = work.decode_blocks
    counts[REQUESTS] = work.requests
    counts[ASSUMED] = work.assumed_blocks
    counts[LOADS_LORA] = changes > 0


@kernel
def score_workers(
    table: Any,
    queues: Any,
    model: Any,
    allowed: Any,
    changes: Any,
    slots: Any,
    credited: Any,
    depths: Any,
    query: Asked,
    weights: CostWeights,
    counts: Any,
    costs: Any,
) -> tuple[int, int, float]:
    """Score the `allowed` rows of `table` and `queues` (`router.columns`): fills `counts` and `costs`, shape (workers, quantities).

    `model` is (classes, lengths, times) of the step times; `changes` how many slots of LoRA adapters each worker must change;
    `slots` the row of `depths` of each worker, and `credited` its credited blocks. Returns how many candidates would serve
    the whole request, how many only a leg, and the spare capacity of the allowed workers, 0 to 1.
    """
    fleet = _fleet(table, model, allowed)
    timed = query.estimate and fleet.timed
    weights = weights_at(weights, fleet.spare)
    cheapest = np.full((3, table.shape[0] + 1), np.inf)
    if fleet.decoders < fleet.workers and not query.decode:
        _find_decode_legs(
            table, queues, model, allowed, slots, credited, depths, query, timed, weights, cheapest
        )
    # The same for all workers of an engine, most of which follow each other.
    at, steps = 0, _model_at(model, 0)
    whole = legs = 0
    for row in range(table.shape[0]):
        counts[row, LEG] = NO_CANDIDATE
        if not allowed[row] or (not query.decode and query.pinned != -1 and query.pinned != row):
            continue
        leg = _leg(table[row], query.decode, fleet.decoders, cheapest)
        if leg == NO_CANDIDATE:
            continue
        if table[row]["model"] != at:
            at = table[row]["model"]
            steps = _model_at(model, at)
        work = _work(table, queues, steps, row, query, timed, slots, credited, depths)
        score, moved, itl_ms = _score_leg(leg, table[row], weights, work, cheapest)
        if changes[row]:
            score += lora_load(weights, work, changes[row])
        if leg == WHOLE:
            whole += 1
        else:
            legs += 1
        _note_counts(counts[row], leg, work, changes[row])
        costs[row, SCORE] = score
        costs[row, QUEUE_MS] = work.times.queue if timed and leg != DECODE else 0.0
        costs[row, PREFILL_MS] = work.times.prefill if timed and leg != DECODE else 0.0
        costs[row, TRANSFER_MS] = moved if timed else 0.0
        costs[row, ITL_MS] = itl_ms
    return whole, legs, fleet.spare
