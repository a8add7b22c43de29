"""Estimates learned from the log: how long prefill, decode and encode take, and how long answers become.

The duration of a decode step is a line:

    step_ms(r, b) = base_ms + request_ms × r + block_ms × b, at least `FLOOR` of the mean step

with r the running requests and b the KV blocks in use. The coefficients are the weighted least squares over the worker's latest tokens;
neither slope is negative. A slope counts only as far as r or b have varied (ridge), so a worker that has always had the same
load is predicted by its mean. The time between two tokens contains prompts that were computed in between, so their delay is part of the line.

Prefill: prompts are grouped by length into classes, each twice as long as the one before. A class keeps the mean length and
time of its latest samples; lengths between two classes are interpolated linearly. So nothing is
assumed about an engine's chunks, kernels or attention, and a class without samples does not affect the others.

The classes are those of an engine, over all its workers. A worker has one number of its own, its pace: so a worker with few
samples is predicted by what its engine needs, and a slow one by how slow it is.

Images: their sizes are grouped into classes, each twice as large as the one before, for each engine, and sizes between two classes are interpolated.

Answer lengths: answers are grouped into classes by the octave of their limit (`max_tokens`), by that and the octave of their
prompt's length, and both once more for each tenant. A class keeps the mean share of the limit that its latest answers used, and
the mean of its square. An estimate begins with the coarsest class and continues with finer ones; each counts by the number of its
answers, so that a class with few of them adds little to the one before. Clients that always generate up to their limit are
predicted exactly, and no expectation exceeds the limit.
"""

import math
from bisect import bisect_left
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from headwater.schemas.jit import jitable

MEMORY_TOKENS: Final = 10_000
"""The effective number of tokens that the line is fitted to."""

SHARE_MAX: Final = 0.25
"""No sample counts for more than this share of the memory."""

DECODE_OUTLIER: Final = 4.0
"""Samples are clamped to this many times the mean: a pause does not predict the next step."""

RIDGE: Final = 0.0025
"""A slope is halved where the variance of its variable is this share of the mean squared: a deviation of 5 %."""

DECODE_FLOOR: Final = 0.25
"""No step is predicted faster than this fraction of the mean."""


class DecodeLine(NamedTuple):
    """The coefficients, in ms, ms per request and ms per block, and the least that a step takes."""

    base_ms: float
    request_ms: float
    block_ms: float
    least_ms: float


UNKNOWN: Final = DecodeLine(0.0, 0.0, 0.0, 0.0)
"""The line before the first sample."""


@jitable
def predict_step_ms(line: Any, requests: int, blocks: int) -> float:
    """Milliseconds of a decode step with this many running requests and KV blocks in use; 0 if nothing is known."""
    return float(max(line.least_ms, line.base_ms + line.request_ms * requests + line.block_ms * blocks))


class DecodeModel(msgspec.Struct):
    """Statistics of the samples' ms, requests and blocks: means, (co)variances (`request_var`, `both_cov`, …), and the `line` through them.

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
            ms = min(ms, DECODE_OUTLIER * self.ms)
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
        self.line = DecodeLine(base_ms, request_ms, block_ms, DECODE_FLOOR * self.ms)

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


# Prefill: how long a worker takes for a prompt, learned from the samples that engines report.

SAMPLES_MIN = 16
CLASSES_MIN = 2
"""The fewest classes; with fewer samples or classes nothing is predicted."""

PREFILLS_REMEMBERED = 16
"""The effective number of samples in a class's mean."""

TRUST = 4
"""The number of a class's first samples of which it takes the fastest: disturbances only make them longer."""

PREFILL_OUTLIER = 1.2
"""Later samples are clamped to within this factor of the mean: prompts that shared a step with others, and pauses, do not
predict the next one."""

OUTLIERS_MAX = 2
"""If more samples in a row are outliers on one side, the mean is wrong: each halves the number of samples that it counts for."""

PREFILL_FLOOR = 0.25
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
    return float(max(y + slope * (tokens - x), times[0] * PREFILL_FLOOR))


BLOCK_FROM, BLOCK_TO = 2_048, 8_192
"""Prompt lengths, in tokens, between which the marginal time of a block is measured."""


