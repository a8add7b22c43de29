"""Scorer: what a request would cost on a worker. Pure arithmetic.

The cost estimates the time to the first token in milliseconds: queued prefill work + uncached prompt tokens + KV transfer
(disaggregated only). Three penalties are added: `crowding` (delay to running requests), `retain` (cached blocks
evicted), and `memory` (KV-cache pressure). Until the step times of all candidates are known, the unit is the work for one block.
"""

from typing import NamedTuple

from headwater.router.fold.prefill_time import StepModel
from headwater.schemas.events.route import Weights

BLOCK_FROM, BLOCK_TO = 2_048, 8_192
"""Prompt lengths, in tokens, between which the marginal time of a block is measured."""


class Times(NamedTuple):
    """Estimates in milliseconds, and the model that they come from.

    `queue`: until the worker has computed its queued prompts; `prefill`: to compute the uncached part of this prompt.
    """

    queue: float
    prefill: float
    model: StepModel


class WorkEstimate(NamedTuple):
    """What a prompt would add to a worker, and what the worker already has to do.

    `cached_blocks` leading blocks of the prompt are on its GPU (`assumed_blocks` of them are credit); `lower_blocks` more
    are on a lower tier. `prefill_tokens` are queued and not computed yet; `decode_blocks` of its `total_blocks` are held
    by its `requests`. `times` is None while step times are unknown.
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
    times: Times | None = None

    @property
    def uncached_tokens(self) -> int:
        """Prompt tokens to compute."""
        return self.prompt_tokens - (self.cached_blocks + self.lower_blocks) * self.block_size

    @property
    def new_blocks(self) -> int:
        """Blocks to allocate for the prompt."""
        return max(0, -(-self.prompt_tokens // self.block_size) - self.cached_blocks)


def estimate_times(model: StepModel, uncached: int, queued: int, computed_ms: float) -> Times:
    """Times for a prompt with `uncached` tokens to compute, after `queued` tokens of earlier prompts.

    `computed_ms` has already been spent on the first of those.
    """
    own = model.predict(uncached)
    # Queued prompts are computed together: the fixed time of a step is not paid for each.
    queue = max(0.0, model.predict(queued + uncached) - own - computed_ms) if queued else 0.0
    return Times(queue, own, model)


def block(work: WorkEstimate) -> float:
    """Cost of computing one block, in the unit of all costs."""
    if work.times is None:
        return 1.0
    model = work.times.model
    per_token = (model.predict(BLOCK_TO) - model.predict(BLOCK_FROM)) / (BLOCK_TO - BLOCK_FROM)
    return per_token * work.block_size


def aggregated(weights: Weights, work: WorkEstimate) -> float:
    """Cost of prefill and decode on one worker."""
    return prefill(weights, work) + decode(weights, work)


def prefill(weights: Weights, work: WorkEstimate) -> float:
    """Cost of computing the uncached part of the prompt, and of the queue before it.

    Loading a block from a lower tier costs `weights.lower_tier` of computing it. With known times, the delay to running
    requests and the recomputation of evicted blocks are added.
    """
    lower = weights.lower_tier * work.lower_blocks * block(work) if work.lower_blocks else 0.0
    if work.times is None:
        queued = (work.uncached_tokens + work.prefill_tokens) / work.block_size
        return weights.prefill * (queued + lower)
    own = work.times.prefill
    penalties = own * (weights.retain + weights.crowding * work.requests)
    return weights.prefill * (work.times.queue + own + lower) + penalties


def decode(weights: Weights, work: WorkEstimate) -> float:
    """Cost of KV-cache pressure: blocks held by the worker's requests, plus those that this prompt adds."""
    held = work.decode_blocks + work.new_blocks
    if work.times is None:
        return weights.decode * held
    return weights.decode * weights.memory * held / work.total_blocks


def remote_decode(weights: Weights, work: WorkEstimate) -> float:
    """Cost of decoding on a worker that receives the prompt's KV from a prefill worker."""
    return transfer(weights, work) + decode(weights, work)


def transfer(weights: Weights, work: WorkEstimate) -> float:
    """Cost of moving the blocks that the worker lacks from another worker."""
    return weights.transfer * work.new_blocks * block(work)


def interference(weights: Weights, work: WorkEstimate) -> float:
    """Delay that computing the prompt causes to requests decoding on the same worker."""
    if not work.requests:
        return 0.0
    own = work.uncached_tokens / work.block_size if work.times is None else work.times.prefill
    return weights.interference * own
