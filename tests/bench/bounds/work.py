"""What the requests of a trace need at least of a fleet, whatever the policy: tokens to compute, time, and work.

Times and work are milliseconds of a worker of speed 1.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headwater.engines.sim import StepTime
from headwater.ops.bench.trace import TraceRequest, all_hashes
from headwater.ops.config.setting import ConfigError
from headwater.ops.whatif.setup import Setup

Values = NDArray[np.float64]


class Prompts(NamedTuple):
    """The prompts of a trace as blocks, in the order of their arrival.

    `usable[i]` are the hashes of the blocks that request i may find in a cache: all that are full, except one that ends
    with the prompt, as the last token is always computed. `blocks[i]` is the number of all its blocks, a partial one included,
    `own_tokens[i]` are the tokens after the usable ones.
    """

    requests: Sequence[TraceRequest]
    usable: list[list[int]]
    hashes: list[list[int]]
    blocks: NDArray[np.int64]
    own_tokens: NDArray[np.int64]


class LeastWork(NamedTuple):
    """Of each request, at least: tokens to compute, milliseconds to the first token and from there to the last, and work.

    `first_decode_ms` is the part of `first_ms` for the first token itself, `tail_ms` the part that passes, on average, after a unit
    of the prompt's work was done. `decode_steps_ms` are all steps with a token. `held_blocks`: the blocks of the prompt, each divided by the
    number of requests in the trace that have it. Works add up over requests; `decode_work_in_all` counts the blocks of the answer too.
    """

    tokens: Values
    first_ms: Values
    first_decode_ms: Values
    tail_ms: Values
    later_ms: Values
    decode_steps_ms: Values
    prompt_work: Values
    decode_work: Values
    decode_work_in_all: Values
    held_blocks: Values


def prompts_of(requests: Sequence[TraceRequest], size: int) -> Prompts:
    """The prompts in blocks of `size` tokens."""
    hashes = [found.tolist() for found in all_hashes(requests, size)]
    lengths = np.array([one.prompt_tokens for one in requests], np.int64)
    counts = (lengths - 1) // size
    usable = [found[:count] for found, count in zip(hashes, counts.tolist(), strict=True)]
    return Prompts(requests, usable, hashes, -(-lengths // size), lengths - counts * size)


def tokens_unlimited(prompts: Prompts, size: int) -> Values:
    """The tokens to compute of each request if every block is computed once, by the first request that has it.

    A block that ends some prompt is computed by that request in any case, so no other one counts it.
    """
    seen = {
        found[-1]
        for found, usable in zip(prompts.hashes, prompts.usable, strict=True)
        if len(found) > len(usable)
    }
    new = []
    for usable in prompts.usable:
        fresh = [block for block in usable if block not in seen]
        seen.update(fresh)
        new.append(len(fresh))
    return np.array(new, np.float64) * size + prompts.own_tokens


def tokens_shared(prompts: Prompts, size: int, capacity: int) -> Values:
    """The tokens to compute of each request, one after the other, with one LRU cache of `capacity` blocks."""
    cache: dict[int, None] = {}
    tokens = []
    for found, usable, own in zip(prompts.hashes, prompts.usable, prompts.own_tokens.tolist(), strict=True):
        hits = next((depth for depth, block in enumerate(usable) if block not in cache), len(usable))
        tokens.append((len(usable) - hits) * size + own)
        # The tail of a prompt is evicted before its head.
        for block in reversed(found):
            cache.pop(block, None)
            cache[block] = None
        for _ in range(len(cache) - capacity):
            del cache[next(iter(cache))]
    return np.array(tokens, np.float64)


def least_work(prompts: Prompts, tokens: Values, setup: Setup) -> LeastWork:
    """What requests need that compute so many tokens. Raises `ConfigError` for step times with a negative coefficient."""
    step_time = setup.step_time
    square, linear, constant = step_time.prefill_ms
    if min(square, linear, constant) < 0:
        raise ConfigError(f"no bound is known for step times of prompts with a negative part: {step_time}")
    outputs = np.array([one.output_tokens for one in prompts.requests], np.float64)
    decode_ms = least_decode_ms(step_time, np.minimum(prompts.blocks / setup.blocks, 1.0), 1.0)
    steps_ms = _least_prefill_ms(step_time, tokens, setup.step_tokens)
    per_block = _least_per_share_ms(step_time) / setup.blocks
    held = _blocks_alone(prompts)
    growing = _blocks_grown(prompts, setup.block_size)
    return LeastWork(
        tokens=tokens,
        first_ms=steps_ms + decode_ms,
        first_decode_ms=decode_ms,
        tail_ms=(linear * tokens + constant + decode_ms) / 2,
        later_ms=(outputs - 1) * decode_ms,
        decode_steps_ms=outputs * decode_ms,
        prompt_work=tokens * _least_per_token_ms(step_time, setup.step_tokens),
        decode_work=outputs * held * per_block,
        decode_work_in_all=(outputs * held + growing) * per_block,
        held_blocks=held,
    )


def _blocks_alone(prompts: Prompts) -> Values:
    """The blocks of each prompt, each divided by the number of requests in the trace that have it."""
    holders = Counter(block for found in prompts.hashes for block in found)
    shares = [sum(1 / holders[block] for block in found) for found in prompts.hashes]
    partial = prompts.blocks - [len(found) for found in prompts.hashes]
    return np.array(shares, np.float64) + partial


def _blocks_grown(prompts: Prompts, size: int) -> Values:
    """The blocks that each answer adds to its prompt's, summed over the steps with a token."""

    def begun(tokens: int) -> int:
        """The sum of the blocks begun over lengths from 1 to `tokens`."""
        full, rest = divmod(tokens, size)
        return size * full * (full + 1) // 2 + rest * (full + 1)

    return np.array(
        [
            begun(one.prompt_tokens + one.output_tokens - 1)
            - begun(one.prompt_tokens - 1)
            - one.output_tokens * blocks
            for one, blocks in zip(prompts.requests, prompts.blocks.tolist(), strict=True)
        ],
        np.float64,
    )


