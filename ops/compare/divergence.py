"""Where and by how much two answers to one prompt diverge. Pure."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from headwater.ops.compare.answer import AnswerToken, GreedyAnswer


class LogprobGap(NamedTuple):
    """How much likelier an engine's own token was to it than the other engine's, in nats.

    `at_least`: the other's token was not among the likeliest ones that it listed, so the gap is at least this.
    """

    value: float
    at_least: bool = False


class Divergence(msgspec.Struct, frozen=True):
    """Two answers compared. `position` is the first token that differs, None where all are equal.

    There `tokens` are the two engines' (None where an answer has ended), and `gaps` each engine's preference for its own, None
    without log probabilities. `logprob_difference` is the greatest difference between the log probabilities of the
    equal tokens before, None without any.
    """

    equal_tokens: int
    position: int | None
    tokens: tuple[str | None, str | None]
    gaps: tuple[LogprobGap | None, LogprobGap | None]
    logprob_difference: float | None


def find_divergence(ours: Sequence[AnswerToken], theirs: Sequence[AnswerToken]) -> Divergence:
    """Compare two answers token by token."""
    pairs = list(zip(ours, theirs, strict=False))
    equal = next((at for at, (one, other) in enumerate(pairs) if one.id != other.id), len(pairs))
    differences = [
        abs(one.logprob - other.logprob)
        for one, other in pairs[:equal]
        if one.logprob is not None and other.logprob is not None
    ]
    difference = max(differences, default=None)
    if equal == len(ours) == len(theirs):
        return Divergence(equal, None, (None, None), (None, None), difference)
    one = ours[equal] if equal < len(ours) else None
    other = theirs[equal] if equal < len(theirs) else None
    return Divergence(
        equal, equal, (_show(one), _show(other)), (_gap(one, other), _gap(other, one)), difference
    )


def _show(token: AnswerToken | None) -> str | None:
    return None if token is None else token.text or f"#{token.id}"


def _gap(own: AnswerToken | None, other: AnswerToken | None) -> LogprobGap | None:
    """None where an answer has ended: the end is no token with a log probability here."""
    if own is None or other is None or own.logprob is None:
        return None
    known = own.top.get(other.text) if other.text else None
    if known is not None:
        return LogprobGap(own.logprob - known)
    return LogprobGap(max(0.0, own.logprob - min(own.top.values(), default=own.logprob)), at_least=True)


class Latency(msgspec.Struct, frozen=True):
    """Percentiles by nearest rank, in milliseconds."""

    p50: float
    p99: float


class EngineSummary(msgspec.Struct, frozen=True):
    """One engine over all prompts: until the first token, and until the last. None where no request succeeded."""

    engine: str
    requests: int
    failed: int
    tokens: int
    first_token_ms: Latency | None
    total_ms: Latency | None


def summarize(engine: str, answers: Sequence[GreedyAnswer]) -> EngineSummary:
    """An engine's answers in numbers; times are those of the answers without an error."""
    whole = [one for one in answers if not one.error]
    return EngineSummary(
        engine,
        len(answers),
        len(answers) - len(whole),
        sum(len(one.tokens) for one in whole),
        _latency([one.first_s for one in whole if one.tokens]),
        _latency([one.total_s for one in whole]),
    )


def _latency(seconds: Sequence[float]) -> Latency | None:
    if not seconds:
        return None
    ranked = sorted(seconds)

    def percentile(share: float) -> float:
        return round(ranked[max(1, math.ceil(share * len(ranked))) - 1] * 1_000.0, 3)

    return Latency(percentile(0.50), percentile(0.99))
