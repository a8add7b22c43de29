"""What the cost of a worker is computed from, and the columns of the arrays that the costs of a fleet are written to.

Types and numbers only: the formulas are in `cost`.
"""

from functools import lru_cache
from typing import NamedTuple

from headwater.schemas.events.route import Weights


class CostWeights(NamedTuple):
    """Those of `Weights` that the formula uses."""

    prefill: float
    decode: float
    lower_tier: float
    transfer: float
    interference: float
    lora_load: float
    crowding: float
    retain: float
    memory: float
    tail: float
    arrivals: float
    pull: float
    queued: float


@lru_cache(64)
def cost_weights(weights: Weights) -> CostWeights:
    """The numbers that the formula uses."""
    return CostWeights(*[float(getattr(weights, name)) for name in CostWeights._fields])


class Times(NamedTuple):
    """Estimates in milliseconds.

    `queue`: until the worker has computed its queued prompts; `prefill`: to compute the uncached part of this prompt;
    `block`: to compute one block of a prompt; `arrival`: from then on until the blocks that it pulls have arrived.
    """

    queue: float
    prefill: float
    block: float
    arrival: float


class WorkEstimate(NamedTuple):
    """What a prompt would add to a worker, and what the worker already has to do.

    `cached_blocks` leading blocks of the prompt are on its GPU (`assumed_blocks` of them are credit); `lower_blocks` more
    are on a lower tier. `prefill_tokens` are queued and not computed yet; `decode_blocks` of its `total_blocks` are held
    by its `requests`. `times` mean something only if step times are known (`timed`). `pulled_blocks` after those that it has come from another
    worker, in `pull_ms`; they are not computed, so `times` are those with the pull. `queued_prompts` were routed to the worker and are not computed.
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
    times: Times = Times(0.0, 0.0, 1.0, 0.0)
    pulled_blocks: int = 0
    pull_ms: float = 0.0
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

LEG, CACHED, LOWER, TOKENS, BLOCKS, REQUESTS, ASSUMED, LOADS_LORA, PULLED, SOURCE = range(10)
"""Columns of `counts`. `SOURCE` is the row of the worker that `PULLED` blocks come from."""

SCORE, QUEUE_MS, PREFILL_MS, TRANSFER_MS, ITL_MS, PULL_MS = range(6)
"""Columns of `costs`."""
