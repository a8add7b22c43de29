"""How long images take: to be encoded by encode workers and by those that serve prompts, and to be read as embeddings. Learned from load reports.

Sizes are grouped into classes as those of pulls are (`pull_time`), for each engine.
"""

import msgspec

from headwater.router.fold.pull_time import PullModel, predict_pull_ms

LEAST_MS = 0.001
"""An image that took less than its prompt was expected to take counts as this."""


class EncodeTimes(msgspec.Struct):
    """Of one engine's workers, by tokens of an image: `apart` on encode workers, `here` with prompts, and `reads` of embeddings."""

    apart: PullModel = msgspec.field(default_factory=PullModel)
    here: PullModel = msgspec.field(default_factory=PullModel)
    reads: PullModel = msgspec.field(default_factory=PullModel)


def image_ms(model: PullModel, tokens: int) -> float:
    """Milliseconds that an image of so many tokens is expected to take; 0 without measurements."""
    classes = len(model.kinds)
    return predict_pull_ms(model.tokens, model.ms, classes, tokens, 0.0) if classes else 0.0
