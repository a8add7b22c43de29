"""`python -m tests.bench limits`: how far several edges together exceed a rate limit. A simulation in virtual time.

Requests for one account arrive at random edges, four times as many as the limit admits, and once a burst of six minutes'
requests in a tenth of a second: the worst case, since no edge hears of another's use before it is over.
"""

import random
from typing import Final, NamedTuple

from headwater.actors.edge.admit.account import LimitHolder
from headwater.actors.edge.admit.limiter import SHARE_S, RateLimiter, UsageReports
from headwater.actors.edge.settings import RateLimits
from headwater.actors.http.errors import ApiError
from headwater.ops.bench.report import Measure, Report

PER_MINUTE: Final = 600
OVERLOAD: Final = 4.0
STEP_S: Final = 0.01
MESSAGE_S: Final = 0.01
BURST_S: Final = 0.1
BURST_AT_S: Final = 2.0
"""By then the edges have heard of each other."""

DURATION_S: Final = 240.0


class SimulatedTime:
    """A clock that the simulation moves."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def wall_ns(self) -> int:
        """See `Clock.wall_ns`."""
        return round(self.now_s * 1e9)

    def monotonic_s(self) -> float:
        """See `Clock.monotonic_s`."""
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        """See `Clock.sleep`: nothing sleeps here."""
        raise NotImplementedError("the caller moves the time")


class Run(NamedTuple):
    """When requests were admitted, in seconds, and the limit."""

    admitted_s: list[float]
    per_minute: int
    duration_s: float

    def excess(self, begin_s: float, end_s: float) -> float:
        """Requests admitted in a window beyond the limit's, as a share of the limit; negative below it."""
        count = sum(begin_s <= at_s < end_s for at_s in self.admitted_s)
        return (count - self.per_minute * (end_s - begin_s) / 60.0) / self.per_minute


def simulate(edges: int, *, lost: float = 0.0, duration_s: float = DURATION_S, seed: int = 0) -> Run:
    """Requests at `edges` edges, of whose messages a share `lost` is lost."""
    rng, time = random.Random(seed), SimulatedTime()
    holder = LimitHolder("key", RateLimits(requests_per_minute=PER_MINUTE))
    limiters = [RateLimiter(time) for _ in range(edges)]
    reports = [UsageReports(limiter, f"edge-{number}", 1) for number, limiter in enumerate(limiters)]
    next_s = [rng.random() * SHARE_S for _ in limiters]
    under_way: list[tuple[float, int, bytes]] = []
    admitted: list[float] = []
    for step in range(round(duration_s / STEP_S)):
        time.now_s = step * STEP_S
        for number, due_s in enumerate(next_s):
            if time.now_s >= due_s:
                next_s[number] = due_s + SHARE_S
                data = reports[number].next_report()
                if data is not None:
                    others = (other for other in range(edges) if other != number and rng.random() >= lost)
                    under_way += [(time.now_s + MESSAGE_S, other, data) for other in others]
        for _, to, data in (one for one in under_way if one[0] <= time.now_s):
            reports[to].add(data)
        under_way = [one for one in under_way if one[0] > time.now_s]
        rate = OVERLOAD * PER_MINUTE / 60.0
        if BURST_AT_S <= time.now_s < BURST_AT_S + BURST_S:
            rate += 6 * PER_MINUTE / BURST_S
        whole, part = divmod(rate * STEP_S, 1.0)
        for _ in range(int(whole) + (rng.random() < part)):
            quota = rng.choice(limiters).quota(holder)
            try:
                quota.enter("model")
            except ApiError:
                continue
            admitted.append(time.now_s)
            quota.leave()
    return Run(admitted, PER_MINUTE, duration_s)


def bench() -> Report:
    """The excess of 2 and 4 edges over the limit."""
    measures: list[Measure] = []
    for edges in (1, 2, 4):
        for lost in (0.0, 0.5):
            if edges == 1 and lost:
                continue
            run = simulate(edges, lost=lost)
            name = f"{edges} edge{'s' * (edges > 1)}, {lost:.0%} of messages lost"
            at_once = run.excess(BURST_AT_S, BURST_AT_S + 1) - 1
            measures += [
                Measure(f"{name}: burst above the limit", 100 * at_once, "%"),
                Measure(f"{name}: {DURATION_S:g} s above the limit", _percent(run, 0.0), "%"),
                Measure(f"{name}: last minute above the limit", _percent(run, DURATION_S - 60), "%"),
            ]
    return Report(
        "limits",
        {
            "limit": f"{PER_MINUTE} requests per minute",
            "offered": f"{OVERLOAD:g} times the limit, and {6 * PER_MINUTE} requests in {BURST_S:g} s",
            "edges report every": f"{SHARE_S:g} s",
            "message": f"{MESSAGE_S * 1000:g} ms",
            "time": "virtual",
        },
        measures,
    )


def _percent(run: Run, begin_s: float) -> float:
    """Admitted above the rate until the end, in percent of what the rate admits; a full bucket at the start is no excess."""
    minutes = (run.duration_s - begin_s) / 60.0
    return 100 * (run.excess(begin_s, run.duration_s) - (begin_s == 0.0)) / minutes