@jitable
def longer_ms(lengths: Any, times: Any, classes: int) -> float:
    """Return how much longer a prompt of `BLOCK_TO` tokens takes than one of `BLOCK_FROM`."""
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
    clamp, memory = PREFILL_OUTLIER, PACE_MEMORY
    if abs(outliers) > OUTLIERS_MAX:
        clamp, memory = NEW_PACE_OUTLIER, NEW_PACE_MEMORY
    return pace + (min(max(observed, pace / clamp), pace * clamp) - pace) / memory, outliers


def count_in_row(outliers: int, observed: float, expected: float) -> int:
    """Return how many samples in a row are above `expected` by more than `OUTLIER`, or below it (negative), after one more."""
    side = (observed > expected * PREFILL_OUTLIER) - (observed < expected / PREFILL_OUTLIER)
    return outliers + side if side * outliers > 0 else side


class LengthClasses(msgspec.Struct):
    """Classes by length: `kinds` in ascending order, mean `tokens` and `ms` of each, and `counts` of their samples."""

    kinds: list[int] = []
    tokens: list[float] = []
    ms: list[float] = []
    counts: list[int] = []

    def place(self, tokens: int, ms: float) -> tuple[int, bool]:
        """The index of the class of a length, and whether it is new: then it has this sample's values and counts none."""
        kind = tokens.bit_length()
        at = bisect_left(self.kinds, kind)
        if at < len(self.kinds) and self.kinds[at] == kind:
            return at, False
        self.kinds.insert(at, kind)
        self.tokens.insert(at, float(tokens))
        self.ms.insert(at, ms)
        self.counts.insert(at, 0)
        return at, True


class StepModel(LengthClasses):
    """The times of prompts.

    `outliers`: how many of a class's latest samples in a row were above the mean by more than `OUTLIER`; negative: below.
    """

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
        at, is_new = self.place(tokens, ms)
        if is_new:
            self.outliers.insert(at, 0)
        average_ms = self.ms[at]
        self._count_outlier(at, ms)
        count = self.counts[at] = min(self.counts[at] + 1, PREFILLS_REMEMBERED)
        self.tokens[at] += (tokens - self.tokens[at]) / count
        if count <= TRUST:
            self.ms[at] = min(average_ms, ms)
        else:
            self.ms[at] += (
                min(max(ms, average_ms / PREFILL_OUTLIER), average_ms * PREFILL_OUTLIER) - average_ms
            ) / count
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


# Images: how long encoding takes on encode workers and with prompts, and reading an embedding.

ENCODES_REMEMBERED = 8
"""The effective number of samples in a class's mean."""

LEAST_MS = 0.001
"""An image that took less than its prompt was expected to take counts as this."""

STALL_FACTOR = 4.0
"""A time counts as at most this many times the mean of its class: a stall moves that by 38 % at most, and of what has become ten times slower, two thirds are known by ten samples."""


class ImageTimes(LengthClasses):
    """The times of images."""

    def observe(self, tokens: int, ms: float) -> None:
        """Add a sample. Those without tokens or time are ignored."""
        kind = tokens.bit_length()
        if kind in self.kinds:
            ms = min(ms, STALL_FACTOR * self.ms[self.kinds.index(kind)])
        if tokens <= 0 or ms <= 0:
            return
        at, _ = self.place(tokens, ms)
        count = self.counts[at] = min(self.counts[at] + 1, ENCODES_REMEMBERED)
        self.tokens[at] += (tokens - self.tokens[at]) / count
        self.ms[at] += (ms - self.ms[at]) / count


class EncodeTimes(msgspec.Struct):
    """The times of one engine's workers, by tokens of an image: `apart` on encode workers, `here` with prompts, and `reads` of embeddings."""

    apart: ImageTimes = msgspec.field(default_factory=ImageTimes)
    here: ImageTimes = msgspec.field(default_factory=ImageTimes)
    reads: ImageTimes = msgspec.field(default_factory=ImageTimes)


def image_ms(model: ImageTimes, tokens: int) -> float:
    """Milliseconds that an image of this many tokens is expected to take; 0 without measurements."""
    classes = len(model.kinds)
    if classes <= 1:
        return float(model.ms[0] * max(1.0, tokens / model.tokens[0])) if classes else 0.0
    return float(predict_ms(model.tokens, model.ms, classes, tokens))


# Answer lengths: how many tokens an answer is expected to have.

LENGTHS_REMEMBERED: Final = 64
"""The effective number of answers in a mean."""

PRIOR: Final = 32
"""The coarser classes count for a finer one as this many answers of its own."""

UNKNOWN_TOKENS: Final = 256
"""The expected length until the first answer: the limit, or this if the limit is larger."""

