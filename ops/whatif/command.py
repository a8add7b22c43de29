"""`headwater whatif`: the columns that its options make, their runs, and what is printed."""

import argparse
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import msgspec

from headwater.engines.step_time import StepTime
from headwater.ops.config import ConfigError, Settings
from headwater.ops.replay import pool_of
from headwater.ops.routing_settings import weights_of
from headwater.ops.run_actor import operator_world
from headwater.ops.warm import compile_kernels
from headwater.ops.whatif import fidelity, plot, report
from headwater.ops.whatif.flags import COUNTS, NOT_NEGATIVE, NUMBERS
from headwater.ops.whatif.recorded import recording
from headwater.ops.whatif.report import Report, Result
from headwater.ops.whatif.run import run
from headwater.ops.whatif.setup import Setup
from headwater.ops.whatif.trace import Trace, read
from headwater.router.policies import POLICIES

DEFAULTS = Setup()

ENGINE_FACTS = ("step_time", "step_tokens", "bytes_a_token", "gigabytes_a_second")


def execute(arguments: argparse.Namespace) -> int:
    """Run all columns of a trace and print them."""
    if not arguments.trace:
        raise ConfigError("whatif: name a trace file, or give --log for a recorded run")
    setups = columns(arguments)
    results = run_all(read(Path(arguments.trace)), setups, arguments.jobs)
    _draw(arguments, results)
    print(shown([result.report for result in results], as_json=arguments.json))
    return 0


async def execute_log(arguments: argparse.Namespace, settings: Settings) -> int:
    """Run a recorded log again: as it was, beside what happened, and with the settings given."""
    if arguments.trace:
        raise ConfigError("whatif: a trace file or --log, not both")
    async with operator_world(settings, "whatif") as world:
        pool = await pool_of(world, settings)
        recorded = await recording(pool, await world.pool_log(pool), world.requests)
    base, others = log_columns(arguments, recorded.setup)
    compile_kernels()
    as_it_was = run(recorded.trace, base)
    results = [report.result_of(as_it_was), *run_all(recorded.trace, others, arguments.jobs)]
    _draw(arguments, results)
    reports = [result.report for result in results]
    found = fidelity.fidelity(recorded, as_it_was)
    if arguments.json:
        runs = [report.as_data(one) for one in reports]
        print(msgspec.json.encode({"fidelity": found, "runs": runs}).decode())
    else:
        print(f"{fidelity.as_text(found)}\n\n{report.as_table(reports)}")
    return 0


def log_columns(arguments: argparse.Namespace, recorded: Setup) -> tuple[Setup, list[Setup]]:
    """The recorded settings, and the columns that options make of them.

    What a log does not tell of its engines (step times, tokens of a step, …) holds for the first run too, if it is given once.
    """
    others = columns(arguments, recorded)
    facts = {
        name: getattr(others[0], name) for name in ENGINE_FACTS if len(getattr(arguments, name) or ()) == 1
    }
    base = msgspec.structs.replace(recorded, requests=arguments.requests, **facts)
    return base, [setup for setup in others if setup != base]


def _draw(arguments: argparse.Namespace, results: Sequence[Result]) -> None:
    if arguments.plot:
        plot.write(Path(arguments.plot), results, report.names_of([result.report for result in results]))


def shown(reports: Sequence[Report], *, as_json: bool) -> str:
    """What is printed."""
    if as_json:
        return msgspec.json.encode([report.as_data(one) for one in reports]).decode()
    return report.as_table(reports)


def run_all(trace: Trace, setups: Sequence[Setup], jobs: int) -> list[Result]:
    """Every column, `jobs` at a time."""
    compile_kernels()
    if jobs <= 1 or len(setups) == 1:
        return [run_one(trace, setup) for setup in setups]
    # Forked after the compiled kernels are here: workers start in no time.
    with ProcessPoolExecutor(jobs, mp_context=get_context("fork")) as pool:
        return list(pool.map(run_one, [trace] * len(setups), setups))


def run_one(trace: Trace, setup: Setup) -> Result:
    """One column."""
    return report.result_of(run(trace, setup))


def columns(arguments: argparse.Namespace, base: Setup = DEFAULTS) -> list[Setup]:
    """A setup for each column: `base` with what is given. Raises `ConfigError` for lists of different lengths and for values that can not be."""
    given: dict[str, list[Any]] = {}
    for name in ("policy", "queue_order", *COUNTS, *NUMBERS):
        values = getattr(arguments, name)
        if values:
            given[name] = values
            _check(name, values)
    if ("prefill_workers" in given or "decode_workers" in given) and "workers" not in given:
        given["workers"] = [0]
    if arguments.weights:
        given["weights"] = [weights_of(text, base.weights) for text in arguments.weights]
    if arguments.step_time:
        given["step_time"] = [step_time_of(text) for text in arguments.step_time]
    count = max([1, *map(len, given.values())])
    for name, values in given.items():
        if len(values) not in (1, count):
            raise ConfigError(
                f"--{name.replace('_', '-')} is given {len(values)} times and another option {count} times: "
                f"give each once or {count} times"
            )
    setups = [
        msgspec.structs.replace(
            base,
            **{name: values[at if len(values) > 1 else 0] for name, values in given.items()},
            requests=arguments.requests,
        )
        for at in range(count)
    ]
    if "policy" in given and "busy_prefill_tokens" not in given:
        setups = [as_it_stands(setup) for setup in setups]
    for setup in setups:
        if not setup.workers + setup.prefill_workers + setup.decode_workers:
            raise ConfigError("--workers 0: there must be a worker")
        if not setup.workers + setup.decode_workers:
            raise ConfigError("--prefill-workers without --decode-workers or --workers: nobody would decode")
    return setups


def as_it_stands(setup: Setup) -> Setup:
    """Policies that do not look at load stand for routers that have no queue either, unless one is asked for."""
    return setup if setup.policy == "kv" else msgspec.structs.replace(setup, busy_prefill_tokens=0)


def _check(name: str, values: list[Any]) -> None:
    option = f"--{name.replace('_', '-')}"
    for value in values:
        if name == "policy" and value not in POLICIES:
            raise ConfigError(f"--policy {value}: there are {', '.join(POLICIES)}")
        if not isinstance(value, str) and (value < 0 or (value == 0 and name not in NOT_NEGATIVE)):
            raise ConfigError(
                f"{option} {value:g}: must be {'at least' if name in NOT_NEGATIVE else 'above'} 0"
            )


def step_time_of(text: str) -> StepTime:
    """Step times from six numbers or a JSON file. Raises `ConfigError`."""
    parts = text.split(",")
    if len(parts) == 6:
        try:
            a, b, c, d, e, f = map(float, parts)
        except ValueError as error:
            raise ConfigError(f"--step-time {text}: {error}") from error
        return StepTime((a, b, c), (d, e, f))
    try:
        return msgspec.json.decode(Path(text).read_bytes(), type=_StepTimeFile).step_time()
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(
            f"--step-time {text}: neither six numbers with commas nor a file of step times: {error}"
        ) from error


class _StepTimeFile(msgspec.Struct, forbid_unknown_fields=True):
    prefill_ms: tuple[float, float, float]
    decode_ms: tuple[float, float, float]

    def step_time(self) -> StepTime:
        return StepTime(self.prefill_ms, self.decode_ms)
