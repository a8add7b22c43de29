"""The results of a run: for people as a table, for programs as JSON."""

from collections.abc import Sequence
from hashlib import blake2b
from operator import attrgetter
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from headwater.engines.sim import StepTime
from headwater.ops.terminal import table
from headwater.ops.whatif.recording import Recording, RequestResult
from headwater.ops.whatif.run import RunResult, ServedRequest
from headwater.ops.whatif.setup import Setup
from headwater.schemas.routing import Weights

GOODPUT_TTFT_MS: Final = Weights().ttft_limit_ms
"""Limit of a request's time to first token in `goodput`."""

GOODPUT_ITL_MS: Final = Weights().itl_limit_ms
"""Limit of a request's mean time between two tokens in `goodput`."""


class Spread(msgspec.Struct, frozen=True):
    """The distribution of one measure over all requests."""

    mean: float
    p50: float
    p90: float
    p99: float


def spread_of(values: Sequence[float] | NDArray[np.float64], unit: float = 1.0) -> Spread:
    """The distribution of these values in multiples of a unit; percentiles are interpolated. Zeros without a value."""
    if not len(values):
        return Spread(0.0, 0.0, 0.0, 0.0)
    p50, p90, p99 = np.percentile(values, (50, 90, 99)) / unit
    return Spread(float(np.mean(values)) / unit, float(p50), float(p90), float(p99))


