"""What a request would cost on a worker, in blocks. Pure arithmetic, in one place."""

from typing import NamedTuple

from headwater.schemas.route import Weights


class Work(NamedTuple):
    """What a worker would have to do for a prompt, beside what it has to do already.

    `cached_blocks` of the prompt are on its GPU, `lower_blocks` more follow on a lower tier; `prefill_tokens` are
    promised to it and not computed yet, `decode_blocks` held by its `requests`.
    """

    block_size: int
    prompt_tokens: int
    cached_blocks: int
    lower_blocks: int
    prefill_tokens: int
    decode_blocks: int
    requests: int

    @property
    def uncached_tokens(self) -> int:
        """Tokens of the prompt to compute."""
        return self.prompt_tokens - (self.cached_blocks + self.lower_blocks) * self.block_size


def whole(weights: Weights, work: Work) -> float:
    """Cost of computing the prompt, of what is queued before it, and of the memory decoding needs."""
    return prefill(weights, work) + decode(weights, work)


def prefill(weights: Weights, work: Work) -> float:
    """Cost of the prompt part to compute and of what is queued before it.

    A block on a lower tier must be brought up: it costs `weights.lower_tier` instead of 1.
    """
    queued = (work.uncached_tokens + work.prefill_tokens) / work.block_size
    return weights.prefill * (queued + weights.lower_tier * work.lower_blocks)


def decode(weights: Weights, work: Work) -> float:
    """Cost of the memory: what the worker's requests hold and what this one would add.

    Blocks that it shares are there already.
    """
    return weights.decode * (
        work.decode_blocks - (-work.prompt_tokens // work.block_size) - work.cached_blocks
    )


def handed_over(weights: Weights, work: Work) -> float:
    """Cost of decoding on a worker that gets the prompt's KV from another one: what it lacks must be moved."""
    missing = -(-work.prompt_tokens // work.block_size) - work.cached_blocks
    return weights.transfer * max(0, missing) + decode(weights, work)


def interference(weights: Weights, work: Work) -> float:
    """What computing the prompt costs the requests that decode on the same worker meanwhile."""
    return weights.interference * work.uncached_tokens / work.block_size if work.requests else 0.0
