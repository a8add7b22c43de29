"""Bounds of a trace on a fleet: what policies are measured against.

`unlimited` and `queueing` are lower bounds of the mean TTFT and the mean end-to-end latency: no policy of the what-if is below
them, with or without pulled prefixes, delays or several routers. `unlimited` is also an upper bound of reuse. `shared` is a
reference only, since other evictions than LRU may be better.

Why they are bounds. Let request i arrive at r, and its first token at F. Every block of a prompt that no earlier request has is
computed after r, and the KV that i's first token is computed from was computed one step after the other, by workers
on which, or from which, it was then found: no token of a prompt can be computed without those before it. So x tokens are
computed in consecutive steps between r and F, where x counts the blocks that i is the first to have, and the tokens that
every request computes itself. Different requests count different computations.

* Alone: these steps take at least the time of x tokens in the best number of steps, and the last one a step with a token
  while the prompt's blocks are in use. Each further token takes at least such a step. This holds for each request by itself; it is
  `unlimited`, as it is also what an unlimited cache without queueing would give.
* Work: a worker of speed v does at most v ms of work a ms. Charge each computed token of a prompt the least time per token that a step of any
  size has, and each generated token the least time of a step per share of the blocks in use, times the share that the request
  holds, where a block counts 1 / n if n requests of the trace have it: the charges of a step then never exceed its time. All charges of i
  fall between r and F (or its end). So the fleet's schedule is one of a single machine with the sum of all speeds, which may divide its time
  at will, and shortest remaining work first has the least mean completion time on it.
* Work and time: a step's charges are spread over it, so a request's first token comes at least half the time of its steps after the
  mean time at which its work was done. The mean of these mean times is at least that of the single machine that always works on the request
  with the least work in all. Likewise for the last token, where the prompt's work is also before all further steps.
* Price: let a ms of a worker's time cost a given price until some moment, and nothing later. A request that ends before that moment pays for all of its charges, which
  are as above except that a step with a token of i charges it the share that i holds divided by the share in use: the fuller the worker, the
  less, and the longer the step. Whatever is in use, latency and payment together are at least their least sum. A request that ends later has waited until then. All payments
  together are at most the price of the whole fleet's time, so the sum of the latencies is at least the sum of these minima less that price. This
  is so for every price and every moment; the best of some are taken.

`queueing` is the greatest of them, for each figure (prices: E2E only). It is a bound of the mean only.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from headwater.ops.bench.trace import Trace, TraceRequest
from headwater.ops.whatif.setup import Setup
from headwater.ops.whatif.workers import WorkerShape, shapes
from tests.bench.bounds.fluid import FleetCapacity, shortest_first
from tests.bench.bounds.price import PricedFleet, priced_mean_ms
from tests.bench.bounds.work import (
    LeastWork,
    Prompts,
    least_work,
    prompts_of,
    tokens_shared,
    tokens_unlimited,
)


class BoundFigures(msgspec.Struct, frozen=True):
    """Means over requests in milliseconds, and the share of their blocks that is found in caches (None: not bounded)."""

    ttft_mean: float
    e2e_mean: float
    reuse: float | None = None


class TraceBounds(msgspec.Struct, frozen=True):
    """See the module. `requests`: how many of the trace fit on a worker, which the figures are of."""

    requests: int
    unlimited: BoundFigures
    shared: BoundFigures
    queueing: BoundFigures


def bounds_of(trace: Trace, setup: Setup) -> TraceBounds:
    """The bounds of a run. Raises `ConfigError` for step times of prompts with a negative coefficient."""
    requests = _served(trace, setup)
    if not requests:
        none = BoundFigures(0.0, 0.0, 0.0)
        return TraceBounds(0, none, none, none)
    fleet = shapes(setup)
    profiles = [shape.speed for shape in fleet]
    fastest = max(
        [profile.base for profile in profiles] + [speed for one in profiles for _, speed in one.changes]
    )
    prompts = prompts_of(requests, setup.block_size)
    size = setup.block_size
    unlimited = least_work(prompts, tokens_unlimited(prompts, size), setup)
    shared = least_work(prompts, tokens_shared(prompts, size, setup.blocks * len(fleet)), setup)
    alone = _alone(prompts, unlimited, fastest, size)
    arrival_ms = np.array([one.arrival_ns for one in requests], np.float64) / 1e6
    capacity = capacity_of(fleet)
    queued = _queueing(arrival_ms, unlimited, capacity, fastest)
    common = PricedFleet(fastest, setup.blocks, size, setup.step_time)
    priced_ms = priced_mean_ms(prompts, unlimited, arrival_ms, capacity, common)
    return TraceBounds(
        len(requests),
        alone,
        _alone(prompts, shared, fastest, size),
        BoundFigures(max(alone.ttft_mean, queued.ttft_mean), max(alone.e2e_mean, queued.e2e_mean, priced_ms)),
    )


def _served(trace: Trace, setup: Setup) -> Sequence[TraceRequest]:
    """The requests that fit on a worker."""
    size, blocks = setup.block_size, setup.blocks
    chosen = trace.first(setup.requests).faster(setup.speed).requests
    return [one for one in chosen if -(-(one.prompt_tokens + one.output_tokens) // size) <= blocks]


def capacity_of(fleet: Sequence[WorkerShape]) -> FleetCapacity:
    """The sum of the workers' speeds over time."""
    times = sorted({0, *(at for shape in fleet for at, _ in shape.speed.changes)})
    return FleetCapacity(
        tuple(at / 1e6 for at in times), tuple(sum(shape.speed.at(at) for shape in fleet) for at in times)
    )


def _alone(prompts: Prompts, work: LeastWork, fastest: float, size: int) -> BoundFigures:
    """Each request on a worker of its own."""
    first, later = work.first_ms.mean() / fastest, work.later_ms.mean() / fastest
    usable = sum(map(len, prompts.usable))
    computed = float((work.tokens - prompts.own_tokens).sum()) / size
    return BoundFigures(float(first), float(first + later), float((usable - computed) / prompts.blocks.sum()))


def _queueing(
    arrival_ms: NDArray[np.float64], work: LeastWork, capacity: FleetCapacity, fastest: float
) -> BoundFigures:
    """The bounds by work, and by work and time."""
    first = shortest_first(arrival_ms, work.prompt_work, capacity, remaining=True)
    last = shortest_first(arrival_ms, work.prompt_work + work.decode_work_in_all, capacity, remaining=True)
    both = work.prompt_work + work.decode_work
    mean_first = shortest_first(arrival_ms, work.prompt_work, capacity, remaining=False)
    mean_last = shortest_first(arrival_ms, both, capacity, remaining=False)
    after = work.prompt_work * (work.later_ms + work.tail_ms) + work.decode_work * work.decode_steps_ms / 2
    tail_ms = np.divide(after, both, out=np.zeros_like(both), where=both > 0)
    return BoundFigures(
        float(
            max(first.completed.mean(), (mean_first.busy + work.tail_ms / fastest).mean()) - arrival_ms.mean()
        ),
        float(max(last.completed.mean(), (mean_last.busy + tail_ms / fastest).mean()) - arrival_ms.mean()),
    )