OCTAVE_MAX: Final = 64
"""No limit or prompt has more bits."""

TENANTS_MAX: Final = 128
"""Tenants with classes of their own: beyond, that whose latest answer is the oldest is forgotten."""

TENANT_CLASSES_MAX: Final = 64
"""Classes of one tenant: beyond, that whose latest answer is the oldest is forgotten."""

ValueT = TypeVar("ValueT")


class OutputLength(NamedTuple):
    """Tokens that an answer is expected to have: their mean and standard deviation; 0 for the deviation: unknown, or none."""

    mean: int
    deviation: int


class AnswerClass(msgspec.Struct, array_like=True):
    """The mean of something of the latest answers, and that of its square, over `count` answers (at most `MEMORY`)."""

    count: int = 0
    mean: float = 0.0
    square: float = 0.0

    def observe(self, value: float) -> None:
        """One more answer."""
        self.count = min(self.count + 1, LENGTHS_REMEMBERED)
        self.mean += (value - self.mean) / self.count
        self.square += (value * value - self.square) / self.count


class OutputLengths(msgspec.Struct):
    """`shares` of the limit by class, those of each tenant in `tenants`, and the tokens of `all` answers, for limits of a new octave."""

    shares: dict[str, AnswerClass] = {}
    tenants: dict[str, dict[str, AnswerClass]] = {}
    all: AnswerClass = msgspec.field(default_factory=AnswerClass)

    def observe(self, max_tokens: int, tokens: int, prompt_tokens: int = 0, tenant: int = 0) -> None:
        """An answer of `tokens` tokens ended by itself or at its limit. 0 for the length of its prompt or its tenant: unknown, or none."""
        if max_tokens <= 0 or tokens < 0:
            return
        tokens = min(tokens, max_tokens)
        self.all.observe(tokens)
        kinds = _kinds(max_tokens, prompt_tokens)
        for kind in kinds:
            self.shares.setdefault(kind, AnswerClass()).observe(tokens / max_tokens)
        if tenant:
            tenant_classes = _latest(self.tenants, str(tenant), {}, TENANTS_MAX)
            for kind in kinds:
                _latest(tenant_classes, kind, AnswerClass(), TENANT_CLASSES_MAX).observe(tokens / max_tokens)

    def expect(self, max_tokens: int, prompt_tokens: int = 0, tenant: int = 0) -> OutputLength:
        """Return the expected length of an answer with this limit: at least 1 token, at most the limit."""
        if max_tokens <= 1:
            return OutputLength(max(0, max_tokens), 0)
        kinds = _kinds(max_tokens, prompt_tokens)
        coarsest = self.shares.get(kinds[0])
        if coarsest is None:
            overall = self.all if self.all.count else AnswerClass(0, UNKNOWN_TOKENS, UNKNOWN_TOKENS**2)
            return _within(max_tokens, overall.mean, overall.square, 1)
        mean, square = coarsest.mean, coarsest.square
        tenant_classes = self.tenants.get(str(tenant), {})
        finer = [self.shares.get(kind) for kind in kinds[1:]] + [tenant_classes.get(kind) for kind in kinds]
        for finer_class in finer:
            if finer_class is not None:
                weight = finer_class.count / (finer_class.count + PRIOR)
                mean += weight * (finer_class.mean - mean)
                square += weight * (finer_class.square - square)
        return _within(max_tokens, mean, square, max_tokens)


def _kinds(max_tokens: int, prompt_tokens: int) -> list[str]:
    """Names of an answer's classes, coarsest first: by its limit, and, if the prompt's length is known, by both lengths."""
    limits = str(min(max_tokens.bit_length(), OCTAVE_MAX))
    if prompt_tokens <= 0:
        return [limits]
    return [limits, f"{limits}/{min(prompt_tokens.bit_length(), OCTAVE_MAX)}"]


def _latest(latest: dict[str, ValueT], key: str, new: ValueT, most: int) -> ValueT:
    """The value of a key, which becomes the latest one; `new` if there was none, in place of the oldest if there are too many."""
    value = latest[key] = latest.pop(key, new)
    if len(latest) > most:
        del latest[next(iter(latest))]
    return value


def _within(max_tokens: int, mean: float, square: float, unit: int) -> OutputLength:
    deviation = math.sqrt(max(0.0, square - mean * mean))
    return OutputLength(min(max_tokens, max(1, round(mean * unit))), min(max_tokens, round(deviation * unit)))
