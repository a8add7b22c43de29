"""Pull time model: how long workers of an engine take to get blocks of a prefix from another worker, learned from their reports.

As for prefill times, lengths are grouped into classes, each twice as long as the one before, and lengths between two classes are interpolated. But no
sample is an outlier here: a congested link makes the next pulls slower too.
"""

from typing import Any

import msgspec

from headwater.router.fold.prefill_time import place_sample, predict_ms
from headwater.schemas.jit import jitable

MEMORY = 8
"""The effective number of samples in a class's mean."""

PRIOR = 0.25
"""Until pulls have been measured, one is expected to take this share of the time that it saves: so that some are."""


@jitable
def predict_pull_ms(lengths: Any, times: Any, classes: int, tokens: float, saved_ms: float) -> float:
    """Milliseconds to pull `tokens` tokens, by the first `classes` of a model; `saved_ms` is what computing them would take."""
    if classes == 0:
        return PRIOR * saved_ms
    if classes == 1:
        return float(times[0] * max(1.0, tokens / lengths[0]))
    return predict_ms(lengths, times, classes, tokens)


class PullModel(msgspec.Struct):
    """Classes by length: `kinds` in ascending order, mean `tokens` and `ms` of each, and `counts` of their samples."""

    kinds: list[int] = []
    tokens: list[float] = []
    ms: list[float] = []
    counts: list[int] = []

    def observe(self, tokens: int, ms: float) -> None:
        """Add a sample. Those without tokens or time are ignored."""
        if tokens <= 0 or ms <= 0:
            return
        at, _ = place_sample(self, tokens, ms)
        count = self.counts[at] = min(self.counts[at] + 1, MEMORY)
        self.tokens[at] += (tokens - self.tokens[at]) / count
        self.ms[at] += (ms - self.ms[at]) / count
