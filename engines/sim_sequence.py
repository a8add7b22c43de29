"""One request in the simulated engine's scheduler, the engine's settings, and what an answer is made of."""

from collections.abc import Sequence
from typing import NamedTuple
from zlib import crc32

import msgspec

from headwater.engines.engine import Emit
from headwater.engines.step_time import StepTime
from headwater.schemas.inference import GenerateRequest


class SimSettings(NamedTuple):
    """Shape of a simulated engine. Defaults follow the public replay that the step times come from."""

    model: str = "sim"
    block_size: int = 16
    total_blocks: int = 16_384
    context_length: int = 131_072
    step_tokens_max: int = 8_192
    sequences_max: int = 256
    step_time: StepTime = StepTime()
    script: tuple[int, ...] = (0,)
    """Token ids that an answer repeats, from a place that depends on its seed."""
    eos_token_id: int = -1
    answer_tokens: tuple[int, int] = (24, 96)
    """Shortest and longest answer that ends by itself."""
    lora_slots: int = 4
    lora_rank_max: int = 64


class SimSequence(msgspec.Struct, eq=False):
    """One request in the scheduler.

    `blocks` are cached under their hash, `private` are not (yet). Up to `target` tokens are computed as a
    prompt: after a preemption that includes tokens generated before. `arrived`: so many tokens' KV came from another
    engine, `spoiled` if it was another prompt's; `first` tokens go to that one.
    """

    request: GenerateRequest
    emit: Emit
    tokens: list[int]
    target: int
    seed: int
    answer: int
    hashes: list[int] = []
    blocks: list[int] = []
    private: int = 0
    computed: int = 0
    produced: int = 0
    cached: int = -1
    arrived: int = 0
    spoiled: bool = False
    first: tuple[int, ...] = ()
    waiting: bool = True
    ended: bool = False


def seed_of(request: GenerateRequest) -> int:
    """The seed of an answer, the same on every worker the request is tried on, whatever was generated before.

    A request without one has its prompt's at temperature 0, and else one by its own name.
    """
    sampling = request.sampling
    if sampling.seed is not None:
        return sampling.seed
    if not sampling.temperature:
        return crc32(request.tokens[: len(request.tokens) - 4 * request.emitted])
    return crc32(request.request.rpartition("-")[0].encode())


def token_at(script: Sequence[int], seed: int, number: int) -> int:
    """Token `number` of an answer: a function of seed and place, nothing else."""
    return script[(seed + number) % len(script)]
