"""A cache hit rate that fell: since when, by how much more than it varies, on which worker, and whether the router expected it."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from math import sqrt
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headwater.ops.history.requests import Request
from headwater.ops.history.series import hit_rate

LEAST_REQUESTS: Final = 20
"""Fewer requests say nothing of a rate."""

HITS_LOST: Final = 0.15
"""The share of prompt tokens that must be lost."""

ERRORS: Final = 4.0
"""By how many standard errors the rate must have fallen: where it began to fall is chosen among all requests, so two are not enough."""

OF_ONE_WORKER: Final = 0.6
OVER_ITS_PART: Final = 1.25
"""The part of the loss that points to one worker, also compared with its part of the requests: who gets most has most of any loss."""

UNEXPECTED: Final = 0.1
"""The router expected more hits than engines found, by this share of the prompt tokens."""


class Fallen(NamedTuple):
    """Hit rates before and after `first`, the request with which it fell, and what the router `expected` since (None: unknown).

    `worker` has most of the loss, "" if several have.
    """

    before: float
    now: float
    expected: float | None
    first: Request
    worker: str


def fallen_hits(recent: Sequence[Request], before: Sequence[Request]) -> Fallen | None:
    """Compares the latest requests, in order, with those before them. None if the rate did not fall, or no more than it varies.

    Rates are shares of all tokens. Whether one fell is judged by the mean of the requests' own shares: a few very long prompts move
    the former, and say nothing.
    """
    recent, before = _known(recent), _known(before)
    rate = hit_rate(before)
    if rate is None or min(len(recent), len(before)) < LEAST_REQUESTS:
        return None
    shares = _shares(before)
    usual = float(shares.mean())
    since = _since(recent, usual)
    now, shares_now = hit_rate(since), _shares(since)
    if now is None or rate - now < HITS_LOST:
        return None
    # Of a few requests, all of which happen to miss, the variance would say that they cannot hit.
    variance = max(shares.var(), shares_now.var())
    error = sqrt(variance / len(shares) + variance / len(shares_now))
    if usual - shares_now.mean() < max(HITS_LOST, ERRORS * error):
        return None
    return Fallen(rate, now, _expected(since), since[0], _worker(since, usual))


def _known(rows: Sequence[Request]) -> list[Request]:
    return [row for row in rows if row.found_tokens >= 0 and row.prompt_tokens]


def _share(row: Request) -> float:
    return row.found_tokens / row.prompt_tokens


def _shares(rows: Sequence[Request]) -> NDArray[np.float64]:
    return np.array([row.found_tokens / row.prompt_tokens for row in rows])


def _since(rows: list[Request], usual: float) -> list[Request]:
    """The latest requests, so many that they lost the most by the usual share, and enough to say something."""
    lost, most, start = 0.0, 0.0, len(rows) - LEAST_REQUESTS
    for at in range(len(rows) - 1, -1, -1):
        # Small losses are none: with them a fall would seem to begin long before.
        lost += usual - HITS_LOST / 2 - _share(rows[at])
        if at <= len(rows) - LEAST_REQUESTS and lost > most:
            most, start = lost, at
    return rows[start:]


def _expected(rows: list[Request]) -> float | None:
    known = [row for row in rows if row.expected_tokens >= 0]
    total = sum(row.prompt_tokens for row in known)
    return sum(row.expected_tokens for row in known) / total if total else None


def _worker(rows: list[Request], usual: float) -> str:
    """The worker that has most of the loss, and more of it than of the requests."""
    lost: defaultdict[str, float] = defaultdict(float)
    counts: Counter[str] = Counter()
    for row in rows:
        names = [name for time_ns, name in row.workers if time_ns <= row.started_ns]
        if names:
            lost[names[-1]] += usual - _share(row)
            counts[names[-1]] += 1
    if len(lost) < 2:
        return ""
    worst = max(lost, key=lambda name: lost[name])
    share = lost[worst] / sum(max(0.0, one) for one in lost.values())
    return worst if share > max(OF_ONE_WORKER, OVER_ITS_PART * counts[worst] / len(rows)) else ""