def _least_prefill_ms(step_time: StepTime, tokens: Values, step_tokens: int) -> Values:
    """The time of a prompt in the best number of steps. K equal steps are the fastest K, as the curve is convex."""
    square, linear, constant = step_time.prefill_ms
    fewest = np.ceil(tokens / step_tokens)
    best = tokens * math.sqrt(square / constant) if constant else np.full_like(tokens, np.inf)
    if not square:
        best = fewest
    counts = [np.maximum(fewest, np.floor(best)), np.maximum(fewest, np.ceil(best))]
    if not constant and square:
        # Each token by itself.
        counts = [np.maximum(tokens, fewest)]
    times = [square * tokens**2 / count + linear * tokens + constant * count for count in counts]
    least: Values = np.minimum.reduce(times)
    return least


def _least_per_token_ms(step_time: StepTime, step_tokens: int) -> float:
    """The work of a prompt's token in a step of the best size."""
    sizes = np.arange(1, step_tokens + 1, dtype=np.float64)
    square, linear, constant = step_time.prefill_ms
    return float((square * sizes + linear + constant / sizes).min())


def least_decode_ms(step_time: StepTime, low: Values, high: Values | float) -> Values:
    """The time of a step with a token while a share between these of the blocks is in use."""
    square, linear, constant = step_time.decode_ms
    points = [low, np.broadcast_to(high, low.shape)]
    if square:
        points.append(np.clip(-linear / (2 * square), low, high))
    times = [(square * at + linear) * at + constant for at in points]
    least: Values = np.maximum(0.0, np.minimum.reduce(times))
    return least


def _least_per_share_ms(step_time: StepTime) -> float:
    """The least, over shares of the blocks in use, of the time of a step with tokens divided by that share."""
    square, linear, constant = step_time.decode_ms
    points = [1.0]
    if square > 0 and constant > 0:
        points.append(min(1.0, math.sqrt(constant / square)))
    if constant <= 0:
        # Towards an empty cache the time per share has no lower bound above that of the slope.
        return 0.0 if constant < 0 else max(0.0, min(linear, square + linear))
    return max(0.0, min(square * at + linear + constant / at for at in points))
