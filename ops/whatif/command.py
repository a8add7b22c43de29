"""`headwater whatif`: the columns that its options define, their runs, and the output."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import msgspec

from headwater.ops.config.errors import ConfigError
from headwater.ops.config.nats import NatsSettings
from headwater.ops.config.router import replaced
from headwater.ops.config.setting import struct_settings
from headwater.ops.nats.connect import operator_ports
from headwater.ops.nats.pool_choice import choose_pool
from headwater.ops.process.kernels import compile_kernels
from headwater.ops.whatif import fidelity, report
from headwater.ops.whatif.options import Runs
from headwater.ops.whatif.recording import Recording, recording
from headwater.ops.whatif.report import WhatifReport
from headwater.ops.whatif.run import run
from headwater.ops.whatif.setup import Setup
from headwater.ops.whatif.trace import Trace, read

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
        return await recording(chosen, await ports.pool_log(chosen), ports.requests)


async def run_log(nats: NatsSettings, pool: str, values: Values, runs: Runs) -> int:
    """Run a recorded log again: with its own settings, compared with what happened, and with those given."""
    recorded = await recorded_run(nats, pool, "whatif")
    base, others = log_columns(values, runs.requests, recorded.setup)
    compile_kernels()
    as_it_was = run(recorded.trace, base)
    reports = [report.report_of(as_it_was), *run_all(recorded.trace, others, runs.jobs)]
    found = fidelity.fidelity(recorded, as_it_was)
    if runs.as_json:
        document = {"fidelity": found, "runs": [report.as_data(one) for one in reports]}
        print(msgspec.json.encode(document).decode())
    else:
        print(f"{fidelity.as_text(found)}\n\n{report.as_table(reports)}")
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
    """What is printed."""
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
