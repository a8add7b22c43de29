"""The figures of a run of `headwater bench serve`, and the result as text and as a plot.

They are defined as `vllm bench serve` and aiperf define them; docs/guides/benchmarking.md has the definitions.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from headwater.ops.bench.generator import LoadRun, OwnLag, Pace, Sample
from headwater.ops.bench.plot import Panel, Plot, Row, svg
from headwater.ops.bench.workload import Calibration
from headwater.ops.terminal import table

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


def measures_of(sample: Sample) -> dict[str, float]:
    """The measures of a successful request that `--slo` can limit, in milliseconds.

    An answer of one token has no time between two: 0, which is within every limit.
    """
    decoding_ms = (sample.last_s - sample.first_s) * 1000
    return {
        "ttft": (sample.first_s - sample.sent_s) * 1000,
        "itl": decoding_ms / (sample.output_tokens - 1) if sample.output_tokens > 1 else 0.0,
        "gap": max(sample.gaps_ms, default=0.0),
        "e2e": (sample.last_s - sample.sent_s) * 1000,
    }


def report_of(workload: str, run: LoadRun, pace: Pace, limits: Mapping[str, float]) -> PointReport:
    """The figures of a run."""
    good = [one for one in run.samples if one.failure is None]
    failures = [one.failure for one in run.samples if one.failure is not None]
    measured = [measures_of(one) for one in good]
    prompt, output = (
        sum(max(0, getattr(one, f)) for one in good) for f in ("prompt_tokens", "output_tokens")
    )
    reported = [one for one in good if one.cached_tokens >= 0 and one.prompt_tokens > 0]
    ttft = distribution([one["ttft"] for one in measured])
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
        mean_in_flight=sum(one["e2e"] for one in measured) / 1000 / run.duration_s,
        prompt_tokens=prompt,
        output_tokens=output,
        tokens_counted="server" if all(one.counted for one in good) else "pieces",
        asked_prompt_tokens=sum(one.asked_tokens for one in good),
        asked_output_tokens=sum(one.asked_output for one in good),
        short_answers=sum(one.output_tokens < one.asked_output for one in good if one.counted),
        cached_share=sum(one.cached_tokens for one in reported) / sum(one.prompt_tokens for one in reported)
        if reported
        else None,
        ttft_ms=ttft,
        ttft_due_ms=distribution(due),
        itl_ms=distribution(
            [x["itl"] for x, one in zip(measured, good, strict=True) if one.output_tokens > 1]
        ),
        gap_ms=distribution(np.concatenate([np.array(one.gaps_ms) for one in good]) if good else []),
        longest_gap_ms=distribution([x["gap"] for x, one in zip(measured, good, strict=True) if one.gaps_ms]),
        e2e_ms=distribution([one["e2e"] for one in measured]),
        goodput=_goodput(good, measured, len(run.samples), run.duration_s, limits) if limits else None,
        generator=_generator(run.samples, run.own, pace, ttft),
    )


def _sent_per_s(samples: Sequence[Sample]) -> float:
    """The rate at which requests were sent; 0 if all were sent at once."""
    sent = sorted(sample.sent_s for sample in samples if not sample.turn)
    return (len(sent) - 1) / (sent[-1] - sent[0]) if len(sent) > 1 and sent[-1] > sent[0] else 0.0


def _goodput(
    good: Sequence[Sample],
    measured: Sequence[dict[str, float]],
    count: int,
    duration_s: float,
    limits: Mapping[str, float],
) -> Goodput:
    within = [
        one
        for one, measures in zip(good, measured, strict=True)
        if all(measures[name] <= limit for name, limit in limits.items())
    ]
    return Goodput(
        dict(limits),
        len(within),
        len(within) / count,
        len(within) / duration_s,
        sum(one.output_tokens for one in within) / duration_s,
        {name: sum(one[name] > limit for one in measured) for name, limit in limits.items()},
    )


def _generator(
    samples: Sequence[Sample], lag: OwnLag, pace: Pace, ttft: Distribution | None
) -> GeneratorReport:
    """Decide whether the generator was the bottleneck."""
    lags = [
        max(0.0, sample.sent_s - sample.due_s - sample.held_s) * 1000
        for sample in samples
        if sample.sent_s >= 0
    ]
    held = [sample.held_s * 1000 for sample in samples]
    send, hold = (float(np.percentile(values or [0.0], 99)) for values in (lags, held))
    most = max(LAG_MS_MIN, LAG_SHARE_MAX * (ttft.p50 if ttft else 0.0))
    limits = []
    if lag.cpu_share > CPU_SHARE_MAX:
        limits.append(f"it used {lag.cpu_share:.0%} of its core")
    if lag.loop_p99_ms > most:
        limits.append(
            f"its event loop was up to {lag.loop_p99_ms:.0f} ms late (p99), of a TTFT of {ttft.p50 if ttft else 0:.0f} ms"
        )
    if send > most:
        limits.append(f"it sent requests up to {send:.0f} ms late (p99)")
    return GeneratorReport(
        round(lag.cpu_share, 3),
        round(lag.loop_p99_ms, 3),
        round(lag.loop_max_ms, 3),
        round(send, 3),
        round(hold, 3),
        limits,
    )


def best_point(points: Sequence[PointReport], share: float) -> PointReport | None:
    """The point with most requests within the limits per second, of those where at least `share` of all are; None if there is none."""
    enough = [point for point in points if point.goodput is not None and point.goodput.share >= share]
    return max(enough, key=lambda point: point.goodput.requests_per_s if point.goodput else 0.0, default=None)


def as_data(sample: Sample) -> dict[str, Any]:
    """A request for JSON."""
    data = sample._asdict()
    data["failure"] = sample.failure._asdict() if sample.failure else None
    return data


SHARE: Final = 0.9
"""Share of requests within the limits that a rate must have to count as sustained, as in the paper on DistServe."""


class ServeReport(msgspec.Struct):
    """All points. `left_out` requests of a file were longer than wanted."""

    url: str
    model: str
    api: str
    workload: str
    seed: int
    calibration: Calibration
    began_s: float
    points: list[PointReport]
    left_out: int = 0


def _row(text: str, point: PointReport, distribution: Distribution | None) -> tuple[str, ...]:
    cells = (
        [distribution.mean, distribution.p50, distribution.p90, distribution.p99, distribution.max]
        if distribution
        else []
    )
    return (text, *(f"{cell:,.1f}" for cell in cells)) if cells else (text, *("-" * 5))


def as_text(result: ServeReport) -> str:
    """Return everything for people."""
    head = [f"{result.url}: {result.model}, {result.api}, workload {result.workload}, seed {result.seed}"]
    per_word, fixed, counted = result.calibration
    head.append(
        f"the server counts {per_word:.3g} tokens per word and {fixed:.0f} around a prompt"
        if counted
        else "the server does not count tokens: a word is taken for a token of the prompt, and a piece of the answer for one of it"
    )
    if result.left_out:
        head.append(f"{result.left_out} requests of the file were left out: they are longer than --longest")
    if len(result.points) == 1:
        return "\n".join([*head, "", *_one(result.points[0])])
    return "\n".join([*head, "", _sweep(result.points), *_notes(result.points)])


def _one(point: PointReport) -> list[str]:
    lines = [
        _conditions(point),
        f"{point.requests} requests, {point.failed} failed, in {point.duration_s:,.1f} s; on average {point.mean_in_flight:.1f} in flight",
        f"tokens: {point.prompt_tokens:,} in ({point.asked_prompt_tokens:,} wanted), {point.output_tokens:,} out "
        f"({point.asked_output_tokens:,} wanted), counted by "
        + ("the server" if point.tokens_counted == "server" else "pieces of answers"),
        f"throughput: {point.requests_per_s:.2f} requests/s, {point.output_tokens_per_s:,.1f} output tokens/s, "
        f"{point.total_tokens_per_s:,.1f} tokens/s in all",
    ]
    if point.cached_share is not None:
        lines.append(f"cached: {point.cached_share:.1%} of the prompt tokens")
    measures: tuple[tuple[str, Distribution | None], ...] = (
        ("TTFT", point.ttft_ms),
        ("TTFT from when it was due", point.ttft_due_ms),
        ("ITL (mean of a request)", point.itl_ms),
        ("gap between pieces", point.gap_ms),
        ("longest gap of a request", point.longest_gap_ms),
        ("E2E", point.e2e_ms),
    )
    rows = [_row(name, point, distribution) for name, distribution in measures if distribution is not None]
    lines += ["", table(("ms", "mean", "p50", "p90", "p99", "max"), rows), *_notes([point])]
    if point.goodput is not None:
        good = point.goodput
        missed = ", ".join(f"{name} {count}" for name, count in good.missed.items())
        lines.append(
            f"goodput: {good.requests_per_s:.2f} requests/s, {good.output_tokens_per_s:,.1f} output tokens/s; {good.share:.1%} of all "
            f"requests within {_limits(point)}; beyond: {missed}"
        )
    return lines


def _conditions(point: PointReport) -> str:
    if point.rate is None and point.ttft_due_ms is None:
        return f"closed loop, {point.concurrency} at once"
    rate = f"{point.rate:g} requests/s" if point.rate else "the trace's times"
    limit = f", at most {point.concurrency} at once" if point.concurrency else ""
    return f"open loop, {rate} ({point.sent_per_s:.2f}/s sent){limit}"


def _limits(point: PointReport) -> str:
    return ", ".join(
        f"{name} {limit:g} ms" for name, limit in (point.goodput.limits_ms if point.goodput else {}).items()
    )


_COLUMNS: Final[tuple[tuple[str, Callable[[PointReport], str]], ...]] = (
    ("rate", lambda p: "-" if p.rate is None else f"{p.rate:g}"),
    ("at once", lambda p: f"{p.concurrency}" if p.concurrency else "-"),
    ("failed", lambda p: f"{p.failed} of {p.requests}"),
    ("requests/s", lambda p: f"{p.requests_per_s:.2f}"),
    ("output tokens/s", lambda p: f"{p.output_tokens_per_s:,.0f}"),
    ("in flight", lambda p: f"{p.mean_in_flight:.1f}"),
    ("TTFT p50 / p99 ms", lambda p: _pair(p.ttft_ms)),
    ("ITL p50 / p99 ms", lambda p: _pair(p.itl_ms)),
    ("E2E p50 / p99 ms", lambda p: _pair(p.e2e_ms)),
    ("cached", lambda p: "-" if p.cached_share is None else f"{p.cached_share:.1%}"),
    (
        "goodput/s (share)",
        lambda p: f"{p.goodput.requests_per_s:.2f} ({p.goodput.share:.0%})" if p.goodput else "-",
    ),
)


def _pair(distribution: Distribution | None) -> str:
    return f"{distribution.p50:,.1f} / {distribution.p99:,.1f}" if distribution else "-"


def _sweep(points: list[PointReport]) -> str:
    rows = [[write(point) for _, write in _COLUMNS] for point in points]
    # A column that says nothing is left out.
    used = [at for at in range(len(_COLUMNS)) if any(row[at] != "-" for row in rows)]
    return table([_COLUMNS[at][0] for at in used], [[row[at] for at in used] for row in rows])


def _notes(points: list[PointReport]) -> list[str]:
    """What must be known of the figures: failures, short answers, a generator that was too slow, and the best point."""
    lines: list[str] = []
    causes: dict[str, int] = {}
    messages: dict[str, str] = {}
    for point in points:
        messages = point.messages | messages
        for cause, count in point.failures.items():
            causes[cause] = causes.get(cause, 0) + count
    lines += [f"failed: {count} x {cause}: {messages[cause]}" for cause, count in causes.items()]
    if short := sum(point.short_answers for point in points):
        lines.append(f"{short} answers have fewer tokens than wanted")
    for point in points:
        at = f"{_conditions(point)}: " if len(points) > 1 else ""
        if point.generator.limits:
            lines.append(
                f"{at}THE GENERATOR WAS THE BOTTLENECK: {'; '.join(point.generator.limits)}. Give it a free core, or send less from each of several"
            )
        if point.generator.held_p99_ms > 1 and point.ttft_due_ms is not None:
            lines.append(
                f"{at}requests waited up to {point.generator.held_p99_ms:,.0f} ms (p99) for one of {point.concurrency} places, which TTFT does not "
                "count: see TTFT from when it was due"
            )
    worst_generator = max(points, key=lambda point: point.generator.loop_p99_ms).generator
    if not any(point.generator.limits for point in points):
        lines.append(
            f"generator: {max(p.generator.cpu_share for p in points):.0%} of a core, at most {worst_generator.loop_p99_ms:.1f} ms late (p99)"
        )
    if len(points) > 1 and points[0].goodput is not None:
        best = best_point(points, SHARE)
        lines.append(
            f"most requests within {_limits(points[0])} with {SHARE:.0%} of all within: "
            + (
                f"{best.goodput.requests_per_s:.2f}/s at {_conditions(best)}"
                if best and best.goodput
                else "no point has that share"
            )
        )
    return lines


def drawn(result: ServeReport) -> str:
    """A sweep as SVG: throughput and latencies at each point."""
    by_rate = len({point.rate for point in result.points}) > 1
    labels = [
        f"{point.rate:g}" if by_rate and point.rate is not None else f"{point.concurrency}"
        for point in result.points
    ]
    x = "requests per second" if by_rate else "requests in flight"

    def panel(title: str, unit: str, **series: Callable[[PointReport], float | None]) -> Panel:
        rows = []
        for label, point in zip(labels, result.points, strict=True):
            values = [value(point) for value in series.values()]
            rows.append(Row(label, [None if entry is None else f"{entry:.6g}" for entry in values]))
        return Panel("lines", title, unit, rows, x=x, series=list(series))

    def at(name: str, share: str) -> Callable[[PointReport], float | None]:
        return lambda point: getattr(getattr(point, name), share, None)

    good: dict[str, Callable[[PointReport], float | None]] = {
        "within the limits": lambda point: point.goodput.output_tokens_per_s if point.goodput else None
    }
    panels = [
        panel(
            "Output tokens per second",
            "tokens/s",
            all=lambda point: point.output_tokens_per_s,
            **(good if result.points[0].goodput else {}),
        ),
        panel("Time to first token", "ms", p50=at("ttft_ms", "p50"), p99=at("ttft_ms", "p99")),
        panel("Time per output token", "ms", p50=at("itl_ms", "p50"), p99=at("itl_ms", "p99")),
    ]
    # Answers of one token have no time per token, and where all failed there is nothing.
    panels = [
        entry for entry in panels if any(float(value or 0) for row in entry.rows for value in row.values)
    ]
    conditions = (
        f"{result.url}, {result.api}, {result.points[0].requests} requests at each point, seed {result.seed}"
    )
    return svg(Plot(f"{result.model}: {result.workload}", conditions, (), panels))
