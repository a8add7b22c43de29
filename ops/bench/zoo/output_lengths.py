"""How far the expected output tokens are from the answers: `python -m headwater.ops.bench.zoo.output_lengths --seeds 4,5,6`.

Requests of synthetic traffic and of the public conversation trace are expected in their order, and each answer is learned `LAG` requests later, as answers
take a while. Every request has the limit `LIMIT`, so that it says nothing of the answer.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

import headwater.ops.bench
from headwater.ops.bench.zoo.traffic import CLASSES, generate
from headwater.ops.process.text_table import table
from headwater.ops.whatif.trace import read
from headwater.router.fold.output_length import OutputLengths
from headwater.schemas.hashing import tenant_digest

LIMIT: Final = 2_000
LAG: Final = 64
MIXED: Final = ("agents", "chat", "code", "documents", "single_turn")
"""Classes that share a pool, each with `TENANTS` tenants of its own."""

TENANTS: Final = 4
P90_DEVIATIONS: Final = 1.28
"""So many standard deviations above the mean is the 90th percentile of a normal distribution."""

TRACE: Final = Path(headwater.ops.bench.__path__[0]) / "data" / "conversation_trace.jsonl.gz"


class AnswerSample(NamedTuple):
    """One request: when, the tokens of its prompt and of its answer, and the name of its tenant."""

    at: float
    prompt_tokens: int
    tokens: int
    tenant: str = ""


class LengthErrors(NamedTuple):
    """Over `requests`, in tokens: the mean of the answers, and mean absolute errors of the best constant, and of what is expected by the limit, by limit and
    prompt, and with the tenant as well; the mean that is expected by all of them; and the share of answers up to the estimated 90th percentile."""

    requests: int
    mean: float
    constant: float
    by_limit: float
    by_prompt: float
    by_tenant: float
    expected: float
    within_p90: float


def measure(streams: Sequence[Sequence[AnswerSample]]) -> LengthErrors:
    """Of several streams, each learned from its beginning."""
    found = np.array([row for stream in streams for row in _expected(stream)], np.float64)
    was, by_limit, by_prompt, by_tenant, deviation = found.T

    def error(expected: NDArray[np.float64] | np.float64) -> float:
        return float(np.abs(expected - was).mean())

    return LengthErrors(
        len(found),
        float(was.mean()),
        error(np.median(was)),
        error(by_limit),
        error(by_prompt),
        error(by_tenant),
        float(by_tenant.mean()),
        float((was <= by_tenant + P90_DEVIATIONS * deviation).mean()),
    )


def _expected(stream: Sequence[AnswerSample]) -> Iterator[tuple[int, int, int, int, int]]:
    """(tokens, expected by limit, by prompt too, by tenant too, its standard deviation) of each request."""
    lengths = OutputLengths()
    digests = {one.tenant: tenant_digest(one.tenant) for one in stream}
    for number, one in enumerate(stream):
        if number >= LAG:
            ended = stream[number - LAG]
            lengths.observe(LIMIT, ended.tokens, ended.prompt_tokens, digests[ended.tenant])
        whole = lengths.expect(LIMIT, one.prompt_tokens, digests[one.tenant])
        coarse = lengths.expect(LIMIT).mean, lengths.expect(LIMIT, one.prompt_tokens).mean
        yield min(one.tokens, LIMIT), *coarse, *whole


def traffic(name: str, count: int, seed: int) -> list[AnswerSample]:
    """Requests of one class, or `mixed`, or of the trace."""
    if name == "conversation trace":
        return [
            AnswerSample(one.arrival_ns, one.prompt_tokens, one.output_tokens) for one in read(TRACE).requests
        ]
    if name == "mixed, without tenants":
        return [one._replace(tenant="") for one in traffic("mixed", count, seed)]
    if name != "mixed":
        return [
            AnswerSample(one.at, one.prompt_tokens, one.output_tokens, one.tenant)
            for one in generate(name, count, seed)
        ]
    return sorted(
        one._replace(tenant=f"{part} {number % TENANTS}")
        for part in MIXED
        for number, one in enumerate(traffic(part, count // len(MIXED), seed))
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table."""
    options = argparse.ArgumentParser(description="How far the expected output tokens are from the answers.")
    options.add_argument("--seeds", default="1", help="seeds of the synthetic traffic, as 4,5,6")
    options.add_argument("--requests", type=int, default=5_000, help="of each class and seed (default 5,000)")
    given = options.parse_args(arguments)
    seeds = [int(one) for one in given.seeds.split(",")]
    rows = []
    for name in ("mixed", "mixed, without tenants", *CLASSES, "conversation trace"):
        found = measure(
            [
                traffic(name, given.requests, seed)
                for seed in (seeds[:1] if name == "conversation trace" else seeds)
            ]
        )
        rows.append(
            (name, f"{found.requests:,}", *(f"{value:,.1f}" for value in found[1:-1]), f"{found[-1]:.1%}")
        )
    print(f"seeds {given.seeds}; max_tokens {LIMIT:,}; errors are mean absolute errors in tokens")
    print(
        table(
            (
                "traffic",
                "requests",
                "mean was",
                "constant",
                "by limit",
                "and prompt",
                "and tenant",
                "mean expected",
                "up to p90",
            ),
            rows,
        )
    )


if __name__ == "__main__":
    main()
