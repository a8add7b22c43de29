"""How fast each worker of a what-if computes, and when that changes.

Light to import: the command line reads and writes both settings with it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headwater.engines.sim.step_time import StepTime
from headwater.ops.config.setting import ConfigError
from headwater.schemas.events.fleet import LoadReported


class Slowdown(NamedTuple):
    """From `at_s` of virtual time on, each step of a worker takes `factor` times as long as at its own speed."""

    worker: str
    at_s: float
    factor: float

    def __str__(self) -> str:
        """As on the command line."""
        return f"{self.worker}@{self.at_s:g}={self.factor:g}"


class SpeedProfile(NamedTuple):
    """A worker's speed: `base` at first, and others later. `changes`: (nanoseconds, speed from then on), ascending.

    A worker of speed 1 needs the step times of the setup, one of speed 2 half of them.
    """

    base: float = 1.0
    changes: tuple[tuple[int, float], ...] = ()

    def at(self, now_ns: int) -> float:
        """The speed of a step that begins now."""
        speed = self.base
        for from_ns, later in self.changes:
            if from_ns > now_ns:
                break
            speed = later
        return speed

    def all_speeds(self) -> tuple[float, ...]:
        """Every speed that it has."""
        return self.base, *(speed for _, speed in self.changes)

    def steps_until_change(self, now_ns: int, step_ns: int, steps: int) -> int:
        """Of `steps` equal steps from now on, how many begin before the speed changes. At least 1."""
        for from_ns, _ in self.changes:
            if from_ns > now_ns:
                return min(steps, -(-(from_ns - now_ns) // step_ns))
        return steps


def profile_of(name: str, base: float, slowdowns: Sequence[Slowdown]) -> SpeedProfile:
    """The speed of a worker over time."""
    changes = sorted((round(one.at_s * 1e9), base / one.factor) for one in slowdowns if one.worker == name)
    return SpeedProfile(base, tuple(changes))


def check_workers(slowdowns: Sequence[Slowdown], names: Sequence[str]) -> None:
    """Raises `ConfigError` for a slowdown of a worker that the fleet does not have."""
    for one in slowdowns:
        if one.worker not in names:
            raise ConfigError(
                f"--slowdowns {one}: the fleet has no worker {one.worker}; its workers are {names[0]} to {names[-1]}"
            )


def read_speeds(text: str) -> tuple[float, ...]:
    """Speeds separated by commas. Raises `ValueError`."""
    speeds = tuple(map(float, text.split(",")))
    if min(speeds) <= 0:
        raise ValueError("a speed is greater than 0")
    return speeds


def write_speeds(speeds: Sequence[float]) -> str:
    """As `read_speeds` reads it."""
    return ",".join(f"{speed:g}" for speed in speeds)


def read_slowdowns(text: str) -> tuple[Slowdown, ...]:
    """Slowdowns such as `w000@60=4`, separated by commas; none for an empty text. Raises `ValueError`."""
    return tuple(map(_read_slowdown, text.split(","))) if text else ()


def _read_slowdown(text: str) -> Slowdown:
    worker, at, rest = text.strip().partition("@")
    at_s, equals, factor = rest.partition("=")
    try:
        found = Slowdown(worker, float(at_s), float(factor))
    except ValueError:
        found = None
    if not (worker and at and equals and found) or found.at_s < 0 or found.factor <= 0:
        raise ValueError(
            f"{text.strip()!r} is no WORKER@SECONDS=FACTOR with seconds from 0 and a factor above 0"
        )
    return found


def write_slowdowns(slowdowns: Sequence[Slowdown]) -> str:
    """As `read_slowdowns` reads it."""
    return ",".join(map(str, slowdowns))


# Step times of a recorded run, estimated from its workers' measurements.

SAMPLES_MIN = 8
"""With fewer measured prompts the simulator's default step times are used."""

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

    def take(self, report: LoadReported) -> None:
        """One report's."""
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
