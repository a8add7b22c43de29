"""How long images take: to be encoded by encode workers and by those that serve prompts, and to be read as embeddings. Learned from load reports.

Sizes are grouped into classes, each twice as large as the one before, for each engine, and sizes between two classes are interpolated.
"""

import msgspec

from headwater.router.fold.prefill_time import place_sample, predict_ms

MEMORY = 8
"""The effective number of samples in a class's mean."""

LEAST_MS = 0.001
"""An image that took less than its prompt was expected to take counts as this."""

STALL_FACTOR = 4.0
"""A time counts as at most so many times the mean of its class: a stall moves that by 38 % at most, and of what has become ten times slower, two thirds are known by ten samples."""


class ImageTimes(msgspec.Struct):
    """Classes of images by their tokens: `kinds` in ascending order, mean `tokens` and `ms` of each, and `counts` of their samples."""

    kinds: list[int] = []
    tokens: list[float] = []
    ms: list[float] = []
    counts: list[int] = []

    def observe(self, tokens: int, ms: float) -> None:
        """Add a sample. Those without tokens or time are ignored."""
        kind = tokens.bit_length()
        if kind in self.kinds:
            ms = min(ms, STALL_FACTOR * self.ms[self.kinds.index(kind)])
        if tokens <= 0 or ms <= 0:
            return
        at, _ = place_sample(self, tokens, ms)
        count = self.counts[at] = min(self.counts[at] + 1, MEMORY)
        self.tokens[at] += (tokens - self.tokens[at]) / count
        self.ms[at] += (ms - self.ms[at]) / count


class EncodeTimes(msgspec.Struct):
    """Of one engine's workers, by tokens of an image: `apart` on encode workers, `here` with prompts, and `reads` of embeddings."""

    apart: ImageTimes = msgspec.field(default_factory=ImageTimes)
    here: ImageTimes = msgspec.field(default_factory=ImageTimes)
    reads: ImageTimes = msgspec.field(default_factory=ImageTimes)


def image_ms(model: ImageTimes, tokens: int) -> float:
    """Milliseconds that an image of so many tokens is expected to take; 0 without measurements."""
    classes = len(model.kinds)
    if classes <= 1:
        return float(model.ms[0] * max(1.0, tokens / model.tokens[0])) if classes else 0.0
    return float(predict_ms(model.tokens, model.ms, classes, tokens))
