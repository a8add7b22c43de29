"""`headwater advise`: simulates a trace with every layout that fits, recommends one, and says how sure that is.

How sure that is, is found by running the best ones again: with arrivals moved at random, and with step times that are off. Each half of the
trace is looked at by itself, too.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Final, NamedTuple

import msgspec
import numpy as np

from headwater.engines.sim import StepTime
from headwater.ops.bench.trace import TRACE_BLOCK, Trace, read
from headwater.ops.config.sections import NatsSettings
from headwater.ops.config.setting import ConfigError
from headwater.ops.terminal import table
from headwater.ops.whatif.advise_options import TYPES, Advice, GpuType
from headwater.ops.whatif.command import recorded_run
from headwater.ops.whatif.layouts import (
    BLOCK_SIZE,
    Layout,
    ModelSize,
    kv_tokens,
    layouts,
    model_size,
    of_cache,
    scaled,
    setup_of,
    slower,
    step_time,
)
from headwater.ops.whatif.report import ServedTimes, Spread, spread_of
from headwater.ops.whatif.run import RunResult, Simulations, run
from headwater.ops.whatif.setup import Setup

SHOWN: Final = 12
"""Layouts in the table."""

TIE: Final = 0.005
"""Goodput that differs by less is equal."""

SATURATED: Final = 0.5
"""Below this share of requests within the limits, all layouts are overloaded."""


class LayoutReport(msgspec.Struct, frozen=True, kw_only=True):
    """One layout. `goodput`: the share of requests within all limits; times in milliseconds."""

    layout: str
    flags: str
    gpus: int
    kv_tokens: int
    goodput: float
    ttft_ms: Spread
    itl_ms: float
    e2e_ms: float
    reuse: float
    refused: int


class Check(msgspec.Struct, frozen=True):
    """The goodput, and the mean end-to-end milliseconds (0: not known), of the best layouts in their order under another condition."""

    condition: str
    goodput: list[float]
    e2e_ms: list[float]

    @property
    def winner(self) -> int:
        """Which of them is best here: the first, unless another is better by more than `TIE`, or as good and faster by as much."""
        first = self.goodput[0]
        top = max(self.goodput)
        if top - first > TIE:
            return self.goodput.index(top)
        near = [at for at, value in enumerate(self.goodput) if abs(value - first) <= TIE]
        quickest = min(near, key=lambda at: self.e2e_ms[at])
        return quickest if self.e2e_ms[quickest] < self.e2e_ms[0] * (1 - TIE) else 0


class Advised(msgspec.Struct, frozen=True, kw_only=True):
    """The advice. `layouts` are sorted, the recommended one first; `step_times` says where those are from."""

    model: str
    gpus: str
    trace: str
    requests: int
    requests_per_s: float
    speed: float
    slo_ms: dict[str, float]
    weights_gb: float
    kv_bytes_per_token: float
    step_times: str
    layouts: list[LayoutReport]
    refused: dict[str, str]
    idle_gpus: int
    checks: list[Check]
    command: str


def as_text(advised: Advised) -> str:
    """Return everything for people."""
    limits = ", ".join(f"{name} {limit:g} ms" for name, limit in advised.slo_ms.items())
    lines = [
        f"{advised.model} on {advised.gpus}: weights {advised.weights_gb:,.1f} GB, KV {advised.kv_bytes_per_token / 1024:,.0f} KiB per token",
        f"{advised.trace}: {advised.requests:,} requests, {advised.requests_per_s:.2f}/s; good: {limits}",
        f"step times: {advised.step_times}",
        "",
        table(
            ("layout", "good", "TTFT p50 / p99 ms", "ITL ms", "E2E ms", "reuse", "KV tokens per worker"),
            [
                (
                    row.layout,
                    f"{row.goodput:.1%}",
                    f"{row.ttft_ms.p50:,.0f} / {row.ttft_ms.p99:,.0f}",
                    f"{row.itl_ms:.1f}",
                    f"{row.e2e_ms:,.0f}",
                    f"{row.reuse:.1%}",
                    f"{row.kv_tokens:,}",
                )
                for row in advised.layouts[:SHOWN]
            ],
        ),
    ]
    if len(advised.layouts) > SHOWN:
        lines.append(f"and {len(advised.layouts) - SHOWN} worse ones")
    lines += [f"not possible: {name}: {reason}" for name, reason in advised.refused.items()]
    lines += [
        "",
        f"recommended: {advised.layouts[0].layout}",
        f"    {advised.command}",
        "",
        *sureness(advised),
    ]
    return "\n".join(lines)


def sureness(advised: Advised) -> list[str]:
    """Return how sure the recommendation is, and what that does not cover."""
    lines = []
    best = advised.layouts[0]
    if advised.checks:
        won = sum(check.winner == 0 for check in advised.checks)
        share = won / len(advised.checks)
        word = "sure" if share == 1 else "likely" if share >= 0.75 else "not sure"
        lines.append(
            f"{word}: of {len(advised.checks)} other conditions, it is best or equal in {won} (goodput of {', '.join(row.layout for row in advised.layouts[:3])}):"
        )
        lines += [
            f"  {check.condition}: {', '.join(f'{value:.1%}' for value in check.goodput)}"
            + ("" if check.winner == 0 else f"  <- {advised.layouts[check.winner].layout}")
            for check in advised.checks
        ]
        second = advised.layouts[1]
        if abs(best.goodput - second.goodput) <= TIE:
            lines.append(
                f"{second.layout} is as good to half a percent ({best.goodput:.1%} and {second.goodput:.1%}); mean end-to-end times are "
                f"{best.e2e_ms:,.0f} and {second.e2e_ms:,.0f} ms"
            )
    else:
        lines.append("it is the only layout that is possible")
    if best.goodput < SATURATED:
        lines.append(
            "every layout is overloaded: what is best then says little. More GPUs are needed, or looser limits"
        )
    elif all(row.goodput > 1 - TIE for row in advised.layouts[:2]):
        lines.append(
            "the load is light for several layouts: --speed 2 shows which has room for twice as much"
        )
    if advised.step_times.startswith("assumed"):
        lines.append(
            "step times were not measured: run the recommendation under load, and `headwater advise log` on its log, which measures them"
        )
    if advised.speed > 1:
        lines.append(
            f"the load is {advised.speed:g} times the recorded one: the same requests, closer together"
        )
    if advised.idle_gpus:
        lines.append(f"{advised.idle_gpus} GPUs are left idle")
    lines.append(
        "not in the simulation: pipeline parallelism, attention of a long prompt's later chunks to its earlier ones, preemption's cost "
        "beyond recomputing, HTTP, several hosts"
    )
    return lines


CHECKED: Final = 3
"""Layouts that are run again."""

SEEDS: Final = 3

OFF: Final = (0.75, 1.33)
"""Factors of assumed step times, of prompts and of decoding each by itself."""

MEASURED_OFF: Final = (0.9, 1.1)
"""The same for measured ones."""

NOT_GIVEN: Final = Advice().step_time


class Basis(NamedTuple):
    """What is known of step times. `source` says where they are from; `tokens` is the KV cache that shares of blocks are of, 0: that of the layout."""

    times: StepTime | None
    source: str
    tokens: int = 0


class Outcome(NamedTuple):
    """The figures of a run, and the goodput of the halves of its trace. Refused requests are beyond every limit."""

    halves: tuple[float, float]
    goodput: float
    ttft_ms: Spread
    itl_ms: float
    e2e_ms: float
    reuse: float
    refused: int


def advise_on_trace(file: str, options: Advice) -> int:
    """Advise for a trace file."""
    _check(options)
    trace = read(Path(file))
    has_step_time = options.step_time != NOT_GIVEN
    basis = Basis(
        options.step_time if has_step_time else None, "measured (--step-time)" if has_step_time else _ASSUMED
    )
    return _advise(trace, options, basis, TRACE_BLOCK)


async def advise_on_log(nats: NatsSettings, pool: str, options: Advice) -> int:
    """Advise for the requests of a pool's log, with the step times of its workers."""
    _check(options)
    recorded = await recorded_run(nats, pool, "advise")
    if options.step_time != NOT_GIVEN:
        basis = Basis(options.step_time, "measured (--step-time)")
    elif recorded.fitted:
        basis = Basis(
            recorded.setup.step_time,
            f"measured, from the log of its workers, taken as TP {options.measured_tp}, with up to {recorded.measured_share:.0%} of the KV cache in use",
            recorded.setup.blocks * recorded.setup.block_size,
        )
    else:
        basis = Basis(None, f"{_ASSUMED} (the log has too few prompts to fit any)")
    return _advise(recorded.trace, options, basis, recorded.setup.block_size)


