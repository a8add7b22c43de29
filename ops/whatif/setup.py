"""What one column of a what-if is run with."""

from typing import Literal

import msgspec

from headwater.engines.sim_scheduler import Limits
from headwater.engines.step_time import StepTime
from headwater.ops.config import Settings
from headwater.ops.whatif.fleet import Shape
from headwater.schemas.fleet import Role
from headwater.schemas.route import Weights

BYTES_A_TOKEN = 131_072
"""KV of one token of an 8B-class model (32 layers, 8 KV heads of 128, 16 bits), as the simulated engine has it."""

GIGABYTES_A_SECOND = 20.0
"""What one hand-off gets of a link between workers, as the simulated engine has it."""

ROUTER = Settings()
"""A router's defaults."""


class Setup(msgspec.Struct, frozen=True):
    """One column. `workers` do both legs, beside them `prefill_workers` and `decode_workers`.

    `speed` divides arrival times; `temperature` below 0 leaves the router's. When a worker is busy, and how queries then wait
    at the router, is as the router's own settings say. `skip` False takes every step by itself:
    the results are the same.
    """

    policy: str = "kv"
    workers: int = 8
    prefill_workers: int = 0
    decode_workers: int = 0
    blocks: int = 4_000
    block_size: int = 512
    speed: float = 1.0
    weights: Weights = Weights()
    temperature: float = -1.0
    step_time: StepTime = StepTime()
    step_tokens: int = 8_192
    sequences: int = 256
    bytes_a_token: int = BYTES_A_TOKEN
    gigabytes_a_second: float = GIGABYTES_A_SECOND
    busy_prefill_tokens: int = ROUTER.busy_prefill_tokens
    busy_kv: float = ROUTER.busy_kv
    busy_waiting: int = ROUTER.busy_waiting
    queue_order: Literal["fcfs", "shortest_uncached"] = ROUTER.queue_order
    queue_wait_s: float = ROUTER.queue_wait_s
    requests: int = 0
    skip: bool = True

    def shapes(self) -> list[Shape]:
        """The fleet's workers."""
        limits = Limits(self.block_size, self.step_tokens, self.sequences)
        counts: list[tuple[Role, str, int]] = [
            ("both", "w", self.workers),
            ("prefill", "p", self.prefill_workers),
            ("decode", "d", self.decode_workers),
        ]
        return [
            Shape(f"{letter}{number:03d}", role, self.blocks, limits, self.step_time)
            for role, letter, count in counts
            for number in range(count)
        ]

    def transfer_ns(self, tokens: int) -> int:
        """How long handing `tokens` tokens' KV over takes."""
        return round(tokens * self.bytes_a_token / self.gigabytes_a_second)
