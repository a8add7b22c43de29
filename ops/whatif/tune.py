"""A search for the router's weights on a trace or a recorded run, validated on later requests.

First the whole space is sampled at random, then one weight after the other around the best, all from one seed. The search
uses only the first part of the requests; its result is validated on the later rest.
"""

import math
import random
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import msgspec

from headwater.ops.whatif.options import Search
from headwater.ops.whatif.report import ServedTimes, spread_of
from headwater.ops.whatif.run import RunResult, run
from headwater.ops.whatif.setup import Setup
from headwater.ops.whatif.trace import Trace
from headwater.schemas.events.route import Weights

GUARDED: Final = ("ttft_mean", "ttft_p50", "ttft_p99", "itl_mean", "e2e_mean")
"""None of these may get worse by more than the guard."""

SPAN: Final = 8.0
"""A weight is searched from its present value divided by this to its value times this."""

ZERO_SHARE: Final = 0.1
"""Share of trials with a weight of zero."""

STEPS: Final = (0.5, 0.75, 1.35, 2.0)
"""Factors for the best weights, one weight at a time."""

PENALTY: Final = 10.0
"""Penalty for a deviation beyond the guard, as a share of the objective."""


class TuneFigures(NamedTuple):
    """The figures of some weights, in milliseconds except `reuse`."""

    ttft_mean: float
    ttft_p50: float
    ttft_p99: float
    itl_mean: float
    e2e_mean: float
    reuse: float


class Trial(NamedTuple):
    """Weights that were tried; a lower `score` is better, 1 is that of the present weights."""

    weights: Weights
    figures: TuneFigures
    score: float


class Tuned(msgspec.Struct, frozen=True):
    """The result of the search. `holds`: it is better on later requests too, within the guard."""

    objective: str
    names: list[str]
    trials: int
    seed: int
    trained_on: int
    judged_on: int
    before: dict[str, float]
    found: dict[str, float]
    later_before: dict[str, float]
    later_found: dict[str, float]
    weights: dict[str, float]
    gain: float
    later_gain: float
    holds: bool


RunSetups = Callable[[Trace, Sequence[Setup], int], list[TuneFigures]]
"""RunSetups setups on a trace and gives their figures from some nanosecond on; several at once, if it likes."""


def figures_of(ran: RunResult, after_ns: int = 0) -> TuneFigures:
    """The figures of those requests that came at `after_ns` or later."""
    served = [one for one in ran.served if one.request.arrival_ns >= after_ns]
    if not served:
        return TuneFigures(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    times = ServedTimes(served, ran.setup.block_size)
    ttft, e2e_ms = spread_of(times.ttft / 1e6), float(times.e2e.sum()) / 1e6 / len(served)
    return TuneFigures(ttft.mean, ttft.p50, ttft.p99, times.itl_ms, e2e_ms, times.reuse)


def one_after_another(trace: Trace, setups: Sequence[Setup], after_ns: int) -> list[TuneFigures]:
    """`RunSetups` in this process."""
    return [figures_of(run(trace, setup), after_ns) for setup in setups]


def tune(trace: Trace, setup: Setup, search: Search, runs: RunSetups = one_after_another) -> Tuned:
    """Search around the weights of `setup`, and validate the result."""
    whole = trace.first(setup.requests)
    setup = msgspec.structs.replace(setup, requests=0)
    cut = max(1, min(len(whole.requests) - 1, round(len(whole.requests) * search.share)))
    early = Trace(whole.name, whole.requests[:cut])
    draw = random.Random(search.seed)
    before = runs(early, [setup], 0)[0]

    def tried(candidates: Sequence[Weights]) -> list[Trial]:
        setups = [msgspec.structs.replace(setup, weights=weights) for weights in candidates]
        found = runs(early, setups, 0)
        return [
            Trial(weights, figures, score(before, figures, search))
            for weights, figures in zip(candidates, found, strict=True)
        ]

    best = Trial(setup.weights, before, 1.0)
    left = search.trials
    first = [drawn(setup.weights, search.names, draw) for _ in range(left // 2)]
    best = min([best, *tried(first)], key=lambda trial: trial.score)
    left -= len(first)
    while left > 0:
        steps = around(best.weights, search.names)[:left]
        if not steps:
            break
        left -= len(steps)
        nearer = min([best, *tried(steps)], key=lambda trial: trial.score)
        if nearer is best:
            break
        best = nearer
    # The later part starts with the caches that the earlier part filled.
    after_ns = round(whole.requests[cut].arrival_ns / setup.speed)
    both = [msgspec.structs.replace(setup, weights=weights) for weights in (setup.weights, best.weights)]
    later = runs(whole, both, after_ns)
    later_score = score(later[0], later[1], search)
    return Tuned(
        search.objective,
        list(search.names),
        search.trials - max(0, left),
        search.seed,
        cut,
        len(whole.requests) - cut,
        before._asdict(),
        best.figures._asdict(),
        later[0]._asdict(),
        later[1]._asdict(),
        {name: getattr(best.weights, name) for name in search.names},
        1 - _ratio(search.objective, before, best.figures),
        1 - _ratio(search.objective, *later),
        best.weights != setup.weights and later_score < 1,
    )


def score(before: TuneFigures, figures: TuneFigures, search: Search) -> float:
    """The objective relative to the present one, plus penalties for other figures beyond the guard."""
    total = _ratio(search.objective, before, figures)
    for name in GUARDED:
        if name != search.objective:
            total += PENALTY * max(0.0, _ratio(name, before, figures) - 1 - search.guard)
    return total


def _ratio(name: str, before: TuneFigures, figures: TuneFigures) -> float:
    """Lower is better: below 1 is a gain."""
    was, now = getattr(before, name), getattr(figures, name)
    if name == "reuse":
        was, now = now, was
    return now / was if was else 1.0


def drawn(weights: Weights, names: Sequence[str], draw: random.Random) -> Weights:
    """Random weights in the whole space."""
    values = {}
    for name in names:
        base = getattr(weights, name) or getattr(Weights(), name) or 1.0
        share = draw.random()
        spread = math.exp(draw.uniform(-math.log(SPAN), math.log(SPAN)))
        values[name] = 0.0 if share < ZERO_SHARE else _short(base * spread)
    return msgspec.structs.replace(weights, **values)


def around(weights: Weights, names: Sequence[str]) -> list[Weights]:
    """Variants with one changed weight; a zero weight is tried at a fraction of its default."""
    found = []
    for name in names:
        value = getattr(weights, name)
        others = [value * step for step in STEPS] if value else [getattr(Weights(), name) / SPAN]
        found += [msgspec.structs.replace(weights, **{name: _short(other)}) for other in others]
    return [one for one in found if one != weights]


def _short(value: float) -> float:
    """Rounded to three digits."""
    return float(f"{value:.3g}")
