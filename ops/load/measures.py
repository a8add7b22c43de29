"""The figures of a run, defined as `vllm bench serve` and aiperf define them; docs/guides/benchmarking.md has the definitions."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from headwater.ops.load.generator import LoadRun, OwnLag, Pace, Sample

CPU_SHARE_MAX: Final = 0.9
"""Share of a core above which a generator is too busy to measure others."""

LAG_MS_MIN: Final = 5.0
LAG_SHARE_MAX: Final = 0.1
"""A generator's lag counts from so many milliseconds and this share of the time to first token on."""


class Distribution(msgspec.Struct, frozen=True):
    """A measure over requests or gaps."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float


class Goodput(msgspec.Struct, frozen=True):
    """What is within all limits: requests, their share of all that were sent, failed ones included, requests and tokens per second.

    `missed` has the number of successful requests beyond each limit.
    """

    limits_ms: dict[str, float]
    requests: int
    share: float
    requests_per_s: float
    output_tokens_per_s: float
    missed: dict[str, int]


class GeneratorReport(msgspec.Struct, frozen=True):
    """How late the generator was. `send_p99_ms` is the lag of requests behind their due time, without the time they were held because as many
    as allowed were in flight (`held_p99_ms`). `limits` says why the run measures the generator and not the server; empty if it does not.
    """

    cpu_share: float
    loop_p99_ms: float
    loop_max_ms: float
    send_p99_ms: float
    held_p99_ms: float
    limits: list[str]


class PointReport(msgspec.Struct, frozen=True, kw_only=True):
    """One run. Times in milliseconds; None where no request succeeded, or none has the measure.

    `itl_ms` is each request's mean time per output token after the first, `gap_ms` the time between two pieces of an answer over all of them,
    `longest_gap_ms` each request's longest. `ttft_due_ms` counts from the time a request was due, in an open loop.
    `tokens_counted`: by the "server", or in "pieces" of answers for a server without usage. `cached_share` is of the prompt tokens of those requests whose
    cached tokens the server stated.
    """

    workload: str
    rate: float | None
    concurrency: int
    requests: int
    failed: int
    failures: dict[str, int]
    messages: dict[str, str]
    duration_s: float
    sent_per_s: float
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    mean_in_flight: float
    prompt_tokens: int
    output_tokens: int
    tokens_counted: str
    asked_prompt_tokens: int
    asked_output_tokens: int
    short_answers: int
    cached_share: float | None
    ttft_ms: Distribution | None
    ttft_due_ms: Distribution | None
    itl_ms: Distribution | None
    gap_ms: Distribution | None
    longest_gap_ms: Distribution | None
    e2e_ms: Distribution | None
    goodput: Goodput | None
    generator: GeneratorReport


def distribution(values: Sequence[float] | NDArray[np.float64]) -> Distribution | None:
    """Mean and percentiles, linearly interpolated as numpy does; None without a value."""
    if not len(values):
        return None
    p50, p90, p99 = np.percentile(values, (50, 90, 99))
    return Distribution(*(round(float(x), 3) for x in (np.mean(values), p50, p90, p99, np.max(values))))


def measures_of(one: Sample) -> dict[str, float]:
    """The measures of a successful request that `--slo` can limit, in milliseconds.

    An answer of one token has no time between two: 0, which is within every limit.
    """
    decoding_ms = (one.last_s - one.first_s) * 1000
    return {
        "ttft": (one.first_s - one.sent_s) * 1000,
        "itl": decoding_ms / (one.output_tokens - 1) if one.output_tokens > 1 else 0.0,
        "gap": max(one.gaps_ms, default=0.0),
        "e2e": (one.last_s - one.sent_s) * 1000,
    }


def report_of(workload: str, run: LoadRun, pace: Pace, limits: Mapping[str, float]) -> PointReport:
    """The figures of a run."""
    good = [one for one in run.samples if one.failure is None]
    failures = [one.failure for one in run.samples if one.failure is not None]
    found = [measures_of(one) for one in good]
    prompt, output = (
        sum(max(0, getattr(one, f)) for one in good) for f in ("prompt_tokens", "output_tokens")
    )
    told = [one for one in good if one.cached_tokens >= 0 and one.prompt_tokens > 0]
    ttft = distribution([one["ttft"] for one in found])
    due = [(one.first_s - one.due_s) * 1000 for one in good] if pace.open else []
    return PointReport(
        workload=workload,
        rate=pace.rate or None,
        concurrency=pace.at_once,
        requests=len(run.samples),
        failed=len(failures),
        failures=dict(Counter(failure.cause for failure in failures).most_common()),
        messages={failure.cause: failure.message for failure in reversed(failures)},
        duration_s=round(run.duration_s, 3),
        sent_per_s=_sent_per_s(run.samples),
        requests_per_s=len(good) / run.duration_s,
        output_tokens_per_s=output / run.duration_s,
        total_tokens_per_s=(prompt + output) / run.duration_s,
        mean_in_flight=sum(one["e2e"] for one in found) / 1000 / run.duration_s,
        prompt_tokens=prompt,
        output_tokens=output,
        tokens_counted="server" if all(one.counted for one in good) else "pieces",
        asked_prompt_tokens=sum(one.asked_tokens for one in good),
        asked_output_tokens=sum(one.asked_output for one in good),
        short_answers=sum(one.output_tokens < one.asked_output for one in good if one.counted),
        cached_share=sum(one.cached_tokens for one in told) / sum(one.prompt_tokens for one in told)
        if told
        else None,
        ttft_ms=ttft,
        ttft_due_ms=distribution(due),
        itl_ms=distribution([x["itl"] for x, one in zip(found, good, strict=True) if one.output_tokens > 1]),
        gap_ms=distribution(np.concatenate([np.array(one.gaps_ms) for one in good]) if good else []),
        longest_gap_ms=distribution([x["gap"] for x, one in zip(found, good, strict=True) if one.gaps_ms]),
        e2e_ms=distribution([one["e2e"] for one in found]),
        goodput=_goodput(good, found, len(run.samples), run.duration_s, limits) if limits else None,
        generator=_generator(run.samples, run.own, pace, ttft),
    )


def _sent_per_s(samples: Sequence[Sample]) -> float:
    """The rate at which requests were sent; 0 if all were sent at once."""
    sent = sorted(one.sent_s for one in samples if not one.turn)
    return (len(sent) - 1) / (sent[-1] - sent[0]) if len(sent) > 1 and sent[-1] > sent[0] else 0.0


def _goodput(
    good: Sequence[Sample],
    found: Sequence[dict[str, float]],
    count: int,
    duration_s: float,
    limits: Mapping[str, float],
) -> Goodput:
    within = [
        one
        for one, measures in zip(good, found, strict=True)
        if all(measures[name] <= limit for name, limit in limits.items())
    ]
    return Goodput(
        dict(limits),
        len(within),
        len(within) / count,
        len(within) / duration_s,
        sum(one.output_tokens for one in within) / duration_s,
        {name: sum(one[name] > limit for one in found) for name, limit in limits.items()},
    )


def _generator(
    samples: Sequence[Sample], own: OwnLag, pace: Pace, ttft: Distribution | None
) -> GeneratorReport:
    """Decide whether the generator was the bottleneck."""
    lags = [max(0.0, one.sent_s - one.due_s - one.held_s) * 1000 for one in samples if one.sent_s >= 0]
    held = [one.held_s * 1000 for one in samples]
    send, hold = (float(np.percentile(values or [0.0], 99)) for values in (lags, held))
    most = max(LAG_MS_MIN, LAG_SHARE_MAX * (ttft.p50 if ttft else 0.0))
    limits = []
    if own.cpu_share > CPU_SHARE_MAX:
        limits.append(f"it used {own.cpu_share:.0%} of its core")
    if own.loop_p99_ms > most:
        limits.append(
            f"its event loop was up to {own.loop_p99_ms:.0f} ms late (p99), of a TTFT of {ttft.p50 if ttft else 0:.0f} ms"
        )
    if send > most:
        limits.append(f"it sent requests up to {send:.0f} ms late (p99)")
    return GeneratorReport(
        round(own.cpu_share, 3),
        round(own.loop_p99_ms, 3),
        round(own.loop_max_ms, 3),
        round(send, 3),
        round(hold, 3),
        limits,
    )


def best_point(points: Sequence[PointReport], share: float) -> PointReport | None:
    """The point with most requests within the limits per second, of those where at least `share` of all are; None if there is none."""
    enough = [one for one in points if one.goodput is not None and one.goodput.share >= share]
    return max(enough, key=lambda one: one.goodput.requests_per_s if one.goodput else 0.0, default=None)


def as_data(sample: Sample) -> dict[str, Any]:
    """A request for JSON."""
    data = sample._asdict()
    data["failure"] = sample.failure._asdict() if sample.failure else None
    return data
