"""The rule by which a model's audio tokens are counted, found by measuring what an engine's own processor makes of some recordings."""

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from headwater.schemas.tables.card import AudioSupport
from headwater.schemas.tables.media_tokens import count_audio_tokens

F32 = NDArray[np.float32]

PROBES_S: Final = (0.1, 0.7531, 3.0, 12.3457)
"""Lengths that the rule has to give too, next to the longest."""


def fitting_audio_rule(
    count: Callable[[int], int], *, placeholder: int, limit: int, rate_hz: int, window_s: float, hop: int
) -> AudioSupport | None:
    """The rule that gives exactly what `count` does, None without one.

    `count` gives the tokens of so many samples, 0 if the model does not take them, -1 if there are other tokens than placeholders. A
    model hears `window_s` seconds at most and has a number of features every `hop` samples; each token stands for a number of these.
    """
    longest = int(window_s * rate_hz)
    most = count(longest)
    if most < 2:
        return None
    stride = hop * max(1, round(longest / (hop * most)))
    # The fewest samples with two tokens show how they are rounded.
    low, high = stride // 2, min(longest, 3 * stride)
    while high - low > 1:
        middle = (low + high) // 2
        if count(middle) >= 2:
            high = middle
        else:
            low = middle
    rule = AudioSupport(
        placeholder=placeholder,
        per_prompt=limit,
        rate_hz=rate_hz,
        samples_max=longest,
        stride=stride,
        offset=2 * stride - high,
    )
    lengths = (longest, *[int(seconds * rate_hz) for seconds in PROBES_S if seconds < window_s])
    return rule if all(count(samples) == _counted(rule, samples) for samples in lengths) else None


def learn_audio_rule(
    features: Any, expand: Callable[[F32], int], *, placeholder: int, limit: int
) -> AudioSupport | None:
    """The rule of a model with Hugging Face's feature extractor `features`; `expand` gives the placeholders of samples.

    `expand` raises `ValueError` for what is too short to be heard.
    """
    rate_hz = int(features.sampling_rate)

    def count(samples: int) -> int:
        try:
            return expand(np.zeros(samples, np.float32))
        except ValueError:
            return 0

    return fitting_audio_rule(
        count,
        placeholder=placeholder,
        limit=limit,
        rate_hz=rate_hz,
        window_s=float(features.chunk_length),
        hop=int(features.hop_length),
    )


def _counted(rule: AudioSupport, samples: int) -> int:
    try:
        return count_audio_tokens(rule, samples)
    except ValueError:
        return 0
