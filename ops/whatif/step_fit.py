"""Step times of a recorded run, estimated from its workers' measurements."""

import numpy as np
from numpy.typing import NDArray

from headwater.engines.sim.defaults import StepTime
from headwater.schemas.events.fleet import LoadReported

SAMPLES_MIN = 8
"""The fewest measured prompts; with fewer, the simulator's default step times are used."""

SPREAD_MIN = 4
"""Minimum ratio of the longest sample to the shortest; below it only a constant can be fitted."""

BINS_MAX, BIN_MIN = 8, 12
QUICK = 20
"""Percentile of the time between tokens that is used as a step without a prompt in it."""


class Samples:
    """Measurements in load reports: (tokens, ms) of prompts, (share of blocks in use, ms) of tokens."""

    def __init__(self) -> None:
        self.prefills: list[tuple[float, float]] = []
        self.steps: list[tuple[float, float]] = []

    @property
    def share(self) -> float:
        """The largest share of blocks in use of all measurements of tokens."""
        return max((share for share, _ in self.steps), default=0.0)

    def take(self, report: LoadReported) -> None:
        """Add the measurements of a report."""
        self.prefills += [(float(tokens), us / 1000) for tokens, us in report.prefills if tokens > 0]
        if report.step_us and report.total_blocks:
            self.steps.append((report.used_blocks / report.total_blocks, report.step_us / 1000))


def fitted(samples: Samples, step_tokens: int = 8_192) -> StepTime | None:
    """Step times fitted to the samples by least squares; None for too few of them.

    A prompt's time includes one decode, that of its first token. Prompts longer than a step take several steps, and are
    excluded.
    """
    short = [pair for pair in samples.prefills if pair[0] <= step_tokens]
    if len(short) < SAMPLES_MIN:
        return None
    shares, gaps = _columns(samples.steps)
    decode = (0.0, *_line(*_least(shares, gaps))) if len(gaps) else (0.0, 0.0, 0.0)
    tokens, taken = _columns(short)
    at = float(np.median(shares)) if len(shares) else 0.0
    rest = np.maximum(0.0, taken - (decode[1] * at + decode[2]))
    return StepTime(_curve(tokens, rest), decode)


def _columns(pairs: list[tuple[float, float]]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    table = np.array(pairs, np.float64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def _least(
    shares: NDArray[np.float64], gaps: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The short ones among samples of similar shares: prompts computed in between only make gaps longer."""
    order = np.argsort(shares, kind="stable")
    bins = np.array_split(order, max(1, min(BINS_MAX, len(order) // BIN_MIN)))
    middles = [float(np.median(shares[chosen])) for chosen in bins]
    quick = [float(np.percentile(gaps[chosen], QUICK)) for chosen in bins]
    return np.array(middles, np.float64), np.array(quick, np.float64)


def _curve(x: NDArray[np.float64], y: NDArray[np.float64]) -> tuple[float, float, float]:
    """A x^2 + b x + c, none of them negative: where the best curve has a negative one, the best line."""
    if x.max() >= SPREAD_MIN * x.min() and len(np.unique(x)) > 3:
        a, b, c = np.polyfit(x, y, 2)
        if min(a, b, c) >= 0:
            return float(a), float(b), float(c)
    return (0.0, *_line(x, y))


def _line(x: NDArray[np.float64], y: NDArray[np.float64]) -> tuple[float, float]:
    """B x + c, neither negative; a constant where x says nothing."""
    if np.ptp(x) > 0.05 * max(1e-9, float(np.abs(x).max())) and len(np.unique(x)) > 2:
        b, c = np.polyfit(x, y, 1)
        if b >= 0 and c >= 0:
            return float(b), float(c)
        if c < 0:
            return float((x * y).sum() / (x * x).sum()), 0.0
    return 0.0, float(np.median(y))
