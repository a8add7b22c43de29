"""How long a worker takes for a prompt: learned from what engines measured, one sample after the other.

Prompts are sorted by length into classes, each twice as long as the one before. A class keeps the mean length and
time of its latest samples, and lengths between two classes are read off the straight line between them. So nothing is
assumed of an engine's chunks, kernels or attention, and a class that was never seen does not spoil the others.
"""

from bisect import bisect_left, bisect_right

import msgspec

SAMPLES_MIN = 16
CLASSES_MIN = 2
"""Before so much was seen nothing is predicted."""

MEMORY = 16
"""About so many samples of a class count."""

TRUST = 4
"""Of its first samples a class takes the quickest: what disturbs makes them longer."""

OUTLIER = 1.2
"""A later one that is more than so many times away from its class counts as so many times: prompts that were computed beside
others, and pauses, say little of the next one."""

FLOOR = 0.25
"""No prompt is quicker than this part of the shortest class."""


class StepModel(msgspec.Struct):
    """Classes by length: `kinds` in ascending order, mean `tokens` and `ms` of each, and `counts` of their samples."""

    kinds: list[int] = []
    tokens: list[float] = []
    ms: list[float] = []
    counts: list[int] = []
    samples: int = 0

    @property
    def learned(self) -> bool:
        """Is there enough to predict from?"""
        return self.samples >= SAMPLES_MIN and len(self.kinds) >= CLASSES_MIN

    def observe(self, tokens: int, ms: float) -> None:
        """A prompt part of so many tokens took so long. Samples without tokens or time say nothing."""
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
        """Milliseconds until the first token of a prompt with so many tokens to compute, alone on the worker.

        0 for no tokens. Call it once `learned`.
        """
        if tokens <= 0:
            return 0.0
        at = min(max(bisect_right(self.tokens, tokens), 1), len(self.tokens) - 1)
        x, y = self.tokens[at - 1], self.ms[at - 1]
        slope = max(0.0, (self.ms[at] - y) / (self.tokens[at] - x))
        # Before the first class the line may pass below zero; no prompt is that quick.
        return max(y + slope * (tokens - x), self.ms[0] * FLOOR)
