"""A lower bound of the mean end-to-end latency from a price of the workers' time. See `bound` for why it is one."""

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headwater.engines.sim import StepTime
from tests.bench.bounds.fluid import FleetCapacity
from tests.bench.bounds.work import LeastWork, Prompts, least_decode_ms

Values = NDArray[np.float64]

PRICES: Final = tuple(2.0**power for power in range(-4, 13))
"""Milliseconds of latency that a millisecond of a worker costs. Each of them gives a bound."""

WINDOWS: Final = (0.5, 0.8, 0.95, 1.0)
"""Until when time has a price, as shares of the time until the last arrival; once without and once with the time of a request alone."""

CELLS: Final = np.linspace(0.0, 1.0, 257)
"""Shares of the blocks in use between which a step's time is bounded from below."""


class _Level(NamedTuple):
    """Steps with a token of each request while its answer has added so many blocks to its prompt's."""

    steps: Values
    held: Values
    share: Values


def priced_mean_ms(
    prompts: Prompts, work: LeastWork, arrival_ms: Values, capacity: FleetCapacity, fleet: "PricedFleet"
) -> float:
    """The greatest bound of the mean end-to-end latency that the prices and windows give."""
    levels = list(_levels(prompts, work, fleet))
    alone_ms = (work.first_ms + work.later_ms) / fleet.fastest
    best = 0.0
    for price in PRICES:
        decoding = sum(level.steps * _least_ms(level, price, fleet) for level in levels)
        cost = (work.first_ms - work.first_decode_ms) / fleet.fastest + price * work.prompt_work + decoding
        for share in WINDOWS:
            for more_ms in (0.0, float(alone_ms.mean())):
                end_ms = float(arrival_ms[-1]) * share + more_ms
                late = np.maximum(end_ms - arrival_ms, alone_ms)
                best = max(best, float(np.minimum(cost, late).sum()) - price * capacity.until(end_ms))
    return best / len(arrival_ms)


class PricedFleet(NamedTuple):
    """What all workers have in common: the highest speed that any ever has, their blocks, and step times."""

    fastest: float
    blocks: int
    block_size: int
    step_time: StepTime


def _levels(prompts: Prompts, work: LeastWork, fleet: PricedFleet) -> Iterator[_Level]:
    lengths = np.array([one.prompt_tokens for one in prompts.requests], np.float64)
    left = np.array([one.output_tokens for one in prompts.requests], np.float64)
    room = prompts.blocks * fleet.block_size - lengths + 1
    added = 0
    while left.any():
        steps = np.minimum(left, room)
        yield _Level(
            steps, (prompts.blocks + added) / fleet.blocks, (work.held_blocks + added) / fleet.blocks
        )
        left = left - steps
        room = np.full_like(room, fleet.block_size)
        added += 1


def _least_ms(level: _Level, price: float, fleet: PricedFleet) -> Values:
    """The least of a step's latency and the price of its part of it, over all shares of the blocks in use.

    Between two of `CELLS` the time of the step is at least its least there, and the part at least that of the upper end.
    """
    low, high = CELLS[:-1], CELLS[1:]
    times = least_decode_ms(fleet.step_time, low, high)
    costs = times * (1 / fleet.fastest + price * level.share[:, None] / high)
    least: Values = np.where(high >= level.held[:, None], costs, np.inf).min(axis=1)
    return least
