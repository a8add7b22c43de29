"""The arrival rate at which traffic uses a given share of a fleet."""

from collections.abc import Sequence
from typing import Final, NamedTuple

from headwater.engines.sim import StepTime
from headwater.ops.bench.trace import TRACE_BLOCK, Trace, TraceRequest
from headwater.ops.config.setting import ConfigError
from tests.bench.zoo.traffic import Arrival

LOADS: Final = {"light": 0.15, "medium": 0.45, "heavy": 0.8}
"""Share of a fleet's capacity (of its KV blocks, or of its time for prompts, whichever is used up first)."""

SEQUENCES: Final = 256
"""Requests that a worker runs concurrently."""


class Demand(NamedTuple):
    """Means over requests: KV blocks held, tokens generated, and milliseconds of prefill if caches were unlimited."""

    blocks: float
    output_tokens: float
    prefill_ms: float


def demand_of(arrivals: Sequence[Arrival], step_time: StepTime) -> Demand:
    """What the requests need. A prompt's cached prefix is what an earlier one had."""
    seen: set[int] = set()
    prefill_ms = 0.0
    for one in arrivals:
        cached = 0
        for block in one.ids:
            if block not in seen:
                break
            cached += 1
        seen.update(one.ids)
        uncached = max(1, one.prompt_tokens - cached * TRACE_BLOCK)
        prefill_ms += step_time.seconds(uncached, 0.0, False) * 1000
    count = len(arrivals)
    return Demand(
        sum((one.prompt_tokens + one.output_tokens / 2) / TRACE_BLOCK for one in arrivals) / count,
        sum(one.output_tokens for one in arrivals) / count,
        prefill_ms / count,
    )


def requests_per_s(demand: Demand, blocks: int, share: float, step_time: StepTime) -> float:
    """The rate per worker at which `share` of its `blocks` are in use, or of its time is spent on prompts.

    A request holds its blocks while its tokens are generated; those steps take turns with the prompts'.
    """
    return min(_by_blocks(demand, blocks, share, step_time, demand.prefill_ms), prefills_per_s(demand, share))


def prefills_per_s(demand: Demand, share: float) -> float:
    """The rate per worker at which `share` of its time is spent on prompts."""
    return 1000 * share / demand.prefill_ms


def decodes_per_s(demand: Demand, blocks: int, share: float, step_time: StepTime) -> float:
    """The rate per worker at which `share` of its `blocks` are in use, if others compute the prompts."""
    return _by_blocks(demand, blocks, share, step_time, 0.0)


def _by_blocks(demand: Demand, blocks: int, share: float, step_time: StepTime, prefill_ms: float) -> float:
    together = share * min(SEQUENCES, blocks / demand.blocks)
    step_ms = step_time.seconds(0, together * demand.blocks / blocks, True) * 1000
    return 1000 * together / (demand.output_tokens * step_ms + together * prefill_ms)


def trace_at(name: str, arrivals: Sequence[Arrival], rate: float) -> Trace:
    """The requests as a trace with `rate` requests a second. Raises `ConfigError` if all arrive at once."""
    if not arrivals[-1].at:
        raise ConfigError(f"all {len(arrivals)} requests of {name} arrive at once: give more --requests")
    scale = 1e9 * len(arrivals) / (rate * arrivals[-1].at)
    return Trace(
        name,
        tuple(
            TraceRequest(
                f"r{number}",
                # Whole milliseconds, as in files of this format, so that a peer reads the same times.
                round(one.at * scale / 1e6) * 1_000_000,
                one.prompt_tokens,
                one.output_tokens,
                one.ids,
                session=one.session,
                tenant=one.tenant,
            )
            for number, one in enumerate(arrivals)
        ),
    )
