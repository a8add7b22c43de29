"""The result of `headwater bench serve`, as text and as a plot."""

from collections.abc import Callable
from typing import Final

import msgspec

from headwater.ops.load.measures import Distribution, PointReport, best_point
from headwater.ops.load.prompts import Calibration
from headwater.ops.process.plot import Panel, Plot, Row, svg
from headwater.ops.process.text_table import table

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


def _row(text: str, point: PointReport, found: Distribution | None) -> tuple[str, ...]:
    cells = [found.mean, found.p50, found.p90, found.p99, found.max] if found else []
    return (text, *(f"{cell:,.1f}" for cell in cells)) if cells else (text, *("-" * 5))


def as_text(result: ServeReport) -> str:
    """Return everything for people."""
    head = [f"{result.url}: {result.model}, {result.api}, workload {result.workload}, seed {result.seed}"]
    per_word, fixed, known = result.calibration
    head.append(
        f"the server counts {per_word:.3g} tokens per word and {fixed:.0f} around a prompt"
        if known
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
    rows = [_row(name, point, found) for name, found in measures if found is not None]
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


def _pair(found: Distribution | None) -> str:
    return f"{found.p50:,.1f} / {found.p99:,.1f}" if found else "-"


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
    own = max(points, key=lambda point: point.generator.loop_p99_ms).generator
    if not any(point.generator.limits for point in points):
        lines.append(
            f"generator: {max(p.generator.cpu_share for p in points):.0%} of a core, at most {own.loop_p99_ms:.1f} ms late (p99)"
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
            found = [value(point) for value in series.values()]
            rows.append(Row(label, [None if one is None else f"{one:.6g}" for one in found]))
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
    panels = [one for one in panels if any(float(value or 0) for row in one.rows for value in row.values)]
    conditions = (
        f"{result.url}, {result.api}, {result.points[0].requests} requests at each point, seed {result.seed}"
    )
    return svg(Plot(f"{result.model}: {result.workload}", conditions, (), panels))
