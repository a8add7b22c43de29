"""Run the cells: write their traces, simulate them with our router, and let peers replay the same files."""

import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Final, NamedTuple, get_args

import msgspec

from headwater.engines.sim import StepTime
from headwater.ops.bench.trace import Trace, read, write
from headwater.ops.config.setting import ConfigError
from headwater.ops.start.actor import compile_kernels
from headwater.ops.whatif.command import run_one
from headwater.schemas.routing import PolicyName, Weights
from tests.bench.bounds.bound import TraceBounds, bounds_of
from tests.bench.zoo.compare import OURS, REFERENCE, Cell, Row
from tests.bench.zoo.figures import Figures, figures_of
from tests.bench.zoo.fleets import ZooFleet, plan_traffic
from tests.bench.zoo.load import LOADS, demand_of, trace_at
from tests.bench.zoo.options import ZooOptions
from tests.bench.zoo.peer import PeerInstall, PeerRun, replay
from tests.bench.zoo.traffic import CLASSES, generate

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


class PlannedCell(NamedTuple):
    """A cell without results, its trace and its workers."""

    cell: Cell
    file: Path
    fleet: ZooFleet


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
        planned = list(_write_traces(folder, plan))
    except OSError as error:
        raise ConfigError(f"--write {folder}: {error.strerror}") from error
    # Peers first: they take seconds, so that a failure of theirs ends the command early.
    theirs = [(f"Dynamo {peer.version}", _replayed(peer, planned)) for peer in peers]
    ours = _simulate_all(planned, variants, plan.options.jobs)
    return [
        msgspec.structs.replace(
            one.cell,
            rows=[
                *mine,
                *(Row(name, mode, figures) for name, found in theirs for mode, figures in found[at].items()),
            ],
            bounds=_bounds(one),
            not_run={name: one.fleet.not_replayed for name, _ in theirs if one.fleet.not_replayed},
        )
        for at, (one, mine) in enumerate(zip(planned, ours, strict=True))
    ]


def _replayed(peer: PeerInstall, planned: Sequence[PlannedCell]) -> list[dict[str, Figures]]:
    """The figures of a peer's settings for each cell; none for a cell whose fleet it cannot have."""
    replayed = [one for one in planned if not one.fleet.not_replayed]
    runs = [
        PeerRun(
            str(one.file),
            one.fleet.workers,
            one.cell.blocks,
            one.fleet.prefill_workers,
            one.fleet.decode_workers,
        )
        for one in replayed
    ]
    found = dict(zip((one.file for one in replayed), replay(peer, runs), strict=True)) if runs else {}
    return [found.get(one.file, {}) for one in planned]


def trace_file(cell: Cell) -> str:
    """The name of a cell's trace."""
    return f"{cell.traffic}.{cell.workers}.{cell.load}.jsonl"


def _write_traces(folder: Path, plan: Plan) -> Iterator[PlannedCell]:
    step_time, blocks = StepTime(), plan.options.blocks
    for workers in plan.workers:
        for name in plan.classes:
            arrivals = generate(name, workers * plan.options.requests, plan.options.seed)
            demand = demand_of(arrivals, step_time)
            for load in plan.loads:
                traffic = plan_traffic(name, workers, demand, blocks, LOADS[load], len(arrivals))
                cell = Cell(
                    name,
                    load,
                    workers,
                    blocks,
                    len(arrivals),
                    traffic.rate,
                    [],
                    fleet=traffic.fleet.description,
                )
                file = folder / trace_file(cell)
                write(file, trace_at(name, arrivals, traffic.rate))
                yield PlannedCell(cell, file, traffic.fleet)


def _simulate_all(planned: Sequence[PlannedCell], variants: Sequence[Variant], jobs: int) -> list[list[Row]]:
    compile_kernels()
    _read.cache_clear()
    count = len(variants)
    cells = [one for one in planned for _ in variants]
    each = [*variants] * len(planned)
    if jobs <= 1 or len(cells) == 1:
        rows = list(map(_simulate, cells, each))
    else:
        # Forked after the kernels are loaded, so that they start at once.
        with ProcessPoolExecutor(jobs, mp_context=get_context("fork")) as pool:
            rows = list(pool.map(_simulate, cells, each))
    return [rows[first : first + count] for first in range(0, len(rows), count)]


@lru_cache(maxsize=1)
def _read(file: Path) -> Trace:
    """The trace of a cell, once for all of its variants."""
    return read(file)


def _simulate(planned: PlannedCell, variant: Variant) -> Row:
    setup = planned.fleet.setup(variant.policy, planned.cell.blocks, variant.weights)
    report = run_one(_read(planned.file), setup)
    return Row(OURS, variant.name, figures_of(report), report.requests)


def _bounds(planned: PlannedCell) -> TraceBounds:
    return bounds_of(_read(planned.file), planned.fleet.setup(REFERENCE, planned.cell.blocks, Weights()))
