"""What a request would cost on a worker, in blocks. Pure arithmetic, in one place."""

from headwater.schemas.route import Weights


def score(
    weights: Weights,
    *,
    block_size: int,
    prompt_tokens: int,
    cached_blocks: int,
    lower_blocks: int,
    prefill_tokens: int,
    decode_blocks: int,
) -> float:
    """Cost of the prompt part to compute, of what is queued before it, and of the memory decoding needs.

    A block on a lower tier must be brought up: it costs `weights.lower_tier` instead of 1. Memory counts what
    the worker's requests hold and what this one would add: blocks that it shares are there already.
    """
    compute = prompt_tokens - (cached_blocks + lower_blocks) * block_size
    queued = (compute + prefill_tokens) / block_size
    held = decode_blocks + -(-prompt_tokens // block_size) - cached_blocks
    return weights.prefill * (queued + weights.lower_tier * lower_blocks) + weights.decode * held
