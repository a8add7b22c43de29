"""`python -m tests.bench signal-age`: what it costs that events of workers arrive late, with and without credit for routed prompts.

KV and load events reach the log after a delay. A prompt that is being computed somewhere is then invisible for longer, and
the load is that of the past. Each figure is the mean over seeds, because runs that differ in one early decision differ by some per cent.
"""

from collections.abc import Iterator, Sequence
from typing import Final, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from headwater.ops.bench.report import machine
from headwater.ops.bench.trace import Trace
from headwater.ops.start.actor import compile_kernels
from headwater.ops.terminal import table
from headwater.ops.whatif.report import WhatifReport, report_of
from headwater.ops.whatif.run import run
from headwater.ops.whatif.setup import Setup
from tests.bench.staleness.traffic import CONVERSATION, CONVERSATION_SPEED, traces

CLASSES: Final = (CONVERSATION, "agents", "documents", "hot", "tenants", "cold")
DELAYS_MS: Final = (0.0, 50.0, 100.0, 250.0, 500.0, 1_000.0)
FLEET: Final = Setup(workers=8, blocks=4_000)
SHARE: Final = 0.8
REQUESTS: Final = 2_000
SEEDS: Final = (1, 2)

TARGET_MS: Final = 250.0
WORSE_MAX: Final = 1.03
"""With credit, a delay of `TARGET_MS` is to cost less than this."""

FIGURES: Final = ("hit_share", "ttft_mean", "ttft_p99", "itl_mean", "e2e_mean")
TARGETS: Final = ("ttft_mean", "itl_mean", "e2e_mean")
"""What the target is about. The p99 of so few requests is too uncertain."""

Credit = Literal["on", "off"]
CREDIT: Final[tuple[Credit, ...]] = ("on", "off")

F64 = NDArray[np.float64]


class DelayCost(msgspec.Struct, frozen=True):
    """One row: the `FIGURES`, means over seeds in milliseconds, and each divided by its value without delay.

    `hit_share` is that of all prompts' blocks. `error` is the standard error of the ratios, over the seeds; 0 with one seed.
    """

    traffic: str
    credit: str
    delay_ms: float
    figures: dict[str, float]
    ratio: dict[str, float]
    error: dict[str, float]


class SignalAge(msgspec.Struct, frozen=True):
    """All rows. `missed`: what costs too much at `TARGET_MS` with credit."""

    machine: str
    requests: int
    seeds: int
    share: float
    rows: list[DelayCost]
    missed: list[str]


def bench(
    classes: Sequence[str] = CLASSES,
    delays_ms: Sequence[float] = DELAYS_MS,
    *,
    requests: int = REQUESTS,
    seeds: Sequence[int] = SEEDS,
) -> SignalAge:
    """Run every class with every delay; the first delay is what the others are compared with. The public trace runs whole."""
    compile_kernels()
    rows: list[DelayCost] = []
    for name in classes:
        given = traces(name, FLEET, SHARE, requests, seeds)
        for credit in CREDIT:
            rows += _rows(name, credit, delays_ms, given)
    missed = [text for row in rows for text in _missed(row)]
    return SignalAge(machine(), requests, len(seeds), SHARE, rows, missed)


def _rows(name: str, credit: Credit, delays_ms: Sequence[float], given: Sequence[Trace]) -> list[DelayCost]:
    found = []
    base: F64 | None = None
    for delay_ms in delays_ms:
        setup = msgspec.structs.replace(FLEET, event_delay_ms=delay_ms, credit=credit)
        figures: F64 = np.array([_figures(report_of(run(trace, setup))) for trace in given])
        base = figures if base is None else base
        found.append(_compare(name, credit, delay_ms, figures, base))
    return found


def _figures(report: WhatifReport) -> tuple[float, ...]:
    """In the order of `FIGURES`."""
    return (report.reuse, report.ttft_ms.mean, report.ttft_ms.p99, report.itl_ms, report.e2e_ms.mean)


def _compare(name: str, credit: Credit, delay_ms: float, figures: F64, base: F64) -> DelayCost:
    """`figures` and `base`: a row for each seed."""
    mean, before = figures.mean(0), base.mean(0)
    # Where nothing is shared nothing is cached either.
    ratio = np.divide(mean, before, out=np.ones_like(mean), where=before > 0)
    each = np.divide(figures, base, out=np.ones_like(figures), where=base > 0)
    error = each.std(0, ddof=1) / len(each) ** 0.5 if len(each) > 1 else np.zeros_like(mean)
    return DelayCost(name, credit, delay_ms, _named(mean), _named(ratio), _named(error))


def _named(values: F64) -> dict[str, float]:
    return dict(zip(FIGURES, values.tolist(), strict=True))


def _missed(row: DelayCost) -> Iterator[str]:
    if row.credit == "on" and row.delay_ms == TARGET_MS:
        for name in TARGETS:
            if row.ratio[name] > WORSE_MAX:
                yield f"{row.traffic}, {row.delay_ms:g} ms: {name} is {row.ratio[name]:.3f} of that without delay (± {row.error[name]:.3f})"


def show(found: SignalAge, *, as_json: bool) -> None:
    """Print it, for people or for programs."""
    if as_json:
        print(msgspec.json.encode(found).decode())
        return
    print(
        f"signal-age: {FLEET.workers} workers of {FLEET.blocks} blocks, {found.share:.0%} of their capacity, "
        f"{found.requests} requests and {found.seeds} seeds a class, the public trace at speed {CONVERSATION_SPEED:g}; "
        f"machine {found.machine}"
    )
    print(
        table(
            ("traffic", "credit", "delay ms", "hit share", "TTFT mean", "p99", "ITL", "E2E"),
            [
                (row.traffic, row.credit, f"{row.delay_ms:g}", *(_cell(row, name) for name in FIGURES))
                for row in found.rows
            ],
        )
    )
    print("each cell: the mean over seeds (divided by the row without delay); times in ms")
    print(
        "\n".join(f"missed: {one}" for one in found.missed)
        or f"with credit a delay of {TARGET_MS:g} ms costs less than {WORSE_MAX - 1:.0%} in {', '.join(TARGETS)}"
    )


def _cell(row: DelayCost, name: str) -> str:
    value = row.figures[name]
    text = (
        f"{value:.3f}" if name == "hit_share" else f"{value:.2f}" if name == "itl_mean" else f"{value:,.0f}"
    )
    return f"{text} ({row.ratio[name]:.3f})"