_ASSUMED: Final = "assumed: a roofline of the GPU's published figures"


def _check(options: Advice) -> None:
    if not options.model:
        raise ConfigError("--model: give the model's folder, or its config.json")
    if not options.gpus.number:
        raise ConfigError("--gpus: give number and type, as 8xH100")


def _advise(trace: Trace, options: Advice, basis: Basis, unit: int) -> int:
    gpu = TYPES[options.gpus.type]
    size = model_size(options.model, 1 if options.kv_dtype == "fp8" else 2)
    block_size = BLOCK_SIZE if unit % BLOCK_SIZE == 0 else unit
    trace = trace.first(options.requests).faster(options.speed)
    lengths = [one.prompt_tokens + one.output_tokens for one in trace.requests]
    longest = max(-(-tokens // block_size) * block_size for tokens in lengths)
    candidates, refused = layouts(size, gpu, options.gpus.number, longest, roles=options.roles == "all")
    if not candidates:
        reasons = "; ".join(f"TP {one.tensor_parallel}: {one.reason}" for one in refused)
        raise ConfigError(f"{size.name} does not fit on {options.gpus.number}x{options.gpus.type}: {reasons}")
    base = Setup(block_size=block_size, transfer_gb_per_s=options.transfer_gb_per_s)
    slo = dict(options.slo)
    planner = Planner(size, gpu, basis, options.measured_tp, sum(lengths) / len(lengths), base)
    with Simulations(options.jobs) as simulations:
        outcomes = simulations.each(_run, [Job(trace, planner.setup(one), slo) for one in candidates])
        ranked = sorted(
            zip(candidates, outcomes, strict=True), key=lambda pair: _score(pair[1]), reverse=True
        )
        best = [layout for layout, _ in ranked[:CHECKED]]
        checks = _checks(trace, planner, best, ranked, options, simulations, known=basis.times is not None)
    advised = Advised(
        model=size.name,
        gpus=f"{options.gpus.number}x{options.gpus.type}",
        trace=trace.name,
        requests=len(trace.requests),
        requests_per_s=_rate(trace),
        speed=options.speed,
        slo_ms=slo,
        weights_gb=round(size.weight_bytes / 1e9, 2),
        kv_bytes_per_token=size.kv_bytes,
        step_times=basis.source,
        layouts=[_row(layout, outcome, planner) for layout, outcome in ranked],
        refused={f"TP {one.tensor_parallel}": one.reason for one in refused},
        idle_gpus=options.gpus.number - ranked[0][0].gpus,
        checks=checks,
        command=f"headwater up --model {options.model} {ranked[0][0].flags}",
    )
    print(msgspec.json.encode(advised).decode() if options.as_json else as_text(advised))
    return 0


class Planner(NamedTuple):
    """Makes the setup of each layout."""

    size: ModelSize
    gpu: GpuType
    basis: Basis
    measured_tp: int
    mean_tokens: float
    base: Setup

    def times(self, parallel: int) -> StepTime:
        """The step times of a worker."""
        assumed = step_time(self.size, self.gpu, parallel, self.mean_tokens)
        if self.basis.times is None:
            return assumed
        measured_tokens = kv_tokens(self.size, self.gpu, self.measured_tp)
        measured = (
            of_cache(self.basis.times, measured_tokens / self.basis.tokens)
            if self.basis.tokens
            else self.basis.times
        )
        if parallel == self.measured_tp:
            return measured
        before = step_time(self.size, self.gpu, self.measured_tp, self.mean_tokens)
        return scaled(measured, before, assumed)

    def setup(self, layout: Layout, prefill: float = 1.0, decode: float = 1.0) -> Setup:
        """The what-if of a layout, with step times by other factors."""
        times = slower(self.times(layout.tensor_parallel), prefill, decode)
        return setup_of(layout, self.base, self.size, self.gpu, times)


class Job(NamedTuple):
    """A simulation for the figures of a layout within these limits."""

    trace: Trace
    setup: Setup
    limits: dict[str, float]


def _run(job: Job) -> Outcome:
    return outcome_of(run(job.trace, job.setup), job.trace, job.limits)


def outcome_of(ran: RunResult, trace: Trace, limits: Mapping[str, float]) -> Outcome:
    """The figures of a run."""
    middle_ns = trace.requests[len(trace.requests) // 2].arrival_ns
    early = sum(request.arrival_ns < middle_ns for request in trace.requests)
    times = ServedTimes(ran.served, ran.setup.block_size)
    measures = {
        "ttft": times.ttft / 1e6,
        "itl": times.decoding / 1e6 / np.maximum(1, times.tokens - 1),
        "e2e": times.e2e / 1e6,
    }
    good = np.ones(len(ran.served), bool)
    for name, limit in limits.items():
        good &= measures[name] <= limit
    in_first = times.arrival < middle_ns
    late = len(trace.requests) - early
    return Outcome(
        (float((good & in_first).sum()) / max(1, early), float((good & ~in_first).sum()) / max(1, late)),
        float(good.sum()) / len(trace.requests),
        spread_of(measures["ttft"]),
        times.itl_ms,
        float(measures["e2e"].mean()) if ran.served else 0.0,
        times.reuse,
        ran.refused,
    )


def _score(outcome: Outcome) -> tuple[float, float]:
    """Goodput to a tenth of a percent, then the time to the last token."""
    return round(outcome.goodput, 3), -outcome.e2e_ms


def _checks(
    trace: Trace,
    planner: Planner,
    best: Sequence[Layout],
    ranked: Sequence[tuple[Layout, Outcome]],
    options: Advice,
    simulations: Simulations,
    *,
    known: bool,
) -> list[Check]:
    """The goodput of the best layouts under other conditions."""
    if len(best) < 2:
        return []
    by_layout = dict(ranked)
    checks = [
        Check(
            f"{name} half of the trace", [by_layout[layout].halves[at] for layout in best], [0.0] * len(best)
        )
        for at, name in enumerate(("first", "second"))
    ]
    variants: list[tuple[str, Trace, float, float]] = [
        (f"arrivals moved, seed {options.seed + number}", moved(trace, options.seed + number), 1.0, 1.0)
        for number in range(SEEDS)
    ]
    for factor in MEASURED_OFF if known else OFF:
        variants.append((f"prompts take {factor:g} of the time", trace, factor, 1.0))
        variants.append((f"decoding takes {factor:g} of the time", trace, 1.0, factor))
    jobs = [
        Job(varied, planner.setup(layout, prefill, decode), dict(options.slo))
        for _, varied, prefill, decode in variants
        for layout in best
    ]
    outcomes = iter(simulations.each(_run, jobs))
    for name, *_ in variants:
        each = [next(outcomes) for _ in best]
        checks.append(
            Check(name, [outcome.goodput for outcome in each], [outcome.e2e_ms for outcome in each])
        )
    return checks


def moved(trace: Trace, seed: int) -> Trace:
    """The same requests, each later by a random time of up to two mean intervals."""
    draw = Random(seed)
    span_ns = 2e9 / _rate(trace) if _rate(trace) else 0.0
    arrivals = sorted(
        (request.arrival_ns + round(draw.uniform(0, span_ns)), number)
        for number, request in enumerate(trace.requests)
    )
    return Trace(trace.name, tuple(trace.requests[number]._replace(arrival_ns=at) for at, number in arrivals))


def _rate(trace: Trace) -> float:
    span_ns = trace.requests[-1].arrival_ns - trace.requests[0].arrival_ns
    return (len(trace.requests) - 1) / span_ns * 1e9 if span_ns else 0.0


def _row(layout: Layout, outcome: Outcome, planner: Planner) -> LayoutReport:
    figures = outcome._asdict()
    del figures["halves"]
    tokens = kv_tokens(planner.size, planner.gpu, layout.tensor_parallel)
    return LayoutReport(layout=str(layout), flags=layout.flags, gpus=layout.gpus, kv_tokens=tokens, **figures)
