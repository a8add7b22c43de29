"""`headwater tune`: how it searches, and its runs."""

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import msgspec

from headwater.ops.config.errors import ConfigError
from headwater.ops.config.nats import NatsSettings
from headwater.ops.process.kernels import compile_kernels
from headwater.ops.process.text_table import table
from headwater.ops.whatif.command import Values, columns, log_columns, recorded_run
from headwater.ops.whatif.options import Runs, Search
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
    """For people: what it gains where it was sought and later, and what to paste."""
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
