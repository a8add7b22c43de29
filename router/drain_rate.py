"""How fast a queue drains: tokens served per second of time in which anything waited, lately. Pure, no clock."""

from math import exp
from typing import Final

MEMORY_S: Final = 10.0
"""What happened this long ago counts for a third of what happens now."""

KNOWN_AFTER_S: Final = 1.0
"""Less waiting than this tells nothing: the first to be served would be extrapolated to any rate."""


class DrainRate:
    """Both sums fade at the same pace, so their ratio is the rate of late. `now_s` must not go back."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._at_s = 0.0

    def advance(self, now_s: float, *, waiting: bool) -> None:
        """Time has passed, in which something waited or nothing did."""
        passed_s = max(0.0, now_s - self._at_s)
        kept = exp(-passed_s / MEMORY_S)
        self._tokens *= kept
        # The integral of what fades meanwhile. While nothing waits both only fade, until nothing is known any more.
        self._seconds = self._seconds * kept + (MEMORY_S * (1.0 - kept) if waiting else 0.0)
        self._at_s = max(now_s, self._at_s)

    def served(self, tokens: int) -> None:
        """So much has left the queue to be served."""
        self._tokens += tokens

    @property
    def tokens_s(self) -> float:
        """Tokens a second, 0.0 while nothing is known."""
        return self._tokens / self._seconds if self._seconds >= KNOWN_AFTER_S else 0.0
