"""Searching for the router's weights on a trace or a recorded run: what would they gain, and would they later?

First the whole space at random, then one weight after the other around the best, all from one seed. The search sees the
first part of the requests only; what it found is judged by the rest, which came later.
"""

import math
import random
from collections.abc import Callable, Sequence
from typing import Final, Literal, NamedTuple

import msgspec
import numpy as np

from headwater.ops.whatif.run import Ran, run
from headwater.ops.whatif.setup import Setup
from headwater.ops.whatif.trace import Trace
from headwater.schemas.route import Weights

Objective = Literal["ttft_mean", "ttft_p50", "ttft_p99", "itl_mean", "e2e_mean", "reuse"]

OBJECTIVES: Final[tuple[Objective, ...]] = (
    "ttft_mean",
    "ttft_p50",
    "ttft_p99",
    "itl_mean",
    "e2e_mean",
    "reuse",
)

GUARDED: Final = ("ttft_mean", "ttft_p50", "ttft_p99", "itl_mean", "e2e_mean")
"""None of these may get worse by more than the guard."""

NAMES: Final = ("crowding", "retain", "memory")
"""What is searched unless others are named."""

SPAN: Final = 8.0
"""A weight is looked for from its present value divided by this to its value times this."""

ZERO_SHARE: Final = 0.1
"""So often a weight is tried at nothing."""

STEPS: Final = (0.5, 0.75, 1.35, 2.0)
"""What the best weights are multiplied by, one at a time."""

PENALTY: Final = 10.0
"""What a share beyond the guard costs, as a share of the objective."""


class Figures(NamedTuple):
    """What weights came to, milliseconds but for `reuse`."""

    ttft_mean: float
    ttft_p50: float
    ttft_p99: float
    itl_mean: float
    e2e_mean: float
    reuse: float


class Trial(NamedTuple):
    """Weights that were tried; the less the `score` the better, 1 being what there was before."""

    weights: Weights
    figures: Figures
    score: float


class Tuned(msgspec.Struct, frozen=True):
    """What the search found. `holds`: it is better on later requests too, within the guard."""

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


class Asks(NamedTuple):
    """How to search: runs in all, the share of requests to learn from, and how much worse other figures may get."""

    objective: Objective = "ttft_mean"
    names: tuple[str, ...] = NAMES
    trials: int = 40
    seed: int = 0
    share: float = 0.6
    guard: float = 0.02


Runs = Callable[[Trace, Sequence[Setup], int], list[Figures]]
"""Runs setups on a trace and gives their figures from some nanosecond on; several at once, if it likes."""


def figures_of(ran: Ran, after_ns: int = 0) -> Figures:
    """The figures of those requests that came at `after_ns` or later."""
    served = [one for one in ran.served if one.request.arrival_ns >= after_ns]
    if not served:
        return Figures(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    size = ran.setup.block_size
    ttft = np.array([one.first_ns - one.request.arrival_ns for one in served], np.float64) / 1e6
    e2e = sum(one.done_ns - one.request.arrival_ns for one in served) / 1e6 / len(served)
    gaps = sum(one.request.output_tokens - 1 for one in served)
    p50, p99 = np.percentile(ttft, [50, 99])
    return Figures(
        float(ttft.mean()),
        float(p50),
        float(p99),
        sum(one.done_ns - one.first_ns for one in served) / 1e6 / max(1, gaps),
        e2e,
        sum(one.hit_blocks for one in served)
        / max(1, sum(-(-one.request.prompt_tokens // size) for one in served)),
    )


def one_after_another(trace: Trace, setups: Sequence[Setup], after_ns: int) -> list[Figures]:
    """`Runs` in this process."""
    return [figures_of(run(trace, setup), after_ns) for setup in setups]


def tune(trace: Trace, setup: Setup, asks: Asks, runs: Runs = one_after_another) -> Tuned:
    """Search around the weights of `setup`, and judge what is found."""
    whole = trace.first(setup.requests)
    setup = msgspec.structs.replace(setup, requests=0)
    cut = max(1, min(len(whole.requests) - 1, round(len(whole.requests) * asks.share)))
    early = Trace(whole.name, whole.requests[:cut])
    draw = random.Random(asks.seed)
    before = runs(early, [setup], 0)[0]

    def tried(candidates: Sequence[Weights]) -> list[Trial]:
        setups = [msgspec.structs.replace(setup, weights=weights) for weights in candidates]
        found = runs(early, setups, 0)
        return [
            Trial(weights, figures, score(before, figures, asks))
            for weights, figures in zip(candidates, found, strict=True)
        ]

    best = Trial(setup.weights, before, 1.0)
    left = asks.trials
    first = [drawn(setup.weights, asks.names, draw) for _ in range(left // 2)]
    best = min([best, *tried(first)], key=lambda trial: trial.score)
    left -= len(first)
    while left > 0:
        steps = around(best.weights, asks.names)[:left]
        if not steps:
            break
        left -= len(steps)
        nearer = min([best, *tried(steps)], key=lambda trial: trial.score)
        if nearer is best:
            break
        best = nearer
    # The later part on caches that the earlier part filled.
    after_ns = round(whole.requests[cut].arrival_ns / setup.speed)
    both = [msgspec.structs.replace(setup, weights=weights) for weights in (setup.weights, best.weights)]
    later = runs(whole, both, after_ns)
    later_score = score(later[0], later[1], asks)
    return Tuned(
        asks.objective,
        list(asks.names),
        asks.trials - max(0, left),
        asks.seed,
        cut,
        len(whole.requests) - cut,
        before._asdict(),
        best.figures._asdict(),
        later[0]._asdict(),
        later[1]._asdict(),
        {name: getattr(best.weights, name) for name in asks.names},
        1 - _ratio(asks.objective, before, best.figures),
        1 - _ratio(asks.objective, *later),
        best.weights != setup.weights and later_score < 1,
    )


def score(before: Figures, figures: Figures, asks: Asks) -> float:
    """The objective as a share of what it was, and what other figures beyond the guard add to it."""
    total = _ratio(asks.objective, before, figures)
    for name in GUARDED:
        if name != asks.objective:
            total += PENALTY * max(0.0, _ratio(name, before, figures) - 1 - asks.guard)
    return total


def _ratio(name: str, before: Figures, figures: Figures) -> float:
    """Less is better: below 1 is a gain."""
    was, now = getattr(before, name), getattr(figures, name)
    if name == "reuse":
        was, now = now, was
    return now / was if was else 1.0


def drawn(weights: Weights, names: Sequence[str], draw: random.Random) -> Weights:
    """Weights from anywhere in the space."""
    values = {}
    for name in names:
        base = getattr(weights, name) or getattr(Weights(), name) or 1.0
        share = draw.random()
        spread = math.exp(draw.uniform(-math.log(SPAN), math.log(SPAN)))
        values[name] = 0.0 if share < ZERO_SHARE else _short(base * spread)
    return msgspec.structs.replace(weights, **values)


def around(weights: Weights, names: Sequence[str]) -> list[Weights]:
    """One weight changed at a time; one that is nothing is tried at a part of its default."""
    found = []
    for name in names:
        value = getattr(weights, name)
        others = [value * step for step in STEPS] if value else [getattr(Weights(), name) / SPAN]
        found += [msgspec.structs.replace(weights, **{name: _short(other)}) for other in others]
    return [one for one in found if one != weights]


def _short(value: float) -> float:
    """Three digits are enough to tell, and to paste."""
    return float(f"{value:.3g}")
