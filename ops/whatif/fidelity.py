"""Fidelity of the simulator: a recorded run compared with the same run on virtual time."""

from collections.abc import Sequence

import msgspec
import numpy as np

from headwater.ops.process.text_table import table
from headwater.ops.whatif.recording import Recording, RequestResult
from headwater.ops.whatif.run import RunResult


class FidelityGap(msgspec.Struct, frozen=True):
    """One measure over the same requests. `off` is simulated divided by recorded, less 1, of the means.

    `each` is the median over requests of the deviation from the record, in the measure's unit.
    """

    measure: str
    recorded_mean: float
    simulated_mean: float
    off: float
    recorded_p50: float
    simulated_p50: float
    recorded_p99: float
    simulated_p99: float
    each: float


class EstimateError(msgspec.Struct, frozen=True):
    """The router's estimates of one measure next to what it was, in milliseconds, over `requests`.

    `error` is the mean absolute error; `constant_error` is that of the best constant, the median: estimates that are not better than it
    are worth nothing.
    """

    measure: str
    requests: int
    estimated_mean: float
    was_mean: float
    error: float
    constant_error: float


class Fidelity(msgspec.Struct, frozen=True):
    """A run compared with its record; see `Recording` for the counts. `estimates`: of the measures that decisions had estimates of."""

    log: str
    requests: int
    compared: int
    whole: int
    partly: int
    unknown: int
    left_out: int
    step_times_fitted: bool
    gaps: list[FidelityGap]
    estimates: list[EstimateError]


def fidelity(recorded: Recording, ran: RunResult) -> Fidelity:
    """Compare a run under the recorded settings with the record."""
    served = {one.request.name: one for one in ran.served}
    both = [(served[name], was) for name, was in recorded.results.items() if name in served]
    reported = [(one, was) for one, was in both if was.hit_blocks >= 0]
    gaps = [
        _gap("hit blocks", [w.hit_blocks for _, w in reported], [one.hit_blocks for one, _ in reported]),
        _gap(
            "TTFT ms",
            [was.ttft_ms for _, was in both],
            [(one.first_ns - one.request.arrival_ns) / 1e6 for one, _ in both],
        ),
        _gap(
            "E2E ms",
            [was.e2e_ms for _, was in both],
            [(one.done_ns - one.request.arrival_ns) / 1e6 for one, _ in both],
        ),
    ]
    return Fidelity(
        recorded.trace.name,
        len(recorded.trace.requests),
        len(both),
        recorded.whole,
        recorded.partly,
        recorded.unknown,
        recorded.left_out,
        recorded.fitted and ran.setup.step_time == recorded.setup.step_time,
        [gap for gap in gaps if gap is not None],
        estimate_errors(list(recorded.results.values())),
    )


def estimate_errors(results: Sequence[RequestResult]) -> list[EstimateError]:
    """Of each measure, over the requests of which it was estimated and measured; without any, it is left out."""
    measures = (
        ("TTFT", [(one.expected.ttft_ms, one.ttft_ms) for one in results]),
        ("ITL", [(one.expected.itl_ms, one.itl_ms) for one in results]),
        ("E2E", [(one.expected.e2e_ms, one.e2e_ms) for one in results if one.itl_ms >= 0]),
    )
    found = [_estimate_error(name, [pair for pair in pairs if min(pair) >= 0]) for name, pairs in measures]
    return [one for one in found if one is not None]


def _estimate_error(measure: str, pairs: Sequence[tuple[float, float]]) -> EstimateError | None:
    """Of (estimated, was)."""
    if not pairs:
        return None
    estimated, was = np.array(pairs).T
    return EstimateError(
        measure,
        len(pairs),
        float(estimated.mean()),
        float(was.mean()),
        float(np.abs(estimated - was).mean()),
        float(np.abs(was - np.median(was)).mean()),
    )


def _gap(measure: str, recorded: Sequence[float], simulated: Sequence[float]) -> FidelityGap | None:
    if not recorded:
        return None
    was, now = np.array(recorded, np.float64), np.array(simulated, np.float64)
    was_p50, was_p99 = np.percentile(was, [50, 99])
    now_p50, now_p99 = np.percentile(now, [50, 99])
    mean = float(was.mean())
    return FidelityGap(
        measure,
        mean,
        float(now.mean()),
        float(now.mean()) / mean - 1 if mean else 0.0,
        float(was_p50),
        float(now_p50),
        float(was_p99),
        float(now_p99),
        float(np.median(np.abs(now - was))),
    )


def as_text(found: Fidelity) -> str:
    """For people."""
    head = (
        f"{found.log}: {found.requests} requests, {found.left_out} more without an answer; prompts known completely "
        f"{found.whole}, as far as matched {found.partly}, not at all {found.unknown}; step times "
        f"{'fitted to the log' if found.step_times_fitted else 'as given or by default'}"
    )
    rows = [
        (
            gap.measure,
            f"{gap.recorded_mean:,.1f}",
            f"{gap.simulated_mean:,.1f}",
            f"{gap.off:+.1%}",
            f"{gap.recorded_p50:,.1f}",
            f"{gap.simulated_p50:,.1f}",
            f"{gap.recorded_p99:,.1f}",
            f"{gap.simulated_p99:,.1f}",
            f"{gap.each:,.1f}",
        )
        for gap in found.gaps
    ]
    columns = (
        "",
        "mean was",
        "simulated",
        "off",
        "p50 was",
        "simulated",
        "p99 was",
        "simulated",
        "each off by",
    )
    lines = [
        head,
        table(columns, rows),
        f"({found.compared} requests that succeeded and were not migrated)",
    ]
    if found.estimates:
        lines += [
            "the router's estimates, and the mean absolute error of the best constant:",
            _estimates_table(found.estimates),
        ]
    return "\n".join(lines)


def _estimates_table(estimates: Sequence[EstimateError]) -> str:
    rows = [
        (
            f"{one.measure} ms",
            f"{one.estimated_mean:,.1f}",
            f"{one.was_mean:,.1f}",
            f"{one.error:,.1f}",
            f"{one.constant_error:,.1f}",
            f"{one.requests:,}",
        )
        for one in estimates
    ]
    return table(
        ("", "mean estimated", "mean was", "mean absolute error", "constant's error", "requests"), rows
    )