class ServedTimes:
    """The times of requests that were served as arrays of nanoseconds, a value for each, and what they come to together."""

    def __init__(self, served: Sequence[ServedRequest], block_size: int) -> None:
        rows = [
            (
                served_request.request.arrival_ns,
                served_request.given_ns,
                served_request.began_ns,
                served_request.first_ns,
                served_request.done_ns,
                served_request.encoding_ns,
                served_request.request.output_tokens,
            )
            for served_request in served
        ]
        columns = np.array(rows, np.float64).reshape(-1, 7).T.copy()
        self.arrival, self.given, self.began, self.first, self.done, self.encoding, self.tokens = columns
        self.ttft, self.decoding, self.e2e = (
            self.first - self.arrival,
            self.done - self.first,
            self.done - self.arrival,
        )
        blocks = sum(-(-served_request.request.prompt_tokens // block_size) for served_request in served)
        self.reuse = sum(served_request.hit_blocks for served_request in served) / max(1, blocks)
        """The share of the prompts' blocks that were cached."""
        self.itl_ms = float(self.decoding.sum()) / 1e6 / max(1.0, float((self.tokens - 1).sum()))
        """The mean time between two tokens, each with the same weight."""


class Balance(msgspec.Struct, frozen=True):
    """The share of each worker, by name: requests, prompt tokens computed, blocks stored.

    The ratios are of the busiest worker to the mean over workers.
    """

    requests: dict[str, int]
    computed_tokens: dict[str, int]
    stored_blocks: dict[str, int]
    requests_ratio: float
    computed_tokens_ratio: float
    stored_blocks_ratio: float


class MediaReport(msgspec.Struct, frozen=True):
    """What became of the requests' media: of `items`, `encoded_apart` by encode workers, which left `left` others to serving workers, and `encoded_here`
    by those. `saved` need no encoding, as KV or embeddings of the same item were cached. `wait_ms` is how long requests waited for embeddings.
    """

    items: int
    encoded_apart: int
    encoded_here: int
    left: int
    saved: int
    wait_ms: Spread


class WhatifReport(msgspec.Struct, frozen=True):
    """One column. Times are milliseconds of virtual time; `wall_s` and rates per second are of this machine.

    `reuse` is the share of all prompts' blocks (including partial ones) that were cached when their request started.
    `itl_ms` weights each token equally. `queue_ms` is from the arrival at the engine to its first step, `router_queue_ms`
    the wait in the admission queue before that, and `waited` the number of requests that waited. `goodput` is the share of the
    requests, refused ones included, within `GOODPUT_TTFT_MS` and `GOODPUT_ITL_MS`. `digest` covers the times of all requests:
    equal runs have equal digests.
    """

    setup: Setup
    trace: str
    requests: int
    refused: int
    reuse: float
    ttft_ms: Spread
    itl_ms: float
    e2e_ms: Spread
    goodput: float
    router_queue_ms: Spread
    waited: int
    queue_ms: Spread
    preemptions: int
    handed_over: int
    media: MediaReport
    balance: Balance
    virtual_s: float
    decisions: int
    decisions_per_s: float
    events: int
    events_per_s: float
    wall_s: float
    digest: str


def report_of(ran: RunResult) -> WhatifReport:
    """The figures of a run."""
    served = ran.served
    times = ServedTimes(served, ran.setup.block_size)
    digest = blake2b(digest_size=16)
    for served_request in sorted(served, key=lambda served_request: served_request.request.name):
        facts = (
            served_request.request.name,
            served_request.worker,
            served_request.prefill_worker,
            served_request.hit_blocks,
            served_request.first_ns,
            served_request.done_ns,
        )
        digest.update(repr(facts).encode())
    routers = ran.routers.each
    events = sum(router.events for router in routers)
    return WhatifReport(
        setup=ran.setup,
        trace=ran.trace,
        requests=len(served),
        refused=ran.refused,
        reuse=times.reuse,
        ttft_ms=spread_of(times.ttft, 1e6),
        itl_ms=times.itl_ms,
        e2e_ms=spread_of(times.e2e, 1e6),
        goodput=_goodput(times, ran.refused),
        router_queue_ms=spread_of(times.given - times.arrival, 1e6),
        waited=int((times.given > times.arrival).sum()),
        queue_ms=spread_of(times.began - times.given - times.encoding, 1e6),
        preemptions=sum(worker.scheduler.preemptions for worker in ran.workers),
        handed_over=sum(bool(served_request.prefill_worker) for served_request in served),
        media=_media(ran, times.encoding),
        balance=_balance(ran),
        virtual_s=float(times.done.max(initial=0.0)) / 1e9,
        decisions=ran.routers.decisions,
        decisions_per_s=ran.routers.decisions / max(sum(router.decide_s for router in routers), 1e-9),
        events=events,
        events_per_s=events / max(sum(router.fold_s for router in routers), 1e-9),
        wall_s=ran.wall_s,
        digest=digest.hexdigest(),
    )


def as_data(report: WhatifReport) -> dict[str, Any]:
    """Return the report for JSON, with the names of weights and of step times' parts."""
    data: dict[str, Any] = msgspec.to_builtins(report)
    data["setup"]["weights"] = msgspec.structs.asdict(report.setup.weights)
    data["setup"]["step_time"] = report.setup.step_time._asdict()
    data["setup"]["slowdowns"] = [slowdown._asdict() for slowdown in report.setup.slowdowns]
    return data


def _goodput(times: ServedTimes, refused: int) -> float:
    within = (times.ttft <= GOODPUT_TTFT_MS * 1e6) & (
        times.decoding <= GOODPUT_ITL_MS * 1e6 * (times.tokens - 1)
    )
    return float(within.sum()) / max(1, len(times.ttft) + refused)


def _media(ran: RunResult, encoding: NDArray[np.float64]) -> MediaReport:
    """`encoding`: nanoseconds that each request waited for embeddings."""
    items = sum(len(served_request.request.media) for served_request in ran.served)
    apart = sum(encoder.computed for encoder in ran.encoding.encoders.values())
    encoded_here = sum(worker.encoded for worker in ran.workers)
    return MediaReport(
        items,
        apart,
        encoded_here,
        ran.encoding.declined,
        items - apart - encoded_here,
        spread_of(encoding[encoding > 0], 1e6),
    )


def _balance(ran: RunResult) -> Balance:
    requests = {worker.shape.name: worker.given for worker in ran.workers}
    tokens = {worker.shape.name: worker.computed_tokens for worker in ran.workers}
    blocks = {worker.shape.name: worker.stored_blocks for worker in ran.workers}
    return Balance(requests, tokens, blocks, _ratio(requests), _ratio(tokens), _ratio(blocks))


def _ratio(values: dict[str, int]) -> float:
    total = sum(values.values())
    return max(values.values()) * len(values) / total if total else 0.0


class Figure(NamedTuple):
    """A row of the table: what each report has at `path`. It is left out where none has anything at `if_any`."""

    title: str
    path: str
    form: str = ","
    if_any: str = ""


def _spread(title: str, name: str, shares: Sequence[str] = ("mean", "p99")) -> list[Figure]:
    paths = {share: f"{name}.{share}" for share in shares}
    return [Figure(f"{title} {share} ms", path, ",.1f", path) for share, path in paths.items()]


FIGURES: Final = (
    Figure("requests", "requests"),
    Figure("refused", "refused"),
    Figure("reuse", "reuse", ".4f"),
    *_spread("TTFT", "ttft_ms", Spread.__struct_fields__),
    Figure("ITL mean ms", "itl_ms", ".2f"),
    *_spread("E2E", "e2e_ms"),
    *_spread("router queue", "router_queue_ms"),
    *_spread("engine queue", "queue_ms"),
    Figure(f"within {GOODPUT_TTFT_MS:g} ms and {GOODPUT_ITL_MS:g} ms a token", "goodput", ".4f"),
    Figure("waited at the router", "waited", ",", "waited"),
    Figure("preemptions", "preemptions"),
    Figure("handed over", "handed_over", ",", "handed_over"),
    Figure("items of media", "media.items", ",", "media.items"),
    Figure("encoded by encode workers", "media.encoded_apart", ",", "media.items"),
    Figure("encoded by serving workers", "media.encoded_here", ",", "media.items"),
    Figure("left by encode workers", "media.left", ",", "media.items"),
    Figure("encodes saved", "media.saved", ",", "media.items"),
    *_spread("wait for embeddings", "media.wait_ms"),
    Figure("busiest/mean requests", "balance.requests_ratio", ".2f"),
    Figure("busiest/mean tokens computed", "balance.computed_tokens_ratio", ".2f"),
    Figure("busiest/mean blocks stored", "balance.stored_blocks_ratio", ".2f"),
    Figure("decisions/s", "decisions_per_s", ",.0f"),
    Figure("events folded/s", "events_per_s", ",.0f"),
    Figure("virtual s", "virtual_s", ",.0f"),
    Figure("wall s", "wall_s", ".1f"),
)


def as_table(reports: Sequence[WhatifReport]) -> str:
    """Runs side by side: a column each, the settings that differ first."""
    rows: list[tuple[str, list[str]]] = [("policy", [report.setup.policy for report in reports])]
    for name in Setup.__struct_fields__:
        values = [_short(getattr(report.setup, name)) for report in reports]
        if name != "policy" and (
            len(set(values)) > 1 or name in ("workers", "blocks", "block_size", "speed")
        ):
            rows.append((name.replace("_", " "), values))
    for title, path, form, if_any in FIGURES:
        if not if_any or any(map(attrgetter(if_any), reports)):
            rows.append((title, [format(value, form) for value in map(attrgetter(path), reports)]))
    headers = ("", *(f"run {number}" for number in range(1, len(reports) + 1)))
    return table(headers, [(name, *cells) for name, cells in rows])


def _short(value: object) -> str:
    """A setting in short form: of a structure the values that differ from its defaults."""
    if isinstance(value, msgspec.Struct):
        kind = type(value)
        default = kind()
        names = [name for name in kind.__struct_fields__ if getattr(value, name) != getattr(default, name)]
        return " ".join(f"{name}={getattr(value, name):g}" for name in names) or "default"
    if isinstance(value, StepTime):
        return "default" if value == StepTime() else " ".join(f"{x:g}" for part in value for x in part)
    if type(value) is tuple:
        return ",".join(map(_short, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


# Fidelity of the simulator: a recorded run compared with the same run on virtual time.


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
    served = {served_request.request.name: served_request for served_request in ran.served}
    both = [(served[name], was) for name, was in recorded.results.items() if name in served]
    hits = [
        (was.hit_blocks, served_request.hit_blocks) for served_request, was in both if was.hit_blocks >= 0
    ]
    ttft = [
        (was.ttft_ms, (served_request.first_ns - served_request.request.arrival_ns) / 1e6)
        for served_request, was in both
    ]
    e2e = [
        (was.e2e_ms, (served_request.done_ns - served_request.request.arrival_ns) / 1e6)
        for served_request, was in both
    ]
    gaps = [_gap("hit blocks", hits), _gap("TTFT ms", ttft), _gap("E2E ms", e2e)]
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
    """Return the error of each measure, over the requests for which it was estimated and measured; a measure without any is left out."""
    measures = (
        ("TTFT", [(entry.expected.ttft_ms, entry.ttft_ms) for entry in results]),
        ("ITL", [(entry.expected.itl_ms, entry.itl_ms) for entry in results]),
        ("E2E", [(entry.expected.e2e_ms, entry.e2e_ms) for entry in results if entry.itl_ms >= 0]),
    )
    errors = [_estimate_error(name, [pair for pair in pairs if min(pair) >= 0]) for name, pairs in measures]
    return [entry for entry in errors if entry is not None]


def _estimate_error(measure: str, pairs: Sequence[tuple[float, float]]) -> EstimateError | None:
    """Return the error of one measure from pairs of (estimated, measured); None without any."""
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


def _gap(measure: str, pairs: Sequence[tuple[float, float]]) -> FidelityGap | None:
    """Return the gap of one measure from pairs of (recorded, simulated); None without any."""
    if not pairs:
        return None
    was, now = np.array(pairs, np.float64).T
    before, after = spread_of(was), spread_of(now)
    return FidelityGap(
        measure,
        before.mean,
        after.mean,
        after.mean / before.mean - 1 if before.mean else 0.0,
        before.p50,
        after.p50,
        before.p99,
        after.p99,
        float(np.median(np.abs(now - was))),
    )


def as_text(comparison: Fidelity) -> str:
    """Return the text for people."""
    head = (
        f"{comparison.log}: {comparison.requests} requests, {comparison.left_out} more without an answer; prompts known completely "
        f"{comparison.whole}, as far as matched {comparison.partly}, not at all {comparison.unknown}; step times "
        f"{'fitted to the log' if comparison.step_times_fitted else 'as given or by default'}"
    )
    rows = [
        (
            gap.measure,
            *(
                format(getattr(gap, name), "+.1%" if name == "off" else ",.1f")
                for name in FidelityGap.__struct_fields__[1:]
            ),
        )
        for gap in comparison.gaps
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
        f"({comparison.compared} requests that succeeded and were not migrated)",
    ]
    if comparison.estimates:
        lines += [
            "the router's estimates, and the mean absolute error of the best constant:",
            _estimates_table(comparison.estimates),
        ]
    return "\n".join(lines)


def _estimates_table(estimates: Sequence[EstimateError]) -> str:
    rows = [
        (
            f"{estimate.measure} ms",
            f"{estimate.estimated_mean:,.1f}",
            f"{estimate.was_mean:,.1f}",
            f"{estimate.error:,.1f}",
            f"{estimate.constant_error:,.1f}",
            f"{estimate.requests:,}",
        )
        for estimate in estimates
    ]
    return table(
        ("", "mean estimated", "mean was", "mean absolute error", "constant's error", "requests"), rows
    )
