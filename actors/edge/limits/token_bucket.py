"""A token bucket, kept as what is used of it: the use drains at a constant rate, and admission needs room for more.

Pure: each call has the time, in seconds of a monotonic clock; a time before the newest one counts as the newest one.
"""

import math
from typing import Final

MINUTE_S: Final = 60.0
_ROUNDING: Final = 1e-6
"""Room for sums of floats, in units of the bucket: after the wait that `wait_s` returns, the amount fits."""


class TokenBucket:
    """Admits `per_minute` units in a burst, and as many each minute.

    What is charged after the fact (more than was reserved, or used at another edge) may exceed the capacity: a debt
    that drains before anything is admitted, so that the rate holds in the long run.
    """

    __slots__ = ("_at_s", "_used", "capacity")

    def __init__(self, per_minute: int, now_s: float) -> None:
        self.capacity = per_minute
        self._used = 0.0
        self._at_s = now_s

    @property
    def per_s(self) -> float:
        """Units that drain per second."""
        return self.capacity / MINUTE_S

    def used(self, now_s: float) -> float:
        """Units in use: 0 is an untouched bucket, above `capacity` is debt."""
        if now_s > self._at_s:
            self._used = max(0.0, self._used - (now_s - self._at_s) * self.per_s)
            self._at_s = now_s
        return self._used

    def left(self, now_s: float) -> int:
        """Whole units that would be admitted now."""
        return max(0, math.floor(self.capacity - self.used(now_s) + _ROUNDING))

    def wait_s(self, amount: float, now_s: float) -> float:
        """Seconds until `amount` fits: 0 if it does now, infinite if it never will."""
        if amount > self.capacity:
            return math.inf
        missing = self.used(now_s) + amount - self.capacity
        return missing / self.per_s if missing > _ROUNDING else 0.0

    def reset_s(self, now_s: float) -> float:
        """Seconds until the bucket is untouched again."""
        return self.used(now_s) / self.per_s

    def charge(self, amount: float, now_s: float) -> None:
        """Use `amount`, whether it fits or not. A negative amount is given back."""
        self._used = max(0.0, self.used(now_s) + amount)

    def raise_to(self, used: float, now_s: float) -> None:
        """At least so much is used."""
        self._used = max(self.used(now_s), used)

    def resize(self, per_minute: int, now_s: float) -> None:
        """Another capacity and rate from now on. What is used stays used."""
        self.used(now_s)
        self.capacity = per_minute
