"""What a request would cost on a worker. Pure arithmetic, in one place.

Where the times of all workers in question are known the unit is a millisecond, else the work for one block.
"""

from typing import NamedTuple

from headwater.router.step_model import StepModel
from headwater.schemas.route import Weights

BLOCK_FROM, BLOCK_TO = 2_048, 8_192
"""Between prompts of these lengths the time for one more block is measured."""


class Times(NamedTuple):
    """Estimates in milliseconds, and the model that they come from.

    `queue`: until the worker has computed what was promised before, `prefill`: to compute what it lacks of this prompt.
    """

    queue: float
    prefill: float
    model: StepModel


class Work(NamedTuple):
    """What a worker would have to do for a prompt, beside what it has to do already.

    `cached_blocks` of the prompt are on its GPU, `assumed_blocks` of those by its own decisions only; `lower_blocks`
    more follow on a lower tier; `prefill_tokens` are promised to it and not computed yet, `decode_blocks` of its
    `total_blocks` held by its `requests`. `times` where they are known.
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
        """Tokens of the prompt to compute."""
        return self.prompt_tokens - (self.cached_blocks + self.lower_blocks) * self.block_size

    @property
    def new_blocks(self) -> int:
        """Blocks that the prompt would newly take."""
        return max(0, -(-self.prompt_tokens // self.block_size) - self.cached_blocks)


def times(model: StepModel, uncached: int, promised: int, computed_ms: float) -> Times:
    """Estimates for a prompt of which `uncached` tokens are to compute, behind `promised` ones.

    `computed_ms` went already into the first of those.
    """
    own = model.predict(uncached)
    # Prompts that wait are computed together: what a step costs by itself is not paid for each.
    queue = max(0.0, model.predict(promised + uncached) - own - computed_ms) if promised else 0.0
    return Times(queue, own, model)


def unit(work: Work) -> float:
    """What the work for one block costs, in the unit of all costs."""
    if work.times is None:
        return 1.0
    model = work.times.model
    a_token = (model.predict(BLOCK_TO) - model.predict(BLOCK_FROM)) / (BLOCK_TO - BLOCK_FROM)
    return a_token * work.block_size


def whole(weights: Weights, work: Work) -> float:
    """Cost of computing the prompt, of what is queued before it, and of the memory decoding needs."""
    return prefill(weights, work) + decode(weights, work)


def prefill(weights: Weights, work: Work) -> float:
    """Cost of the prompt part to compute and of what is queued before it.

    A block on a lower tier must be brought up: it costs `weights.lower_tier` of one to compute. In milliseconds: the time to the first
    token, what those who run there wait meanwhile, and what it will take to compute again what is pushed out.
    """
    lower = weights.lower_tier * work.lower_blocks * unit(work) if work.lower_blocks else 0.0
    if work.times is None:
        queued = (work.uncached_tokens + work.prefill_tokens) / work.block_size
        return weights.prefill * (queued + lower)
    own = work.times.prefill
    beside = own * (weights.retain + weights.crowding * work.requests)
    return weights.prefill * (work.times.queue + own + lower) + beside


def decode(weights: Weights, work: Work) -> float:
    """Cost of the memory: what the worker's requests hold and what this one would add.

    Blocks that it shares are there already.
    """
    held = work.decode_blocks + work.new_blocks
    if work.times is None:
        return weights.decode * held
    return weights.decode * weights.memory * held / work.total_blocks


def handed_over(weights: Weights, work: Work) -> float:
    """Cost of decoding on a worker that gets the prompt's KV from another one: what it lacks must be moved."""
    return transfer(weights, work) + decode(weights, work)


def transfer(weights: Weights, work: Work) -> float:
    """Cost of moving what a worker lacks of a prompt that another one has."""
    return weights.transfer * work.new_blocks * unit(work)


def interference(weights: Weights, work: Work) -> float:
    """What computing the prompt costs the requests that decode on the same worker meanwhile."""
    if not work.requests:
        return 0.0
    own = work.uncached_tokens / work.block_size if work.times is None else work.times.prefill
    return weights.interference * own
