"""Decode time model: how long a decode step of one worker takes, learned online from its load reports.

    step_ms(r, b) = base_ms + request_ms × r + block_ms × b, at least `FLOOR` of the mean step

with r the running requests and b the KV blocks in use. The coefficients are the weighted least squares over the worker's latest tokens;
neither slope is negative. A slope counts only as far as r or b have varied (ridge), so a worker that has always had the same
load is predicted by its mean. The time between two tokens contains prompts that were computed in between, so their delay is part of the line.
"""

from typing import Any, Final, NamedTuple

import msgspec

from headwater.schemas.jit import jitable

MEMORY_TOKENS: Final = 10_000
"""The effective number of tokens that the line is fitted to."""

SHARE_MAX: Final = 0.25
"""No sample counts for more than this share of the memory."""

OUTLIER: Final = 4.0
"""Samples are clamped to this many times the mean: a pause does not predict the next step."""

RIDGE: Final = 0.0025
"""A slope is halved where the variance of its variable is this share of the mean squared: a deviation of 5 %."""

FLOOR: Final = 0.25
"""No step is predicted faster than this fraction of the mean."""


class DecodeLine(NamedTuple):
    """The coefficients, in ms, ms per request and ms per block, and the least that a step takes."""

    base_ms: float
    request_ms: float
    block_ms: float
    least_ms: float


UNKNOWN: Final = DecodeLine(0.0, 0.0, 0.0, 0.0)
"""Before the first sample."""


@jitable
def predict_step_ms(line: Any, requests: int, blocks: int) -> float:
    """Milliseconds of a decode step with so many running requests and KV blocks in use; 0 if nothing is known."""
    return float(max(line.least_ms, line.base_ms + line.request_ms * requests + line.block_ms * blocks))


class DecodeModel(msgspec.Struct):
    """Of the samples' ms, requests and blocks: the means, the (co)variances (`request_var`, `both_cov`, …), and the `line` through them.

    `tokens` is the samples' weight so far, at most `MEMORY_TOKENS`.
    """

    tokens: float = 0.0
    ms: float = 0.0
    requests: float = 0.0
    blocks: float = 0.0
    request_var: float = 0.0
    block_var: float = 0.0
    both_cov: float = 0.0
    request_cov: float = 0.0
    block_cov: float = 0.0
    line: DecodeLine = UNKNOWN

    def observe(self, ms: float, requests: float, blocks: float, tokens: int) -> None:
        """Add a sample: the mean time between `tokens` pairs of tokens. Samples without tokens or time are ignored."""
        if ms <= 0 or tokens <= 0:
            return
        weight = min(float(tokens), SHARE_MAX * MEMORY_TOKENS)
        if self.tokens:
            ms = min(ms, OUTLIER * self.ms)
        self.tokens = min(self.tokens + weight, MEMORY_TOKENS)
        share = weight / self.tokens
        by_ms, by_requests, by_blocks = ms - self.ms, requests - self.requests, blocks - self.blocks
        self.ms += share * by_ms
        self.requests += share * by_requests
        self.blocks += share * by_blocks
        rest = 1.0 - share
        self.request_var = rest * (self.request_var + share * by_requests * by_requests)
        self.block_var = rest * (self.block_var + share * by_blocks * by_blocks)
        self.both_cov = rest * (self.both_cov + share * by_requests * by_blocks)
        self.request_cov = rest * (self.request_cov + share * by_requests * by_ms)
        self.block_cov = rest * (self.block_cov + share * by_blocks * by_ms)
        request_ms, block_ms = self._slopes()
        base_ms = self.ms - request_ms * self.requests - block_ms * self.blocks
        self.line = DecodeLine(base_ms, request_ms, block_ms, FLOOR * self.ms)

    def _slopes(self) -> tuple[float, float]:
        """Ms per request and per block: both where neither is negative, else the one that explains more."""
        request_var = self.request_var + RIDGE * self.requests * self.requests
        block_var = self.block_var + RIDGE * self.blocks * self.blocks
        both = request_var * block_var - self.both_cov * self.both_cov
        if both > 0:
            request_ms = (self.request_cov * block_var - self.block_cov * self.both_cov) / both
            block_ms = (self.block_cov * request_var - self.request_cov * self.both_cov) / both
            if request_ms >= 0 and block_ms >= 0:
                return request_ms, block_ms
        request_ms = max(0.0, self.request_cov / request_var) if request_var else 0.0
        block_ms = max(0.0, self.block_cov / block_var) if block_var else 0.0
        if request_ms * self.request_cov >= block_ms * self.block_cov:
            return request_ms, 0.0
        return 0.0, block_ms
