"""Output length model: how many tokens an answer is expected to have, learned from the answers of the pool's model.

Answers are grouped by their limit (`max_tokens`) into classes, each with limits twice as large as the one before. A class keeps the mean
share of the limit that its latest answers used. So clients that always generate up to their limit are predicted exactly, and no
expectation exceeds the limit.
"""

from typing import Final

import msgspec

MEMORY: Final = 64
"""The effective number of answers in a mean."""

UNKNOWN_TOKENS: Final = 256
"""Until the first answer: the limit, or this if the limit is larger."""

CLASSES_MAX: Final = 64
"""More classes than any limit has bits."""


class OutputLengths(msgspec.Struct):
    """`shares` of the limit by class, each of `counts` answers, and the `mean` tokens of all answers, for limits of a new class."""

    shares: list[float] = []
    counts: list[int] = []
    mean: float = 0.0
    count: int = 0

    def observe(self, max_tokens: int, tokens: int) -> None:
        """An answer of `tokens` tokens ended by itself or at its limit."""
        if max_tokens <= 0 or tokens < 0:
            return
        tokens = min(tokens, max_tokens)
        kind = _class_of(max_tokens)
        while len(self.shares) <= kind:
            self.shares.append(0.0)
            self.counts.append(0)
        self.counts[kind] = min(self.counts[kind] + 1, MEMORY)
        self.shares[kind] += (tokens / max_tokens - self.shares[kind]) / self.counts[kind]
        self.count = min(self.count + 1, MEMORY)
        self.mean += (tokens - self.mean) / self.count

    def expect(self, max_tokens: int) -> int:
        """Tokens of an answer with this limit: at least 1, at most the limit."""
        if max_tokens <= 1:
            return max(0, max_tokens)
        kind = _class_of(max_tokens)
        if kind < len(self.counts) and self.counts[kind]:
            expected = self.shares[kind] * max_tokens
        else:
            expected = self.mean if self.count else float(UNKNOWN_TOKENS)
        return min(max_tokens, max(1, round(expected)))


def _class_of(max_tokens: int) -> int:
    return min(max_tokens.bit_length(), CLASSES_MAX - 1)
