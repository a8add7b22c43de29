"""One machine with the capacity of the whole fleet, which divides its work among requests as finely as it likes."""

from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]


class FleetCapacity(NamedTuple):
    """Work per millisecond: `rates[i]` from `from_ms[i]` on. The first is from 0, all are above 0."""

    from_ms: tuple[float, ...]
    rates: tuple[float, ...]

    def until(self, end_ms: float) -> float:
        """The work of the time from 0 to `end_ms`."""
        ends = (*self.from_ms[1:], float("inf"))
        pieces = zip(self.from_ms, ends, self.rates, strict=True)
        return sum(max(0.0, min(end, end_ms) - start) * rate for start, end, rate in pieces)


class FluidSchedule(NamedTuple):
    """When each request is completed, and the mean time at which its work is done. Milliseconds."""

    completed: Values
    busy: Values


def shortest_first(
    arrival_ms: Values, work: Values, capacity: FleetCapacity, *, remaining: bool
) -> FluidSchedule:
    """Preemptive schedule of requests, sorted by arrival: always the one with the least work left (`remaining`), or in all.

    The first has the least sum of completion times of all schedules that do so much work for each request between its
    arrival and its completion (shortest remaining processing time); the second the least sum of the mean times at which work is done: as a
    unit of a request's work counts 1 / `work` there, the units of the request with the least work count most.
    """
    count = len(work)
    completed, busy = arrival_ms.copy(), np.where(work > 0, 0.0, arrival_ms)
    arrivals, works, left = arrival_ms.tolist(), work.tolist(), work.tolist()
    starts = (*capacity.from_ms[1:], float("inf"))
    waiting: list[tuple[float, int]] = []
    now, upcoming, piece = 0.0, 0, 0
    while waiting or upcoming < count:
        if not waiting:
            now = max(now, arrivals[upcoming])
        while upcoming < count and arrivals[upcoming] <= now:
            if works[upcoming] > 0:
                heappush(waiting, (works[upcoming], upcoming))
            upcoming += 1
        if not waiting:
            continue
        while starts[piece] <= now:
            piece += 1
        rate = capacity.rates[piece]
        number = waiting[0][1]
        end = now + left[number] / rate
        until = min(end, starts[piece], arrivals[upcoming] if upcoming < count else end)
        done = left[number] if until == end else (until - now) * rate
        busy[number] += done / works[number] * (now + until) / 2
        now = until
        if until == end:
            heappop(waiting)
            completed[number] = now
            continue
        left[number] -= done
        if remaining:
            heappop(waiting)
            heappush(waiting, (left[number], number))
    return FluidSchedule(completed, busy)
