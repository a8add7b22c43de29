"""`headwater tune`: its options, and what it says."""

import argparse
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import msgspec

from headwater.ops.config import ConfigError, Settings
from headwater.ops.replay import pool_of
from headwater.ops.run_actor import operator_world
from headwater.ops.tables import table
from headwater.ops.warm import compile_kernels
from headwater.ops.whatif.command import columns, log_columns
from headwater.ops.whatif.recorded import recording
from headwater.ops.whatif.run import run
from headwater.ops.whatif.setup import Setup
from headwater.ops.whatif.trace import Trace, read
from headwater.ops.whatif.tune import OBJECTIVES, Asks, Figures, Tuned, figures_of, one_after_another, tune
from headwater.schemas.route import Weights


def execute(arguments: argparse.Namespace) -> int:
    """Tune on a trace file."""
    if not arguments.trace:
        raise ConfigError("tune: name a trace file, or give --log for a recorded run")
    setups = columns(arguments)
    if len(setups) != 1:
        raise ConfigError("tune: give each option once; it searches the weights of one setting")
    return _tell(read(Path(arguments.trace)), setups[0], arguments)


async def execute_log(arguments: argparse.Namespace, settings: Settings) -> int:
    """Tune on a recorded run."""
    if arguments.trace:
        raise ConfigError("tune: a trace file or --log, not both")
    async with operator_world(settings, "tune") as world:
        pool = await pool_of(world, settings)
        recorded = await recording(pool, await world.pool_log(pool), world.requests)
    base, others = log_columns(arguments, recorded.setup)
    if len(others) > 1:
        raise ConfigError("tune: give each option once; it searches the weights of one setting")
    return _tell(recorded.trace, others[0] if others else base, arguments)


def asks_of(arguments: argparse.Namespace) -> Asks:
    """How to search. Raises `ConfigError`."""
    fields = {field.name: field.type for field in msgspec.structs.fields(Weights)}
    names = tuple(filter(None, arguments.search.split(",")))
    for name in names:
        if fields.get(name) is not float:
            known = ", ".join(name for name, kind in fields.items() if kind is float)
            raise ConfigError(f"--search {name}: weights that can be searched are {known}")
    if arguments.objective not in OBJECTIVES:
        raise ConfigError(f"--objective {arguments.objective}: there are {', '.join(OBJECTIVES)}")
    if arguments.trials < 1 or not names:
        raise ConfigError("tune: at least one trial of one weight is needed")
    if not 0.1 <= arguments.share <= 0.9:
        raise ConfigError(f"--share {arguments.share:g}: give 0.1 to 0.9 of the requests to learn from")
    return Asks(
        arguments.objective, names, arguments.trials, arguments.seed, arguments.share, arguments.guard
    )


def _tell(trace: Trace, setup: Setup, arguments: argparse.Namespace) -> int:
    asks = asks_of(arguments)
    if len(trace.first(setup.requests).requests) < 2:
        raise ConfigError("tune: at least two requests are needed, to learn from and to judge by")
    compile_kernels()
    if arguments.jobs <= 1:
        found = tune(trace, setup, asks, one_after_another)
    else:
        # Forked after the compiled kernels are here: workers start in no time.
        with ProcessPoolExecutor(arguments.jobs, mp_context=get_context("fork")) as pool:
            found = tune(trace, setup, asks, partial(_side_by_side, pool))
    print(msgspec.json.encode(found).decode() if arguments.json else as_text(found, asks, setup))
    return 0


def _side_by_side(
    pool: ProcessPoolExecutor, trace: Trace, setups: Sequence[Setup], after_ns: int
) -> list[Figures]:
    return list(pool.map(_figures, [trace] * len(setups), setups, [after_ns] * len(setups)))


def _figures(trace: Trace, setup: Setup, after_ns: int) -> Figures:
    return figures_of(run(trace, setup), after_ns)


def as_text(found: Tuned, asks: Asks, setup: Setup) -> str:
    """For people: what it gains where it was sought and later, and what to paste."""
    rows = [
        (
            name,
            *(_cell(name, values[name]) for values in (found.before, found.found)),
            f"{_change(found.before[name], found.found[name]):+.1%}",
            *(_cell(name, values[name]) for values in (found.later_before, found.later_found)),
            f"{_change(found.later_before[name], found.later_found[name]):+.1%}",
        )
        for name in Figures._fields
    ]
    columns_ = ("", "first: before", "found", "change", "later: before", "found", "change")
    values = ",".join(f"{name}={value:g}" for name, value in found.weights.items())
    before = ",".join(f"{name}={getattr(setup.weights, name):g}" for name in found.names)
    if found.holds:
        verdict = (
            f"{found.objective} gains {found.gain:.1%} where it was searched and {found.later_gain:.1%} later:\n"
            f"--weights {values}        (a router's option is --router-weights)"
        )
    elif found.gain > 0:
        verdict = (
            f"what gained {found.gain:.1%} ({values}) does not hold later ({found.later_gain:+.1%}, others within "
            f"{asks.guard:.0%}): keep {before}"
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
