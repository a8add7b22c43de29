"""`--study frontier`: what `kv` gives for values of `crowding`, the weight that trades the time to first token for that between tokens.

A peer's point is outside the curve if no value of the weight gives both times at most `TOLERANCE` above the peer's.
"""

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from headwater.ops.bench.report import machine
from headwater.ops.bench.zoo.cells import Plan, Variant, run_cells
from headwater.ops.bench.zoo.compare import (
    OURS,
    REFERENCE,
    REFERENCES_AGREE,
    Cell,
    Row,
    deviation_of,
    scale_to_ours,
)
from headwater.ops.bench.zoo.peer import PeerInstall
from headwater.ops.process.text_table import table
from headwater.schemas.events.route import Weights

CROWDING: Final = (0.0, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0)

TOLERANCE: Final = 0.01
"""As for the comparison of means."""


class Point(msgspec.Struct, frozen=True):
    """One replay of a cell: mean time to first token, between tokens and of the whole answer, and the goodput if it is known.

    Times are milliseconds; a peer's are scaled to ours by its round robin. `outside`: beyond our curve. `rough`: the replays differ
    by more than the comparison allows even without a router.
    """

    name: str
    ttft_mean: float
    itl: float
    e2e_mean: float
    goodput: float | None
    outside: bool = False
    rough: bool = False


class Frontier(msgspec.Struct, frozen=True):
    """The curve of one cell, and the other replays."""

    cell: str
    curve: list[Point]
    others: list[Point]


class FrontierReport(msgspec.Struct, frozen=True):
    """The curves of all cells; `default` is the weight's default."""

    machine: str
    seed: int
    weight: str
    default: float
    tolerance: float
    frontiers: list[Frontier]


def study(plan: Plan, peers: Sequence[PeerInstall]) -> FrontierReport:
    """Run all cells with every value of the weight."""
    default = Weights()
    variants = [
        Variant(f"crowding {value:g}", "kv", msgspec.structs.replace(default, crowding=value))
        for value in sorted({*CROWDING, default.crowding})
    ]
    names = {one.name for one in variants}
    # The default value is among the variants.
    plan = plan._replace(policies=[one for one in plan.policies if one != "kv"])
    cells = run_cells(plan, peers, variants)
    return FrontierReport(
        machine(),
        plan.options.seed,
        "crowding",
        default.crowding,
        TOLERANCE,
        [trace_curve(cell, names) for cell in cells],
    )


def trace_curve(cell: Cell, names: set[str]) -> Frontier:
    """The curve made of our rows with these names, and all other replays next to it."""
    curve = [_point(cell, row) for row in cell.rows if row.replay == OURS and row.policy in names]
    others = []
    for row in cell.rows:
        if (row.replay == OURS and row.policy in names) or (row.replay != OURS and row.policy == REFERENCE):
            continue
        point = _point(cell, row)
        others.append(msgspec.structs.replace(point, outside=not _covers(curve, point)))
    return Frontier(cell.name, curve, others)


def _covers(curve: Sequence[Point], other: Point) -> bool:
    limit = 1 + TOLERANCE
    return any(one.ttft_mean <= limit * other.ttft_mean and one.itl <= limit * other.itl for one in curve)


def _point(cell: Cell, row: Row) -> Point:
    ttft, itl, e2e = (scale_to_ours(cell, row, name) or 0.0 for name in ("ttft_mean", "itl", "e2e_mean"))
    rough = deviation_of(cell, row.replay) > REFERENCES_AGREE
    return Point(row.label, ttft, itl, e2e, row.figures.goodput, rough=rough)


def show(report: FrontierReport, *, as_json: bool) -> None:
    """Print it, for people or for programs."""
    if as_json:
        print(msgspec.json.encode(report).decode())
        return
    print(f"whatif --zoo --study frontier: seed {report.seed}, machine {report.machine}")
    for one in report.frontiers:
        print(f"\n{one.cell}:")
        rows = [_row(point, report) for point in (*one.curve, *one.others)]
        print(table(("kv, or another", "TTFT mean", "ITL", "E2E mean", "goodput", ""), rows))
    print(
        f"\nTimes in ms. outside: no value of {report.weight} has both TTFT mean and ITL within {report.tolerance:.0%} of it or lower; "
        "'~' marks a peer whose round robin differs from ours by more than 5% in a time."
    )
    print("\n".join(outside(report)) or "nothing is outside")


def outside(report: FrontierReport) -> Iterator[str]:
    """The replays beyond our curves, in words."""
    for one in report.frontiers:
        for point in one.others:
            if point.outside:
                yield f"outside: {one.cell}: {point.name}{' (rough)' if point.rough else ''}"


def _row(point: Point, report: FrontierReport) -> tuple[str, ...]:
    mark = "outside" if point.outside else ""
    if point.name == f"{report.weight} {report.default:g}":
        mark = "default"
    goodput = "-" if point.goodput is None else f"{point.goodput:.3f}"
    rough = "~" if point.rough else ""
    return (
        rough + point.name,
        f"{point.ttft_mean:,.1f}",
        f"{point.itl:.2f}",
        f"{point.e2e_mean:,.0f}",
        goodput,
        mark,
    )
