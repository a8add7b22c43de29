"""`python -m tests.bench zoo`: our policies, and a peer's replay where it is installed, on classes of synthetic traffic."""

import sys
from collections.abc import Sequence
from typing import Final

import msgspec

from headwater.ops.bench.report import machine
from headwater.ops.terminal import table
from headwater.ops.whatif.report import GOODPUT_ITL_MS, GOODPUT_TTFT_MS
from headwater.schemas.routing import DEFAULT_POLICY
from tests.bench.bounds.ratios import NOTE
from tests.bench.zoo.bounds import bound_table, to_queueing
from tests.bench.zoo.cells import Plan, plan_of, run_cells
from tests.bench.zoo.compare import OURS, REFERENCE, REFERENCES_AGREE, WORSE_MAX, Cell, behind, compared
from tests.bench.zoo.figures import HIGHER_IS_BETTER, NAMES, Figures
from tests.bench.zoo.options import ZooOptions
from tests.bench.zoo.peer import PeerInstall, find_peer

HEADS: Final = ("reuse", "TTFT mean", "p50", "p99", "ITL", "E2E mean", "p99", "goodput")

NOTES: Final = (
    f"Times in ms. goodput: share of requests with TTFT up to {GOODPUT_TTFT_MS:g} ms and a mean ITL up to "
    f"{GOODPUT_ITL_MS:g} ms; '-' where a replay reports no single requests.",
    "A peer's times are compared relative to its own round robin, scaled to ours: mock engines differ (1.6.1's emits the first "
    "token one decode step earlier). Shares are compared as they are.",
    f"Divided by bounds: {NOTE}",
    f"A ratio is marked '~' if round robin of that peer differs from ours by more than {REFERENCES_AGREE:.0%} in a time: there "
    "the mock engines behave differently, and the comparison is rough.",
)


class ZooReport(msgspec.Struct, frozen=True):
    """All cells. `policy` of ours is compared with the best of all others; `behind` names what is worse by more than `limits`."""

    machine: str
    seed: int
    policy: str
    limits: dict[str, float]
    peers: list[str]
    cells: list[Cell]
    behind: list[str]
    notes: tuple[str, ...] = NOTES


def run(options: ZooOptions, workers: Sequence[int], *, peer: bool, as_json: bool) -> None:
    """Compare `kv` with every other policy and the peers, and print it.

    `peer` without an interpreter: ai-dynamo in our own environment. Raises `ConfigError`.
    """
    plan = plan_of(options, workers)
    pythons = options.peer_python or ((sys.executable,) if peer else ())
    peers = [find_peer(python) for python in pythons]
    show(compare_all(plan, peers), as_json=as_json)


def compare_all(plan: Plan, peers: Sequence[PeerInstall]) -> ZooReport:
    """Run the cells, and compare our policy with all others in each."""
    policy = DEFAULT_POLICY if DEFAULT_POLICY in plan.policies else plan.policies[0]
    cells = [compared(cell, policy) for cell in run_cells(plan, peers)]
    return ZooReport(
        machine(),
        plan.options.seed,
        policy,
        WORSE_MAX,
        [f"Dynamo {one.version}" for one in peers],
        cells,
        list(behind(cells)),
    )


def show(report: ZooReport, *, as_json: bool) -> None:
    """Print it, for people or for programs."""
    if as_json:
        print(msgspec.json.encode(report).decode())
        return
    peers = ", ".join(report.peers) or "no peer"
    print(f"zoo: seed {report.seed}, {peers}; machine {report.machine}")
    for cell in report.cells:
        fleet = f"; {cell.fleet}" if cell.fleet else ""
        print(
            f"\n{cell.name}: {cell.requests:,} requests, {cell.rate:.2f}/s, {cell.blocks:,} blocks each{fleet}"
        )
        rows = [(*_row(row.replay, row.policy, row.figures), *to_queueing(cell, row)) for row in cell.rows]
        heads = ("replay", "policy", *HEADS, "TTFT/bound", "E2E/bound")
        rows += [(replay, "not run", *("-" for _ in heads[2:])) for replay in cell.not_run]
        print(table(heads, rows))
        for replay, reason in cell.not_run.items():
            print(f"{replay} did not run: {reason}")
    print(f"\n{report.policy} of {OURS} divided by the best of all others (and which that is):")
    print(table(("traffic", "workers", "load", *HEADS), [_ratios(cell) for cell in report.cells]))
    print(f"\n{report.policy} of {OURS} divided by bounds:")
    print(bound_table(report.cells, report.policy))
    print("\n".join(report.notes))
    limits = ", ".join(f"{name} {limit:g}" for name, limit in report.limits.items())
    print(f"Worse than the limits ({limits}):")
    print("\n".join(f"behind: {one}" for one in report.behind) or "nothing")


def _row(replay: str, policy: str, figures: Figures) -> tuple[str, ...]:
    return replay, policy, *(_figure(name, getattr(figures, name)) for name in NAMES)


def _figure(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    if name in HIGHER_IS_BETTER:
        return f"{value:.3f}"
    return f"{value:.2f}" if name == "itl" else f"{value:,.0f}"


def _ratios(cell: Cell) -> tuple[object, ...]:
    found = (cell.best.get(name) for name in NAMES)
    shown = (
        f"{'~' if one.rough else ''}{one.ratio:.3f} {_short(one.label)}" if one else "-" for one in found
    )
    return cell.traffic, cell.workers, cell.load, *shown


def _short(label: str) -> str:
    return label.removeprefix("Dynamo ").replace(REFERENCE, "rr").replace("least_loaded", "ll")
