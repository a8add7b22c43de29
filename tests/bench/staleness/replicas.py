"""`python -m tests.bench replicas`: several routers on one log, compared with one. Do they reuse as much, and how often do they disagree?

A router knows what the log holds, less what it has not read yet: for some milliseconds the decisions of the others are unknown to it. At most
as many as are made in that time, rate times delay, can be. Every decision is made again by a single router without
delay, which shows how many differ. In the run with the most routers one is killed and returns.
"""

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec
import numpy as np

from headwater.ops.bench.report import machine
from headwater.ops.bench.trace import Trace
from headwater.ops.start.actor import compile_kernels
from headwater.ops.terminal import table
from headwater.ops.whatif.report import report_of
from headwater.ops.whatif.run import run
from headwater.ops.whatif.setup import Setup
from tests.bench.staleness.traffic import traces

DELAY_MS: Final = 5.0
FLEET: Final = Setup(workers=120, blocks=2_000, router_delay_ms=DELAY_MS, agreement=True)
TRAFFIC: Final = "agents"
SHARE: Final = 0.45

HIT_SHARE_MIN: Final = 0.95
"""Of a single router's."""


class Replicas(msgspec.Struct, frozen=True):
    """One row. Times are milliseconds, `different` and the hit share are shares.

    `different`: decisions for another worker than a single router without delay would have chosen. `unseen`: decisions of others that
    the router had not read, the mean and maximum over decisions.
    """

    routers: int
    requests: int
    hit_share: float
    ratio: float
    ttft_ms: float
    e2e_ms: float
    different: float
    unseen: float
    unseen_max: int
    wall_s: float


class Returned(msgspec.Struct, frozen=True):
    """A router that was killed and returned: decisions after it, and those that differ from its twin's, which lived on."""

    routers: int
    state_equal: bool
    decisions: int
    different: int


class ReplicasReport(msgspec.Struct, frozen=True):
    """All rows. `bound`: the most requests that arrive within the delay of the slowest router."""

    machine: str
    traffic: str
    rate: float
    bound: int
    rows: list[Replicas]
    returned: Returned
    missed: list[str]


def bench(counts: Sequence[int], *, requests: int, fleet: Setup = FLEET) -> ReplicasReport:
    """Run the traffic with each number of routers; the first is what the others are compared with."""
    compile_kernels()
    [trace] = traces(TRAFFIC, fleet, SHARE, requests, (1,))
    seconds = trace.requests[-1].arrival_ns / 1e9
    rows: list[Replicas] = []
    for count in counts:
        rows.append(_row(trace, msgspec.structs.replace(fleet, routers=count), rows))
    returned = _returned(trace, msgspec.structs.replace(fleet, routers=max(*counts, 2), agreement=False))
    bound = most_within(trace, round(fleet.router_delay_ms * 1e6))
    return ReplicasReport(
        machine(),
        TRAFFIC,
        len(trace.requests) / seconds,
        bound,
        rows,
        returned,
        list(_missed(rows, returned, bound)),
    )


def _row(trace: Trace, setup: Setup, before: Sequence[Replicas]) -> Replicas:
    ran = run(trace, setup)
    report, agreement = report_of(ran), ran.routers.agreement
    assert agreement is not None
    return Replicas(
        setup.routers,
        report.requests,
        report.reuse,
        report.reuse / before[0].hit_share if before else 1.0,
        report.ttft_ms.mean,
        report.e2e_ms.mean,
        agreement.different / max(1, agreement.decisions),
        agreement.unseen_total / max(1, agreement.decisions),
        agreement.unseen_max,
        report.wall_s,
    )


def _returned(trace: Trace, setup: Setup) -> Returned:
    """A run in which the first router is killed after a third of the trace."""
    kill_s = trace.requests[-1].arrival_ns / 3e9
    restart = run(trace, msgspec.structs.replace(setup, restart_s=kill_s)).routers.restart
    assert restart is not None
    return Returned(setup.routers, restart.states_equal, restart.decisions, restart.different)


def most_within(trace: Trace, delay_ns: int) -> int:
    """The most requests that arrive within any time of this length."""
    at = np.array([request.arrival_ns for request in trace.requests], np.int64)
    return int((np.searchsorted(at, at + delay_ns, side="right") - np.arange(len(at))).max(initial=0))


def _missed(rows: Sequence[Replicas], returned: Returned, bound: int) -> Iterator[str]:
    for row in rows:
        if row.ratio < HIT_SHARE_MIN:
            yield f"{row.routers} routers: the hit share is {row.ratio:.3f} of that of {rows[0].routers}"
        if row.unseen_max > bound:
            yield f"{row.routers} routers: {row.unseen_max} decisions unseen, more than the {bound} that arrive within the delay"
    if returned.different or not returned.state_equal or not returned.decisions:
        yield f"the router that returned made {returned.different} of {returned.decisions} decisions differently"


def show(found: ReplicasReport, *, as_json: bool) -> None:
    """Print it, for people or for programs."""
    if as_json:
        print(msgspec.json.encode(found).decode())
        return
    print(
        f"replicas: {FLEET.workers} workers of {FLEET.blocks} blocks, {found.rows[0].requests:,} requests of {found.traffic}, "
        f"{found.rate:,.0f}/s; a message is folded within {FLEET.router_delay_ms:g} ms; machine {found.machine}"
    )
    heads = (
        "routers",
        "hit share",
        "of one router's",
        "TTFT mean ms",
        "E2E mean ms",
        "other worker",
        "unseen mean",
        "max",
    )
    print(
        table(
            (*heads, "wall s"),
            [
                (
                    row.routers,
                    f"{row.hit_share:.4f}",
                    f"{row.ratio:.4f}",
                    f"{row.ttft_ms:,.1f}",
                    f"{row.e2e_ms:,.0f}",
                    f"{row.different:.2%}",
                    f"{row.unseen:.2f}",
                    row.unseen_max,
                    f"{row.wall_s:.0f}",
                )
                for row in found.rows
            ],
        )
    )
    back = found.returned
    print(
        f"other worker: decisions that a single router without delay would have made otherwise. unseen: decisions of others in flight, "
        f"at most the {found.bound} requests that arrive within the delay\n"
        f"one of {back.routers} routers was killed and returned from a snapshot and the log: its state "
        f"{'equals' if back.state_equal else 'DIFFERS FROM'} that of its twin, which lived on, and {back.different} of its "
        f"{back.decisions:,} decisions since differ"
    )
    print("\n".join(f"missed: {one}" for one in found.missed) or "all targets are met")
