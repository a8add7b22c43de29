"""Output length model: how many tokens an answer is expected to have, learned from the answers of the pool's model.

Answers are grouped into classes by the octave of their limit (`max_tokens`), by that and the octave of their prompt's length, and
both once more for each tenant. A class keeps the mean share of the limit that its latest answers used, and the mean of its square. An estimate begins with the
coarsest class and continues with finer ones; each counts by the number of its answers, so that a class with few of them adds little to the one
before. Clients that always generate up to their limit are predicted exactly, and no expectation exceeds the limit.
"""

import math
from typing import Final, NamedTuple, TypeVar

import msgspec

MEMORY: Final = 64
"""The effective number of answers in a mean."""

PRIOR: Final = 32
"""The coarser classes count for a finer one as so many answers of its own."""

UNKNOWN_TOKENS: Final = 256
"""Until the first answer: the limit, or this if the limit is larger."""

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
        self.count = min(self.count + 1, MEMORY)
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
            own = _latest(self.tenants, str(tenant), {}, TENANTS_MAX)
            for kind in kinds:
                _latest(own, kind, AnswerClass(), TENANT_CLASSES_MAX).observe(tokens / max_tokens)

    def expect(self, max_tokens: int, prompt_tokens: int = 0, tenant: int = 0) -> OutputLength:
        """Of an answer with this limit: at least 1 token, at most the limit."""
        if max_tokens <= 1:
            return OutputLength(max(0, max_tokens), 0)
        kinds = _kinds(max_tokens, prompt_tokens)
        coarsest = self.shares.get(kinds[0])
        if coarsest is None:
            found = self.all if self.all.count else AnswerClass(0, UNKNOWN_TOKENS, UNKNOWN_TOKENS**2)
            return _within(max_tokens, found.mean, found.square, 1)
        mean, square = coarsest.mean, coarsest.square
        own = self.tenants.get(str(tenant), {})
        finer = [self.shares.get(kind) for kind in kinds[1:]] + [own.get(kind) for kind in kinds]
        for one in finer:
            if one is not None:
                weight = one.count / (one.count + PRIOR)
                mean += weight * (one.mean - mean)
                square += weight * (one.square - square)
        return _within(max_tokens, mean, square, max_tokens)


def _kinds(max_tokens: int, prompt_tokens: int) -> list[str]:
    """Names of an answer's classes, coarsest first: by its limit, and, if the prompt's length is known, by both lengths."""
    limits = str(min(max_tokens.bit_length(), OCTAVE_MAX))
    if prompt_tokens <= 0:
        return [limits]
    return [limits, f"{limits}/{min(prompt_tokens.bit_length(), OCTAVE_MAX)}"]


def _latest(found: dict[str, ValueT], key: str, new: ValueT, most: int) -> ValueT:
    """The value of a key, which becomes the latest one; `new` if there was none, in place of the oldest if there are too many."""
    value = found[key] = found.pop(key, new)
    if len(found) > most:
        del found[next(iter(found))]
    return value


def _within(max_tokens: int, mean: float, square: float, unit: int) -> OutputLength:
    deviation = math.sqrt(max(0.0, square - mean * mean))
    return OutputLength(min(max_tokens, max(1, round(mean * unit))), min(max_tokens, round(deviation * unit)))
