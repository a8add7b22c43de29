"""`headwater whatif` and `headwater tune`: the columns that their options define, their runs, and the output; and a search for routing weights.

The search first samples the whole space at random, then one weight after the other around the best, all from one seed. It uses only the first
part of the requests; its result is validated on the later rest.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from headwater.events.snapshot_store import SnapshotStore
from headwater.ops.bench.trace import Trace, read
from headwater.ops.config.sections import NatsSettings, replaced
from headwater.ops.config.setting import ConfigError, struct_settings
from headwater.ops.nats.connect import choose_pool, operator_ports
from headwater.ops.operator.log_reading import first_state
from headwater.ops.terminal import table
from headwater.ops.whatif import report
from headwater.ops.whatif.recording import Recording, recording
from headwater.ops.whatif.report import ServedTimes, WhatifReport, spread_of
from headwater.ops.whatif.run import RunResult, Simulations, run
from headwater.ops.whatif.setup import Runs, Search, Setup
from headwater.schemas.routing import Weights

GUARDED: Final = ("ttft_mean", "ttft_p50", "ttft_p99", "itl_mean", "e2e_mean")
"""None of these may get worse by more than the guard."""

SPAN: Final = 8.0
"""A weight is searched from its present value divided by this to its value times this."""

ZERO_SHARE: Final = 0.1
"""Share of trials with a weight of zero."""

STEPS: Final = (0.5, 0.75, 1.35, 2.0)
"""Factors for the best weights, one weight at a time."""

PENALTY: Final = 10.0
"""Penalty for a deviation beyond the guard, as a share of the objective."""


class TuneFigures(NamedTuple):
    """The figures of some weights, in milliseconds except `reuse`."""

    ttft_mean: float
    ttft_p50: float
    ttft_p99: float
    itl_mean: float
    e2e_mean: float
    reuse: float


class Trial(NamedTuple):
    """Weights that were tried; a lower `score` is better, 1 is that of the present weights."""

    weights: Weights
    figures: TuneFigures
    score: float


class Tuned(msgspec.Struct, frozen=True):
    """The result of the search. `holds`: it is better on later requests too, within the guard."""

    objective: str
    names: list[str]
    trials: int
    seed: int
    trained_on: int
    judged_on: int
    before: dict[str, float]
    found: dict[str, float]
    later_before: dict[str, float]
    later_found: dict[str, float]
    weights: dict[str, float]
    gain: float
    later_gain: float
    holds: bool


RunSetups = Callable[[Trace, Sequence[Setup], int], list[TuneFigures]]
"""Runs setups on a trace and gives their figures from some nanosecond on."""


def figures_of(ran: RunResult, after_ns: int = 0) -> TuneFigures:
    """The figures of those requests that came at `after_ns` or later."""
    served = [
        served_request for served_request in ran.served if served_request.request.arrival_ns >= after_ns
    ]
    if not served:
        return TuneFigures(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    times = ServedTimes(served, ran.setup.block_size)
    ttft, e2e_ms = spread_of(times.ttft / 1e6), float(times.e2e.sum()) / 1e6 / len(served)
    return TuneFigures(ttft.mean, ttft.p50, ttft.p99, times.itl_ms, e2e_ms, times.reuse)


def tune(trace: Trace, setup: Setup, search: Search, runs: RunSetups) -> Tuned:
    """Search around the weights of `setup`, and validate the result."""
    full_trace = trace.first(setup.requests)
    setup = msgspec.structs.replace(setup, requests=0)
    cut = max(1, min(len(full_trace.requests) - 1, round(len(full_trace.requests) * search.share)))
    early = Trace(full_trace.name, full_trace.requests[:cut])
    draw = random.Random(search.seed)
    before = runs(early, [setup], 0)[0]

    def tried(candidates: Sequence[Weights]) -> list[Trial]:
        setups = [msgspec.structs.replace(setup, weights=weights) for weights in candidates]
        results = runs(early, setups, 0)
        return [
            Trial(weights, figures, score(before, figures, search))
            for weights, figures in zip(candidates, results, strict=True)
        ]

    best = Trial(setup.weights, before, 1.0)
    remaining = search.trials
    first = [drawn(setup.weights, search.names, draw) for _ in range(remaining // 2)]
    best = min([best, *tried(first)], key=lambda trial: trial.score)
    remaining -= len(first)
    while remaining > 0:
        steps = around(best.weights, search.names)[:remaining]
        if not steps:
            break
        remaining -= len(steps)
        nearer = min([best, *tried(steps)], key=lambda trial: trial.score)
        if nearer is best:
            break
        best = nearer
    # The later part starts with the caches that the earlier part filled.
    after_ns = round(full_trace.requests[cut].arrival_ns / setup.speed)
    both = [msgspec.structs.replace(setup, weights=weights) for weights in (setup.weights, best.weights)]
    later = runs(full_trace, both, after_ns)
    later_score = score(later[0], later[1], search)
    return Tuned(
        search.objective,
        list(search.names),
        search.trials - max(0, remaining),
        search.seed,
        cut,
        len(full_trace.requests) - cut,
        before._asdict(),
        best.figures._asdict(),
        later[0]._asdict(),
        later[1]._asdict(),
        {name: getattr(best.weights, name) for name in search.names},
        1 - _ratio(search.objective, before, best.figures),
        1 - _ratio(search.objective, *later),
        best.weights != setup.weights and later_score < 1,
    )


def score(before: TuneFigures, figures: TuneFigures, search: Search) -> float:
    """The objective relative to the present one, plus penalties for other figures beyond the guard."""
    total = _ratio(search.objective, before, figures)
    for name in GUARDED:
        if name != search.objective:
            total += PENALTY * max(0.0, _ratio(name, before, figures) - 1 - search.guard)
    return total


def _ratio(name: str, before: TuneFigures, figures: TuneFigures) -> float:
    """Lower is better: below 1 is a gain."""
    was, now = getattr(before, name), getattr(figures, name)
    if name == "reuse":
        was, now = now, was
    return now / was if was else 1.0


def drawn(weights: Weights, names: Sequence[str], draw: random.Random) -> Weights:
    """Random weights in the whole space."""
    values = {}
    for name in names:
        base = getattr(weights, name) or getattr(Weights(), name) or 1.0
        share = draw.random()
        spread = math.exp(draw.uniform(-math.log(SPAN), math.log(SPAN)))
        values[name] = 0.0 if share < ZERO_SHARE else _short(base * spread)
    return msgspec.structs.replace(weights, **values)


def around(weights: Weights, names: Sequence[str]) -> list[Weights]:
    """Variants with one changed weight; a zero weight is tried at a fraction of its default."""
    variants = []
    for name in names:
        value = getattr(weights, name)
        others = [value * step for step in STEPS] if value else [getattr(Weights(), name) / SPAN]
        variants += [msgspec.structs.replace(weights, **{name: _short(other)}) for other in others]
    return [variant for variant in variants if variant != weights]


def _short(value: float) -> float:
    """Rounded to three digits."""
    return float(f"{value:.3g}")


DEFAULTS = Setup()

ENGINE_FACTS = (
    "step_time",
    "worker_speeds",
    "slowdowns",
    "step_tokens",
    "kv_bytes_per_token",
    "transfer_gb_per_s",
    "embeddings_mib",
)

Values = Mapping[str, Sequence[Any]]
"""What options give, by field of `Setup`: one value for all columns, or one per column."""


def run_trace(trace: str, values: Values, runs: Runs) -> int:
    """Run all columns on a trace file and print them."""
    setups = columns(values, runs.requests)
    reports = run_all(read(Path(trace)), setups, runs.jobs)
    print(shown(reports, as_json=runs.as_json))
    return 0


async def recorded_run(nats: NatsSettings, pool: str, name: str) -> Recording:
    """The run that a pool's log has recorded. `name` is the command's."""
    async with operator_ports(nats, name) as ports:
        chosen = await choose_pool(ports, pool)
        log = await ports.pool_log(chosen)
        begins = await first_state(SnapshotStore(ports.blobs, chosen), log)
        return await recording(chosen, log, ports.requests, begins)


async def run_log(nats: NatsSettings, pool: str, values: Values, runs: Runs) -> int:
    """Run a recorded log again: with its own settings, compared with what happened, and with those given."""
    recorded = await recorded_run(nats, pool, "whatif")
    base, others = log_columns(values, runs.requests, recorded.setup)
    others_ran = run_all(recorded.trace, others, runs.jobs)
    as_it_was = run(recorded.trace, base)
    reports = [report.report_of(as_it_was), *others_ran]
    fidelity = report.fidelity(recorded, as_it_was)
    if runs.as_json:
        document = {"fidelity": fidelity, "runs": [report.as_data(run_report) for run_report in reports]}
        print(msgspec.json.encode(document).decode())
    else:
        print(f"{report.as_text(fidelity)}\n\n{report.as_table(reports)}")
    return 0


def log_columns(values: Values, requests: int, recorded: Setup) -> tuple[Setup, list[Setup]]:
    """The recorded settings, and the columns that options define on top of them.

    Facts about engines that a log does not record (step times, tokens per step, …) hold for the first run too, if they are
    given once.
    """
    others = columns(values, requests, recorded)
    facts = {name: getattr(others[0], name) for name in ENGINE_FACTS if len(values.get(name, ())) == 1}
    base = msgspec.structs.replace(recorded, requests=requests, **facts)
    return base, [setup for setup in others if setup != base]


def shown(reports: Sequence[WhatifReport], *, as_json: bool) -> str:
    """Return what is printed."""
    if as_json:
        return msgspec.json.encode([report.as_data(setting) for setting in reports]).decode()
    return report.as_table(reports)


def run_all(trace: Trace, setups: Sequence[Setup], jobs: int) -> list[WhatifReport]:
    """Every column, `jobs` at a time."""
    with Simulations(min(jobs, len(setups))) as simulations:
        return simulations.each(_report, [(trace, setup) for setup in setups])


def _report(job: tuple[Trace, Setup]) -> WhatifReport:
    return run_one(*job)


def run_one(trace: Trace, setup: Setup) -> WhatifReport:
    """One column."""
    return report.report_of(run(trace, setup))


def columns(values: Values, requests: int = 0, base: Setup = DEFAULTS) -> list[Setup]:
    """A setup per column: `base` with the values given. Raises `ConfigError` for lists of different lengths."""
    given: dict[str, Sequence[Any]] = {
        name: list(column_values) for name, column_values in values.items() if column_values
    }
    if ("prefill_workers" in given or "decode_workers" in given) and "workers" not in given:
        given["workers"] = [0]
    if "weights" in given:
        given["weights"] = [replaced(base.weights, changes) for changes in given["weights"]]
    count = max([1, *map(len, given.values())])
    for name, column_values in given.items():
        if len(column_values) not in (1, count):
            raise ConfigError(
                f"{flag_of(name)} is given {len(column_values)} times and another option {count} times: "
                f"give each once or {count} times"
            )
    setups = [
        msgspec.structs.replace(
            base,
            **{
                name: column_values[at if len(column_values) > 1 else 0]
                for name, column_values in given.items()
            },
            requests=requests,
        )
        for at in range(count)
    ]
    if "policy" in given and "busy_prefill_tokens" not in given:
        setups = [without_queue(setup) for setup in setups]
    for setup in setups:
        if not setup.workers + setup.prefill_workers + setup.decode_workers:
            raise ConfigError("--workers 0: at least one worker is needed")
        if not setup.workers + setup.decode_workers:
            raise ConfigError("--prefill-workers needs --decode-workers or --workers: no worker would decode")
    return setups


def flag_of(name: str) -> str:
    """The flag of a field of `Setup`."""
    return next(setting.flag for setting in struct_settings(Setup) if setting.path == (name,))


def without_queue(setup: Setup) -> Setup:
    """Policies that ignore load stand for routers without a queue, unless one is asked for."""
    return setup if setup.policy == "kv" else msgspec.structs.replace(setup, busy_prefill_tokens=0)


# `headwater tune`: its search, and its runs.


def tune_trace(trace: str, values: Values, search: Search, runs: Runs) -> int:
    """Tune on a trace file."""
    check(search)
    setups = columns(values, runs.requests)
    if len(setups) != 1:
        raise ConfigError("tune: give each option once; it searches the weights of one setting")
    return _run(read(Path(trace)), setups[0], search, runs)


async def tune_log(nats: NatsSettings, pool: str, values: Values, search: Search, runs: Runs) -> int:
    """Tune on a recorded run."""
    check(search)
    recorded = await recorded_run(nats, pool, "tune")
    base, others = log_columns(values, runs.requests, recorded.setup)
    if len(others) > 1:
        raise ConfigError("tune: give each option once; it searches the weights of one setting")
    return _run(recorded.trace, others[0] if others else base, search, runs)


def check(search: Search) -> None:
    """Raises `ConfigError` for weights that do not exist."""
    fields = {field.name: field.type for field in msgspec.structs.fields(Weights)}
    for name in search.names:
        if fields.get(name) is not float:
            names = ", ".join(name for name, kind in fields.items() if kind is float)
            raise ConfigError(f"--search {name}: weights that can be searched are {names}")
    if not search.names:
        raise ConfigError("--search: name at least one weight")


def _run(trace: Trace, setup: Setup, search: Search, runs: Runs) -> int:
    if len(trace.first(setup.requests).requests) < 2:
        raise ConfigError("tune: at least two requests are needed: one to search on, one to evaluate on")
    with Simulations(runs.jobs) as simulations:

        def run_setups(trace: Trace, setups: Sequence[Setup], after_ns: int) -> list[TuneFigures]:
            return simulations.each(_figures, [(trace, one, after_ns) for one in setups])

        tuned = tune(trace, setup, search, run_setups)
    print(msgspec.json.encode(tuned).decode() if runs.as_json else as_text(tuned, search, setup))
    return 0


def _figures(job: tuple[Trace, Setup, int]) -> TuneFigures:
    trace, setup, after_ns = job
    return figures_of(run(trace, setup), after_ns)


def as_text(tuned: Tuned, search: Search, setup: Setup) -> str:
    """Return as text what the weights gain on the searched and the later requests, and what to paste."""
    rows = [
        (
            name,
            *(_cell(name, values[name]) for values in (tuned.before, tuned.found)),
            f"{_change(tuned.before[name], tuned.found[name]):+.1%}",
            *(_cell(name, values[name]) for values in (tuned.later_before, tuned.later_found)),
            f"{_change(tuned.later_before[name], tuned.later_found[name]):+.1%}",
        )
        for name in TuneFigures._fields
    ]
    columns_ = ("", "first: before", "found", "change", "later: before", "found", "change")
    values = ",".join(f"{name}={value:g}" for name, value in tuned.weights.items())
    before = ",".join(f"{name}={getattr(setup.weights, name):g}" for name in tuned.names)
    if tuned.holds:
        verdict = (
            f"{tuned.objective} gains {tuned.gain:.1%} where it was searched and {tuned.later_gain:.1%} later:\n"
            f"--routing-weights {values}"
        )
    elif tuned.gain > 0:
        verdict = (
            f"what gained {tuned.gain:.1%} ({values}) does not hold later ({tuned.later_gain:+.1%}, others within "
            f"{search.guard:.0%}): keep {before}"
        )
    else:
        verdict = f"nothing better was found: keep {before}"
    return (
        f"{tuned.trials} trials from seed {tuned.seed} on the first {tuned.trained_on} requests, judged by the "
        f"{tuned.judged_on} after them (ms but for reuse)\n{table(columns_, rows)}\n{verdict}"
    )


def _cell(name: str, value: float) -> str:
    return f"{value:.4f}" if name == "reuse" else f"{value:,.2f}" if name == "itl_mean" else f"{value:,.1f}"


def _change(before: float, after: float) -> float:
    return after / before - 1 if before else 0.0
