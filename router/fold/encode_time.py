"""How long images take: to be encoded by encode workers and by those that serve prompts, and to be read as embeddings. Learned from load reports.

Sizes are grouped into classes as those of pulls are (`pull_time`), for each engine.
"""

import msgspec

from headwater.router.fold.pull_time import PullModel, predict_pull_ms

LEAST_MS = 0.001
"""An image that took less than its prompt was expected to take counts as this."""

STALL_FACTOR = 4.0
"""A time counts as at most so many times the mean of its class: a stall moves that by 38 % at most, and of what has become ten times slower, two thirds are known by ten samples."""


class ImageTimes(PullModel):
    """Times of images by their tokens."""

    def observe(self, tokens: int, ms: float) -> None:
        """Add a sample. Those without tokens or time are ignored."""
        kind = tokens.bit_length()
        if kind in self.kinds:
            ms = min(ms, STALL_FACTOR * self.ms[self.kinds.index(kind)])
        super().observe(tokens, ms)


class EncodeTimes(msgspec.Struct):
    """Of one engine's workers, by tokens of an image: `apart` on encode workers, `here` with prompts, and `reads` of embeddings."""

    apart: ImageTimes = msgspec.field(default_factory=ImageTimes)
    here: ImageTimes = msgspec.field(default_factory=ImageTimes)
    reads: ImageTimes = msgspec.field(default_factory=ImageTimes)


def image_ms(model: ImageTimes, tokens: int) -> float:
    """Milliseconds that an image of so many tokens is expected to take; 0 without measurements."""
    classes = len(model.kinds)
    return predict_pull_ms(model.tokens, model.ms, classes, tokens, 0.0) if classes else 0.0
