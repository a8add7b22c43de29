"""Prefill time model: how long a worker takes for a prompt, learned from the samples that engines report.

Prompts are grouped by length into classes, each twice as long as the one before. A class keeps the mean length and
time of its latest samples; lengths between two classes are interpolated linearly. So nothing is
assumed about an engine's chunks, kernels or attention, and a class without samples does not affect the others.
"""

from bisect import bisect_left, bisect_right

import msgspec

SAMPLES_MIN = 16
CLASSES_MIN = 2
"""With fewer samples or classes nothing is predicted."""

MEMORY = 16
"""The effective number of samples in a class's mean."""

TRUST = 4
"""Of its first samples a class takes the fastest: disturbances only make them longer."""

OUTLIER = 1.2
"""Later samples are clamped to within this factor of the mean: prompts that shared a step with others, and pauses, do not
predict the next one."""

FLOOR = 0.25
"""No prompt is predicted faster than this fraction of the shortest class."""


class StepModel(msgspec.Struct):
    """Classes by length: `kinds` in ascending order, mean `tokens` and `ms` of each, and `counts` of their samples."""

    kinds: list[int] = []
    tokens: list[float] = []
    ms: list[float] = []
    counts: list[int] = []
    samples: int = 0

    @property
    def learned(self) -> bool:
        """Are there enough samples to predict?"""
        return self.samples >= SAMPLES_MIN and len(self.kinds) >= CLASSES_MIN

    def observe(self, tokens: int, ms: float) -> None:
        """Add a sample: a prompt part of `tokens` tokens took `ms`. Samples without tokens or time are ignored."""
        if tokens <= 0 or ms <= 0:
            return
        kind = tokens.bit_length()
        at = bisect_left(self.kinds, kind)
        if at == len(self.kinds) or self.kinds[at] != kind:
            self.kinds.insert(at, kind)
            self.tokens.insert(at, float(tokens))
            self.ms.insert(at, ms)
            self.counts.insert(at, 0)
        known = self.ms[at]
        count = self.counts[at] = min(self.counts[at] + 1, MEMORY)
        self.tokens[at] += (tokens - self.tokens[at]) / count
        if count <= TRUST:
            self.ms[at] = min(known, ms)
        else:
            self.ms[at] += (min(max(ms, known / OUTLIER), known * OUTLIER) - known) / count
        self.samples += 1

    def predict(self, tokens: float) -> float:
        """Milliseconds to the first token of a prompt with `tokens` uncached tokens, alone on the worker.

        0 for no tokens. Call only once `learned`.
        """
        if tokens <= 0:
            return 0.0
        at = min(max(bisect_right(self.tokens, tokens), 1), len(self.tokens) - 1)
        x, y = self.tokens[at - 1], self.ms[at - 1]
        slope = max(0.0, (self.ms[at] - y) / (self.tokens[at] - x))
        # Before the first class the line may fall below zero; no prompt is that fast.
        return max(y + slope * (tokens - x), self.ms[0] * FLOOR)
