"""The traffic of these benchmarks: classes of `bench.zoo` at a share of a fleet's capacity, and the public trace."""

from collections.abc import Sequence
from typing import Final

from headwater.engines.sim import StepTime
from headwater.ops.bench.trace import Trace, read
from headwater.ops.whatif.setup import Setup
from tests.bench.whatif import TRACE
from tests.bench.zoo.load import demand_of, requests_per_s, trace_at
from tests.bench.zoo.traffic import generate

CONVERSATION: Final = "conversation"
"""The public trace. It exists once, so seeds do not apply."""

CONVERSATION_SPEED: Final = 4.0


def traces(name: str, fleet: Setup, share: float, requests: int, seeds: Sequence[int]) -> list[Trace]:
    """A trace for each seed, with about as many requests, for `share` of the capacity of all workers.

    The public trace is whole.
    """
    if name == CONVERSATION:
        return [read(TRACE).faster(CONVERSATION_SPEED)]
    step_time = StepTime()
    found = []
    for seed in seeds:
        arrivals = generate(name, requests, seed)
        rate = requests_per_s(demand_of(arrivals, step_time), fleet.blocks, share, step_time)
        found.append(trace_at(name, arrivals, fleet.workers * rate))
    return found
