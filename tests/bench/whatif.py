"""`python -m tests.bench whatif`: the router with its default settings compared with a peer's, on a public trace.

The baseline is round robin, which needs no router: if the simulator is correct its rows agree. Then the same engines with
Headwater's router, with the same settings in every row.
"""

from collections.abc import Iterator, Sequence

import msgspec

from headwater.ops.bench.report import machine
from headwater.ops.bench.trace import read
from headwater.ops.terminal import table
from headwater.ops.whatif.command import run_all, without_queue
from headwater.ops.whatif.report import WhatifReport
from headwater.ops.whatif.setup import Setup
from tests.bench.bounds.bound import TraceBounds, bounds_of
from tests.bench.bounds.ratios import HEADS, NOTE, bound_ratios
from tests.bench.whatif_peer import (
    AGREEMENT,
    ROWS,
    SOURCE,
    TARGETS,
    TARGETS_ROW,
    WORSE_MAX,
    PeerFigures,
    PeerRow,
)
from tests.tidy.source import ROOT

TRACE = ROOT / "examples" / "data" / "conversation_trace.jsonl.gz"


class Compared(msgspec.Struct, frozen=True):
    """One row: theirs, ours, ours divided by theirs, and the bounds of this trace on this fleet."""

    workers: int
    blocks: int
    speed: float
    policy: str
    theirs: dict[str, float]
    ours: dict[str, float]
    ratio: dict[str, float]
    bounds: TraceBounds
    wall_s: float
    decisions_per_s: float
    digest: str


class Comparison(msgspec.Struct, frozen=True):
    """All rows. `furthest` is the greatest deviation of a round-robin figure from the peer's, as a share of it; `missed` names
    what falls short of the targets."""

    source: str
    trace: str
    machine: str
    rows: list[Compared]
    furthest: float
    missed: list[str]


def bench(rows: Sequence[PeerRow] = ROWS, *, requests: int = 0, jobs: int = 1) -> Comparison:
    """Run all rows. With `requests` only so many of the trace: then nothing is comparable."""
    given = [
        Setup(policy=row.policy, workers=row.workers, blocks=row.blocks, speed=row.speed, requests=requests)
        for row in rows
    ]
    setups = [without_queue(setup) for setup in given]
    trace = read(TRACE)
    reports = run_all(trace, setups, jobs)
    compared = [
        _compare(row, ours, bounds_of(trace, setup))
        for row, ours, setup in zip(rows, reports, setups, strict=True)
    ]
    furthest = [
        abs(ratio - 1) for row in compared if row.policy == "round_robin" for ratio in row.ratio.values()
    ]
    return Comparison(
        SOURCE, TRACE.name, machine(), compared, max(furthest, default=0.0), list(_missed(rows, compared))
    )


def _missed(rows: Sequence[PeerRow], compared: Sequence[Compared]) -> Iterator[str]:
    for row, one in zip(rows, compared, strict=True):
        if row.policy == "round_robin":
            continue
        where = f"{row.workers} workers of {row.blocks} blocks, speed {row.speed:g}"
        for name, ratio in one.ratio.items():
            worse = 1 / ratio if name == "reuse" and ratio else ratio
            if worse > WORSE_MAX:
                yield f"{where}: {name} is {ratio:.3f} of theirs"
        for name, target in TARGETS.items() if row is TARGETS_ROW else ():
            if name == "reuse" and one.ours[name] < target:
                yield f"{where}: {name} is {one.ours[name]:.4f}, the goal is at least {target}"
            elif name != "reuse" and one.ratio[name] > target:
                yield f"{where}: {name} is {one.ratio[name]:.3f} of theirs, the goal is at most {target}"


def _compare(row: PeerRow, report: WhatifReport, bounds: TraceBounds) -> Compared:
    ours = PeerFigures(
        report.reuse,
        report.ttft_ms.mean,
        report.ttft_ms.p50,
        report.ttft_ms.p90,
        report.ttft_ms.p99,
        report.itl_ms,
        report.e2e_ms.mean,
    )
    return Compared(
        row.workers,
        row.blocks,
        row.speed,
        row.policy,
        row.theirs._asdict(),
        ours._asdict(),
        {
            name: mine / theirs
            for name, mine, theirs in zip(PeerFigures._fields, ours, row.theirs, strict=True)
        },
        bounds,
        report.wall_s,
        report.decisions_per_s,
        report.digest,
    )


def show(comparison: Comparison, *, as_json: bool) -> None:
    """Print it, for people or for programs."""
    if as_json:
        print(msgspec.json.encode(comparison).decode())
        return
    print(f"whatif: {comparison.trace}, compared with {comparison.source}; machine {comparison.machine}")
    heads = ("reuse", "TTFT mean", "p50", "p90", "p99", "ITL", "E2E")
    print(
        table(
            ("workers", "blocks", "speed", "policy", *heads, "decisions/s", "wall s"),
            [
                (*_setting(row), *_cells(row), f"{row.decisions_per_s:,.0f}", f"{row.wall_s:.1f}")
                for row in comparison.rows
            ],
        )
    )
    agrees = "agree" if comparison.furthest <= AGREEMENT else "DO NOT AGREE"
    print(
        "each cell: ours (ours divided by theirs); times in ms. Round-robin rows "
        f"{agrees} within {AGREEMENT:.0%}: furthest {comparison.furthest:.1%}"
    )
    print("\n".join(f"missed: {one}" for one in comparison.missed) or "all targets are met")
    rows = [row for row in comparison.rows if row.policy != "round_robin"]
    print("\nheadwater divided by bounds:")
    print(
        table(
            ("workers", "blocks", "speed", "policy", *HEADS),
            [
                (
                    *_setting(row),
                    *bound_ratios(row.bounds, row.ours["reuse"], row.ours["ttft_mean"], row.ours["e2e_mean"]),
                )
                for row in rows
            ],
        )
    )
    print(NOTE)


def _setting(row: Compared) -> tuple[object, ...]:
    return row.workers, row.blocks, f"{row.speed:g}", row.policy


def _cells(row: Compared) -> list[str]:
    return [f"{_figure(name, value)} ({row.ratio[name]:.3f})" for name, value in row.ours.items()]


def _figure(name: str, value: float) -> str:
    if name == "reuse":
        return f"{value:.3f}"
    return f"{value:.2f}" if name == "itl_mean" else f"{value:,.0f}"
