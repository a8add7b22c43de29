"""Where to cut a recording that is longer than a model hears at once: at the quietest places. Pure."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

SEARCH_S: Final = 3.0
"""The end of each piece, in which its cut is searched."""

QUIET_S: Final = 0.1
"""A cut is in the middle of the quietest time of this length."""


def cuts(samples: NDArray[np.float32], rate_hz: int, window_s: float) -> list[tuple[int, int]]:
    """First and last (exclusive) sample of each piece. None is longer than `window_s`, and they follow each other without a gap."""
    longest = int(window_s * rate_hz)
    search = min(int(SEARCH_S * rate_hz), longest // 2)
    quiet = min(int(QUIET_S * rate_hz), search)
    found: list[tuple[int, int]] = []
    begin = 0
    while len(samples) - begin > longest:
        end = begin + longest
        end = end - search + _quietest(samples[end - search : end], quiet)
        found.append((begin, end))
        begin = end
    found.append((begin, len(samples)))
    return found


def _quietest(samples: NDArray[np.float32], length: int) -> int:
    """The middle of the `length` samples with the least energy; of several equally quiet ones, the last."""
    energy = np.concatenate([[0.0], np.cumsum(np.square(samples, dtype=np.float64))])
    sums = energy[length:] - energy[:-length]
    return len(sums) - 1 - int(np.argmin(sums[::-1])) + length // 2
