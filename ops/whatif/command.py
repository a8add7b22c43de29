"""`headwater whatif`: the columns that its options define, their runs, and the output."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import msgspec

from headwater.events.snapshot_store import SnapshotStore
from headwater.ops.config.nats import NatsSettings
from headwater.ops.config.router import replaced
from headwater.ops.config.setting import ConfigError, struct_settings
from headwater.ops.nats.connect import operator_ports
from headwater.ops.nats.pool_choice import choose_pool
from headwater.ops.operator.states import first_state
from headwater.ops.process.actor import compile_kernels
from headwater.ops.process.text_table import table
from headwater.ops.whatif import report
from headwater.ops.whatif import report as whatif_report
from headwater.ops.whatif.options import Runs, Search
from headwater.ops.whatif.recording import Recording, recording
from headwater.ops.whatif.report import WhatifReport
from headwater.ops.whatif.run import run
from headwater.ops.whatif.setup import Setup
from headwater.ops.whatif.trace import Trace, read
from headwater.ops.whatif.tune import (
    Tuned,
    TuneFigures,
    figures_of,
    one_after_another,
    tune,
)
from headwater.schemas.events.route import Weights

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
    compile_kernels()
    as_it_was = run(recorded.trace, base)
    reports = [report.report_of(as_it_was), *run_all(recorded.trace, others, runs.jobs)]
    found = whatif_report.fidelity(recorded, as_it_was)
    if runs.as_json:
        document = {"fidelity": found, "runs": [report.as_data(one) for one in reports]}
        print(msgspec.json.encode(document).decode())
    else:
        print(f"{whatif_report.as_text(found)}\n\n{report.as_table(reports)}")
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
        return msgspec.json.encode([report.as_data(one) for one in reports]).decode()
    return report.as_table(reports)


def run_all(trace: Trace, setups: Sequence[Setup], jobs: int) -> list[WhatifReport]:
    """Every column, `jobs` at a time."""
    compile_kernels()
    if jobs <= 1 or len(setups) == 1:
        return [run_one(trace, setup) for setup in setups]
    # Forked after the kernels are loaded, so that they start at once.
    with ProcessPoolExecutor(jobs, mp_context=get_context("fork")) as pool:
        return list(pool.map(run_one, [trace] * len(setups), setups))


def run_one(trace: Trace, setup: Setup) -> WhatifReport:
    """One column."""
    return report.report_of(run(trace, setup))


def columns(values: Values, requests: int = 0, base: Setup = DEFAULTS) -> list[Setup]:
    """A setup per column: `base` with the values given. Raises `ConfigError` for lists of different lengths."""
    given: dict[str, Sequence[Any]] = {name: list(found) for name, found in values.items() if found}
    if ("prefill_workers" in given or "decode_workers" in given) and "workers" not in given:
        given["workers"] = [0]
    if "weights" in given:
        given["weights"] = [replaced(base.weights, one, "--routing-weights") for one in given["weights"]]
    count = max([1, *map(len, given.values())])
    for name, found in given.items():
        if len(found) not in (1, count):
            raise ConfigError(
                f"{flag_of(name)} is given {len(found)} times and another option {count} times: "
                f"give each once or {count} times"
            )
    setups = [
        msgspec.structs.replace(
            base,
            **{name: found[at if len(found) > 1 else 0] for name, found in given.items()},
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
    return next(one.flag for one in struct_settings(Setup) if one.path == (name,))


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
            known = ", ".join(name for name, kind in fields.items() if kind is float)
            raise ConfigError(f"--search {name}: weights that can be searched are {known}")
    if not search.names:
        raise ConfigError("--search: name at least one weight")


def _run(trace: Trace, setup: Setup, search: Search, runs: Runs) -> int:
    if len(trace.first(setup.requests).requests) < 2:
        raise ConfigError("tune: at least two requests are needed: one to search on, one to evaluate on")
    compile_kernels()
    if runs.jobs <= 1:
        found = tune(trace, setup, search, one_after_another)
    else:
        # Forked after the kernels are loaded, so that they start at once.
        with ProcessPoolExecutor(runs.jobs, mp_context=get_context("fork")) as pool:
            found = tune(trace, setup, search, partial(_side_by_side, pool))
    print(msgspec.json.encode(found).decode() if runs.as_json else as_text(found, search, setup))
    return 0


def _side_by_side(
    pool: ProcessPoolExecutor, trace: Trace, setups: Sequence[Setup], after_ns: int
) -> list[TuneFigures]:
    return list(pool.map(_figures, [trace] * len(setups), setups, [after_ns] * len(setups)))


def _figures(trace: Trace, setup: Setup, after_ns: int) -> TuneFigures:
    return figures_of(run(trace, setup), after_ns)


def as_text(found: Tuned, search: Search, setup: Setup) -> str:
    """Return as text what the weights gain on the searched and the later requests, and what to paste."""
    rows = [
        (
            name,
            *(_cell(name, values[name]) for values in (found.before, found.found)),
            f"{_change(found.before[name], found.found[name]):+.1%}",
            *(_cell(name, values[name]) for values in (found.later_before, found.later_found)),
            f"{_change(found.later_before[name], found.later_found[name]):+.1%}",
        )
        for name in TuneFigures._fields
    ]
    columns_ = ("", "first: before", "found", "change", "later: before", "found", "change")
    values = ",".join(f"{name}={value:g}" for name, value in found.weights.items())
    before = ",".join(f"{name}={getattr(setup.weights, name):g}" for name in found.names)
    if found.holds:
        verdict = (
            f"{found.objective} gains {found.gain:.1%} where it was searched and {found.later_gain:.1%} later:\n"
            f"--routing-weights {values}"
        )
    elif found.gain > 0:
        verdict = (
            f"what gained {found.gain:.1%} ({values}) does not hold later ({found.later_gain:+.1%}, others within "
            f"{search.guard:.0%}): keep {before}"
        )
    else:
        verdict = f"nothing better was found: keep {before}"
    return (
        f"{found.trials} trials from seed {found.seed} on the first {found.trained_on} requests, judged by the "
        f"{found.judged_on} after them (ms but for reuse)\n{table(columns_, rows)}\n{verdict}"
    )


def _cell(name: str, value: float) -> str:
    return f"{value:.4f}" if name == "reuse" else f"{value:,.2f}" if name == "itl_mean" else f"{value:,.1f}"


def _change(before: float, after: float) -> float:
    return after / before - 1 if before else 0.0
