"""The estimate of whether a request's images should be encoded apart: the time of both ways, from the measurements in the log.

With the images i of a request whose embeddings are needed, and the requests that run on the worker that serves it, in milliseconds:

    apart = max over i of (queue(i) + encode(i)) + sum over i of read(i)
    here  = h × (1 + DELAY_WEIGHT × requests) + arrivals / 1000 × (2 × queue + h) × h / 2, with h = sum over i of here(i)

The last term is the wait of requests that come later, as in `cost`, with the queue of that worker.
The router makes the estimate of each image, which its decision records; the edge and what-if compare the two.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple
from zlib import crc32

from headwater.router.estimates import EncodeTimes, image_ms
from headwater.router.load import Loads
from headwater.schemas.routing import Candidate, Decision, EncodeEstimate

DELAY_WEIGHT: Final = 0.5
"""What a millisecond of delay of a request that runs counts against a millisecond in which this one waits for its first token."""

MEASURED_EVERY: Final = 64
MEASURED_FACTOR: Final = 4.0
"""One of this many requests takes the way that is expected to be slower (unless by more than this factor), so that both ways stay measured."""

READS_MIN: Final = 8
"""The fewest measurements of reading an embedding; with fewer nothing is estimated: the first ones have connections to open."""

WAIT_FACTOR: Final = 3.0
WAIT_S_MIN: Final = 1.0
WAIT_S_MAX: Final = 20.0
WAIT_S_UNKNOWN: Final = 5.0
"""An embedding is awaited for this many times its estimate, between these bounds; without measurements for the last."""

NOT_APART: Final = -1
"""Tokens that may be ahead of an image which the serving worker encodes."""

ANY_AHEAD: Final = (1 << 53) - 1
"""The bound for an image that is encoded apart whatever is ahead of it. JSON has no larger exact integers."""


def estimate_encoding(loads: Loads, chosen: Candidate, tokens: int, reader: str) -> EncodeEstimate | None:
    """Estimate the encoding of an image with `tokens` tokens on the chosen encode worker, whose embedding `reader` reads; None without a `reader`.

    Where one side has not been measured, both are expected to take the same; with few measurements of reading, nothing is known yet.
    """
    if not reader:
        return None
    serving, encoder = loads.workers.get(reader), loads.workers.get(chosen.worker)
    apart = loads.encoding.get(encoder.engine if encoder is not None else "", EncodeTimes())
    serving_times = loads.encoding.get(serving.engine if serving is not None else "", EncodeTimes())
    if sum(serving_times.reads.counts) < READS_MIN:
        return EncodeEstimate(reader)
    here_ms = image_ms(serving_times.here, tokens)
    encode_ms = image_ms(apart.apart, tokens) or here_ms
    here_ms = here_ms or encode_ms
    token_ms = encode_ms / max(1, tokens)
    # An embedding is stored whole, so its first block stands for it; one that is only credited is being computed.
    if chosen.cached_blocks - chosen.assumed_blocks > 0:
        queue_tokens, encode_ms = 0, 0.0
    elif chosen.cached_blocks:
        queue_tokens, encode_ms = chosen.prefill_tokens, 0.0
    else:
        queue_tokens = chosen.prefill_tokens
    return EncodeEstimate(
        reader, queue_tokens * token_ms, encode_ms, token_ms, image_ms(serving_times.reads, tokens), here_ms
    )


class LegEstimate(NamedTuple):
    """What all images of a request take, in milliseconds, on both ways; 0 if that is not known.

    `ahead_max`: tokens of other images that may be ahead of each at its encode worker, `NOT_APART` if that is not to encode it.
    The embeddings are awaited for `wait_s` seconds.
    """

    apart_ms: float
    here_ms: float
    ahead_max: tuple[int, ...]
    wait_s: float

    @property
    def is_apart(self) -> bool:
        """Does any image go to an encode worker?"""
        return any(ahead != NOT_APART for ahead in self.ahead_max)

    def forced(self) -> "LegEstimate":
        """All images apart, whatever that takes, and longer awaited."""
        return self._replace(ahead_max=(ANY_AHEAD,) * len(self.ahead_max), wait_s=WAIT_S_MAX)


def weigh_encoding(
    request: str, tokens: Sequence[int], answers: Sequence[Decision], serving: Decision
) -> LegEstimate:
    """Compare both ways for the images of a request, of this many `tokens`, whose encode workers are named in `answers`, if a router chose them."""
    requests = serving.chosen.requests
    encodings = [answer.encoding for answer in answers]
    if not encodings or not all(estimate is not None and estimate.here_ms > 0 for estimate in encodings):
        # Both encode at the same pace, as far as is known: an image may wait for what it delays others here.
        local_load = sum(tokens) * (1 + DELAY_WEIGHT * requests)
        return LegEstimate(0.0, 0.0, tuple([int(local_load - count) for count in tokens]), WAIT_S_UNKNOWN)
    estimates = [estimate for estimate in encodings if estimate is not None]
    own_ms = sum(estimate.here_ms for estimate in estimates)
    later_ms = serving.weights.arrivals / 1000 * (2 * serving.chosen.queue_ms + own_ms) * own_ms / 2
    here_ms = own_ms * (1 + DELAY_WEIGHT * requests) + later_ms
    read_ms = sum(estimate.read_ms for estimate in estimates)
    apart_ms = max(estimate.queue_ms + estimate.encode_ms for estimate in estimates) + read_ms
    wait_s = min(max(WAIT_FACTOR * apart_ms / 1000, WAIT_S_MIN), WAIT_S_MAX)
    is_apart = apart_ms <= here_ms
    if _is_measured(request) and max(apart_ms, here_ms) <= MEASURED_FACTOR * min(apart_ms, here_ms):
        is_apart = not is_apart
    if not is_apart:
        return LegEstimate(apart_ms, here_ms, (NOT_APART,) * len(estimates), wait_s)
    ahead = [
        int(max(here_ms - read_ms - estimate.encode_ms, estimate.queue_ms) / estimate.token_ms)
        if estimate.token_ms
        else 0
        for estimate in estimates
    ]
    return LegEstimate(apart_ms, here_ms, tuple(ahead), wait_s)


def _is_measured(request: str) -> bool:
    return crc32(request.encode()) % MEASURED_EVERY == 0
