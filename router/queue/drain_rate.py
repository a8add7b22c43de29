"""Drain rate of a queue: tokens served per second of time in which the queue was not empty, recently. Pure, no clock."""

from math import exp
from typing import Final

MEMORY_S: Final = 10.0
"""Time constant: what happened this long ago has 1/e of the weight of what happens now."""

KNOWN_AFTER_S: Final = 1.0
"""With less observed time the rate is unknown: one served query would be extrapolated to any rate."""


class DrainRate:
    """Tokens and seconds decay at the same rate, so their ratio is the recent rate. `now_s` must not go back."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._at_s = 0.0

    def advance(self, now_s: float, *, waiting: bool) -> None:
        """Time has passed, during which the queue was not empty (`waiting`) or was."""
        passed_s = max(0.0, now_s - self._at_s)
        decay = exp(-passed_s / MEMORY_S)
        self._tokens *= decay
        # The integral of the decaying weight. While the queue is empty both sums only decay, until the rate is unknown.
        self._seconds = self._seconds * decay + (MEMORY_S * (1.0 - decay) if waiting else 0.0)
        self._at_s = max(now_s, self._at_s)

    def count_served(self, tokens: int) -> None:
        """Count tokens of a query that left the queue for a worker."""
        self._tokens += tokens

    @property
    def tokens_s(self) -> float:
        """Tokens per second; 0.0 while unknown."""
        return self._tokens / self._seconds if self._seconds >= KNOWN_AFTER_S else 0.0
