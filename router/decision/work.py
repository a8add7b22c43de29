"""What the cost of a worker is computed from, and the columns of the arrays that the costs of a fleet are written to.

Types, numbers and the weights at a load: the formulas of the cost are in `cost`.
"""

from functools import lru_cache
from typing import Final, NamedTuple

from headwater.schemas.events.route import Weights
from headwater.schemas.jit import jitable

UTILIZATION_BUSY: Final = 0.4
"""Mean utilization of workers from which on none of it counts as spare."""

SPARE_WORKERS_MIN: Final = 16.0
"""Of fewer workers nothing counts as spare, of so many half, of more a larger share."""


class CostWeights(NamedTuple):
    """Those of `Weights` that the formula uses."""

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
    """How much of a worker is in use, 0 to 1: all while it has prompts to compute, or without KV blocks, else its share of KV blocks in use."""
    if prefill_tokens or total_blocks <= 0:
        return 1.0
    return min(1.0, held_blocks / total_blocks)


@jitable
def spare_capacity(utilization: float, workers: int) -> float:
    """How idle so many workers are, 0 to 1, from their mean utilization.

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
