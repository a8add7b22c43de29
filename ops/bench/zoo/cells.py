"""Run the cells: write their traces, simulate them with our router, and let peers replay the same files."""

import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Final, NamedTuple, get_args

import msgspec

from headwater.engines.sim.step_time import StepTime
from headwater.ops.bench.zoo.compare import OURS, REFERENCE, Cell, Row
from headwater.ops.bench.zoo.figures import figures_of
from headwater.ops.bench.zoo.load import LOADS, demand_of, requests_per_s, trace_at
from headwater.ops.bench.zoo.options import ZooOptions
from headwater.ops.bench.zoo.peer import PeerInstall, PeerRun, replay
from headwater.ops.bench.zoo.traffic import CLASSES, generate
from headwater.ops.config.errors import ConfigError
from headwater.ops.process.kernels import compile_kernels
from headwater.ops.whatif.command import run_one, without_queue
from headwater.ops.whatif.setup import Setup
from headwater.ops.whatif.trace import read, write
from headwater.router.decision.names import PolicyName
from headwater.schemas.events.route import Weights

WORKERS: Final = (8, 32, 128)

NOT_COMPARED: Final = ("random", "power_of_two", "session", "direct")
"""Policies that are not run unless they are named."""


class Plan(NamedTuple):
    """What is run."""

    classes: list[str]
    loads: list[str]
    policies: list[str]
    workers: Sequence[int]
    options: ZooOptions


def plan_of(options: ZooOptions, workers: Sequence[int]) -> Plan:
    """The cells and policies that options choose. Raises `ConfigError` for unknown names."""
    every = get_args(PolicyName)
    default = [name for name in every if name not in NOT_COMPARED]
    policies = _chosen("--policies", options.policies, every, default)
    return Plan(
        _chosen("--classes", options.classes, list(CLASSES)),
        _chosen("--loads", options.loads, list(LOADS)),
        policies if REFERENCE in policies else [*policies, REFERENCE],
        workers or WORKERS,
        options,
    )


def _chosen(flag: str, text: str, every: Sequence[str], default: Sequence[str] = ()) -> list[str]:
    names = [name.strip() for name in text.split(",")] if text else list(default or every)
    unknown = [name for name in names if name not in every]
    if unknown:
        raise ConfigError(f"{flag} {text}: unknown {', '.join(unknown)}; choose from {', '.join(every)}")
    return list(dict.fromkeys(names))


class Variant(NamedTuple):
    """How a trace is routed: one policy of ours with these weights, under this name in tables."""

    name: str
    policy: str
    weights: Weights = Weights()


def run_cells(plan: Plan, peers: Sequence[PeerInstall], further: Sequence[Variant] = ()) -> list[Cell]:
    """All cells, with our rows first: one for each policy, and one for each of the `further` variants.

    The traces are retained in the folder of `--write`, if that is given.
    """
    variants = [*(Variant(policy, policy) for policy in plan.policies), *further]
    if plan.options.write:
        return _run_in(Path(plan.options.write), plan, peers, variants)
    with tempfile.TemporaryDirectory() as folder:
        return _run_in(Path(folder), plan, peers, variants)


def _run_in(
    folder: Path, plan: Plan, peers: Sequence[PeerInstall], variants: Sequence[Variant]
) -> list[Cell]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        cells = list(_write_traces(folder, plan))
    except OSError as error:
        raise ConfigError(f"--write {folder}: {error.strerror}") from error
    files = [folder / trace_file(cell) for cell in cells]
    # Peers first: they take seconds, so that a failure of theirs ends the command early.
    runs = [PeerRun(str(file), cell.workers, cell.blocks) for file, cell in zip(files, cells, strict=True)]
    theirs = [(f"Dynamo {peer.version}", replay(peer, runs)) for peer in peers]
    ours = _simulate_all(cells, files, variants, plan.options.jobs)
    return [
        msgspec.structs.replace(
            cell,
            rows=[
                *mine,
                *(Row(name, mode, figures) for name, found in theirs for mode, figures in found[at].items()),
            ],
        )
        for at, (cell, mine) in enumerate(zip(cells, ours, strict=True))
    ]


def trace_file(cell: Cell) -> str:
    """The name of a cell's trace."""
    return f"{cell.traffic}.{cell.workers}.{cell.load}.jsonl"


def _write_traces(folder: Path, plan: Plan) -> Iterator[Cell]:
    step_time = StepTime()
    for workers in plan.workers:
        for name in plan.classes:
            arrivals = generate(name, workers * plan.options.requests, plan.options.seed)
            demand = demand_of(arrivals, step_time)
            for load in plan.loads:
                rate = workers * requests_per_s(demand, plan.options.blocks, LOADS[load], step_time)
                cell = Cell(name, load, workers, plan.options.blocks, len(arrivals), rate, [])
                write(folder / trace_file(cell), trace_at(name, arrivals, rate))
                yield cell


def _simulate_all(
    cells: Sequence[Cell], files: Sequence[Path], variants: Sequence[Variant], jobs: int
) -> list[list[Row]]:
    compile_kernels()
    each = [variants] * len(cells)
    if jobs <= 1 or len(cells) == 1:
        return list(map(_simulate, cells, files, each))
    # Forked after the kernels are loaded, so that they start at once.
    with ProcessPoolExecutor(jobs, mp_context=get_context("fork")) as pool:
        return list(pool.map(_simulate, cells, files, each))


def _simulate(cell: Cell, file: Path, variants: Sequence[Variant]) -> list[Row]:
    trace = read(file)
    rows = []
    for one in variants:
        setup = Setup(policy=one.policy, workers=cell.workers, blocks=cell.blocks, weights=one.weights)
        rows.append(Row(OURS, one.name, figures_of(run_one(trace, without_queue(setup)).report)))
    return rows
