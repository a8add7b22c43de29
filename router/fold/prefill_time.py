"""Prefill time model: how long a worker takes for a prompt, learned from the samples that engines report.

Prompts are grouped by length into classes, each twice as long as the one before. A class keeps the mean length and
time of its latest samples; lengths between two classes are interpolated linearly. So nothing is
assumed about an engine's chunks, kernels or attention, and a class without samples does not affect the others.

The classes are those of an engine, over all its workers. A worker has one number of its own, its pace: so a worker with few
samples is predicted by what its engine needs, and a slow one by how slow it is.
"""

from bisect import bisect_left
from typing import Any, Protocol

import msgspec

from headwater.schemas.jit import jitable

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

OUTLIERS_MAX = 2
"""If more samples in a row are outliers on one side, the mean is wrong: each halves the number of samples that it counts for."""

FLOOR = 0.25
"""No prompt is predicted faster than this fraction of the shortest class."""


CLASSES_MAX = 64
"""More classes than any length has bits."""


@jitable
def predict_ms(lengths: Any, times: Any, classes: int, tokens: float) -> float:
    """Milliseconds for a prompt of `tokens` tokens, from the mean lengths and times of at least two classes."""
    if tokens <= 0:
        return 0.0
    above = 0
    while above < classes and lengths[above] <= tokens:
        above += 1
    at = min(max(above, 1), classes - 1)
    x, y = lengths[at - 1], times[at - 1]
    slope = max(0.0, (times[at] - y) / (lengths[at] - x))
    # Before the first class the line may fall below zero; no prompt is that fast.
    return float(max(y + slope * (tokens - x), times[0] * FLOOR))


BLOCK_FROM, BLOCK_TO = 2_048, 8_192
"""Prompt lengths, in tokens, between which the marginal time of a block is measured."""


@jitable
def longer_ms(lengths: Any, times: Any, classes: int) -> float:
    """How much longer a prompt of `BLOCK_TO` tokens takes than one of `BLOCK_FROM`."""
    return predict_ms(lengths, times, classes, BLOCK_TO) - predict_ms(lengths, times, classes, BLOCK_FROM)


PACE_MEMORY = 32
"""The effective number of samples in a worker's pace."""

NEW_PACE_MEMORY = 4
NEW_PACE_OUTLIER = 2.0
"""The same, and the clamp, once more than `OUTLIERS_MAX` samples in a row are outliers on one side: a worker that turned four times slower is known by
ten samples instead of 220."""


def learn_pace(pace: float, observed: float, outliers: int) -> tuple[float, int]:
    """A worker's pace after one more sample, which took `observed` times what the engine's step times predict.

    `outliers` in a row, negative where they were faster, came before; their number now is returned as well.
    """
    outliers = count_in_row(outliers, observed, pace)
    clamp, memory = OUTLIER, PACE_MEMORY
    if abs(outliers) > OUTLIERS_MAX:
        clamp, memory = NEW_PACE_OUTLIER, NEW_PACE_MEMORY
    return pace + (min(max(observed, pace / clamp), pace * clamp) - pace) / memory, outliers


def count_in_row(outliers: int, observed: float, expected: float) -> int:
    """How many samples in a row are above `expected` by more than `OUTLIER`, or below it (negative), after one more."""
    side = (observed > expected * OUTLIER) - (observed < expected / OUTLIER)
    return outliers + side if side * outliers > 0 else side


class LengthClasses(Protocol):
    """Classes by length, in ascending order of `kinds`: mean `tokens` and `ms` of each, and `counts` of their samples."""

    kinds: list[int]
    tokens: list[float]
    ms: list[float]
    counts: list[int]


def place_sample(model: LengthClasses, tokens: int, ms: float) -> tuple[int, bool]:
    """The index of the class of a length, and whether it is new: then it has this sample's values and counts none."""
    kind = tokens.bit_length()
    at = bisect_left(model.kinds, kind)
    if at < len(model.kinds) and model.kinds[at] == kind:
        return at, False
    model.kinds.insert(at, kind)
    model.tokens.insert(at, float(tokens))
    model.ms.insert(at, ms)
    model.counts.insert(at, 0)
    return at, True


class StepModel(msgspec.Struct):
    """Classes by length: `kinds` in ascending order, mean `tokens` and `ms` of each, and `counts` of their samples.

    `outliers`: how many of a class's latest samples in a row were above the mean by more than `OUTLIER`; negative: below.
    """

    kinds: list[int] = []
    tokens: list[float] = []
    ms: list[float] = []
    counts: list[int] = []
    samples: int = 0
    outliers: list[int] = []

    @property
    def learned(self) -> bool:
        """Are there enough samples to predict?"""
        return self.samples >= SAMPLES_MIN and len(self.kinds) >= CLASSES_MIN

    def observe(self, tokens: int, ms: float) -> None:
        """Add a sample: a prompt part of `tokens` tokens took `ms`. Samples without tokens or time are ignored."""
        if tokens <= 0 or ms <= 0:
            return
        at, is_new = place_sample(self, tokens, ms)
        if is_new:
            self.outliers.insert(at, 0)
        known = self.ms[at]
        self._count_outlier(at, ms)
        count = self.counts[at] = min(self.counts[at] + 1, MEMORY)
        self.tokens[at] += (tokens - self.tokens[at]) / count
        if count <= TRUST:
            self.ms[at] = min(known, ms)
        else:
            self.ms[at] += (min(max(ms, known / OUTLIER), known * OUTLIER) - known) / count
        self.samples += 1

    def _count_outlier(self, at: int, ms: float) -> None:
        """Forget samples of a class whose latest ones all contradict them."""
        if self.counts[at] < TRUST:
            return
        self.outliers[at] = count_in_row(self.outliers[at], ms, self.ms[at])
        if abs(self.outliers[at]) > OUTLIERS_MAX:
            self.counts[at] = max(TRUST, self.counts[at] // 2)

    def predict(self, tokens: float) -> float:
        """Milliseconds to the first token of a prompt with `tokens` uncached tokens, alone on the worker.

        0 for no tokens. Call only once `learned`.
        """
        return predict_ms(self.tokens, self.ms, len(self.kinds), tokens)
