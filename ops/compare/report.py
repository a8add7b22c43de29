"""A comparison as a document, and as text for people."""

from typing import Any

import msgspec

from headwater.ops.compare.answer import GreedyAnswer
from headwater.ops.compare.divergence import (
    Divergence,
    EngineSummary,
    Latency,
    LogprobGap,
    find_divergence,
    summarize,
)
from headwater.ops.process.text_table import table


class ComparedPrompt(msgspec.Struct, frozen=True):
    """One prompt: the divergence of its two answers, or None with each engine's error."""

    prompt: str
    tokens: tuple[int, int]
    divergence: Divergence | None
    errors: tuple[str, str]


class EngineComparison(msgspec.Struct, frozen=True):
    """All prompts. `equal_share` is of the prompts that both engines answered, None if there is none."""

    model: str
    engines: tuple[EngineSummary, EngineSummary]
    prompts: tuple[ComparedPrompt, ...]
    compared: int
    equal: int
    equal_share: float | None


def compare(model: str, names: list[str], pairs: list[tuple[GreedyAnswer, GreedyAnswer]]) -> EngineComparison:
    """The comparison of these pairs of answers, to the prompts of these names."""
    prompts = tuple(
        ComparedPrompt(
            name,
            (len(ours.tokens), len(theirs.tokens)),
            None if ours.error or theirs.error else find_divergence(ours.tokens, theirs.tokens),
            (ours.error, theirs.error),
        )
        for name, (ours, theirs) in zip(names, pairs, strict=True)
    )
    found = [one.divergence for one in prompts if one.divergence is not None]
    equal = sum(one.position is None for one in found)
    first, second = ([pair[at] for pair in pairs] for at in (0, 1))
    return EngineComparison(
        model,
        (summarize(first[0].engine, first), summarize(second[0].engine, second)),
        prompts,
        len(found),
        equal,
        equal / len(found) if found else None,
    )


def as_json(comparison: EngineComparison) -> str:
    """The document."""
    return msgspec.json.encode(comparison).decode()


def as_text(comparison: EngineComparison) -> str:
    """Latency of both engines, the share of equal answers, and a line for each prompt whose answers differ."""
    ours, theirs = (one.engine for one in comparison.engines)
    share = "" if comparison.equal_share is None else f" ({comparison.equal_share:.0%})"
    lines = [
        f"{comparison.model}: {comparison.compared} of {len(comparison.prompts)} prompts answered by both engines, "
        f"{comparison.equal} with equal tokens{share}",
        "",
        table(
            (
                "engine",
                "requests",
                "failed",
                "tokens",
                "first token p50 ms",
                "p99 ms",
                "total p50 ms",
                "p99 ms",
            ),
            [_engine_row(one) for one in comparison.engines],
        ),
    ]
    spread = [one.divergence.logprob_difference for one in comparison.prompts if one.divergence is not None]
    known = [one for one in spread if one is not None]
    if known:
        lines += ["", f"log probabilities of equal tokens differ by at most {max(known):.6f}"]
    differing = [
        (one.prompt, one.divergence)
        for one in comparison.prompts
        if one.divergence is not None and one.divergence.position is not None
    ]
    if differing:
        columns = ("prompt", "first differing token", ours, theirs, f"gap {ours}", f"gap {theirs}")
        lines += ["", table(columns, [_prompt_row(name, found) for name, found in differing])]
        lines += [
            "gap: by how much an engine prefers its own token to the other's, in nats; about 0 is rounding"
        ]
    lines += [
        f"{one.prompt}: {engine}: {error}"
        for one in comparison.prompts
        for engine, error in zip((ours, theirs), one.errors, strict=True)
        if error
    ]
    return "\n".join(lines)


def _engine_row(one: EngineSummary) -> tuple[Any, ...]:
    return (
        one.engine,
        one.requests,
        one.failed,
        one.tokens,
        *_times(one.first_token_ms),
        *_times(one.total_ms),
    )


def _times(latency: Latency | None) -> tuple[str, str]:
    return ("-", "-") if latency is None else (f"{latency.p50:.1f}", f"{latency.p99:.1f}")


def _prompt_row(name: str, found: Divergence) -> tuple[Any, ...]:
    return name, found.position, *map(_token, found.tokens), *map(_gap, found.gaps)


def _token(text: str | None) -> str:
    return "(ended)" if text is None else repr(text)


def _gap(gap: LogprobGap | None) -> str:
    return "-" if gap is None else f"{'> ' if gap.at_least else ''}{gap.value:.6f}"
