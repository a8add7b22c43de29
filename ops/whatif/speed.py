"""The speed of each worker of a what-if, and when it changes.

Light to import: the command line reads and writes both settings with it.
"""

from collections.abc import Sequence
from typing import NamedTuple

from headwater.ops.config.setting import ConfigError


class Slowdown(NamedTuple):
    """A slowdown: from `at_s` of virtual time on, each step of a worker takes `factor` times as long as at its own speed."""

    worker: str
    at_s: float
    factor: float

    def __str__(self) -> str:
        """Return the slowdown as the command line spells it."""
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
        """Return how many of `steps` equal steps from now on begin before the speed changes, at least 1."""
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
    """Return the speeds in the form that `read_speeds` reads."""
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
    """Return the slowdowns in the form that `read_slowdowns` reads."""
    return ",".join(map(str, slowdowns))
