"""SIGSTOP of one process after the other under long answers, and how long each takes to be of use again.

python -m tests.faults.kills.pauses --seconds 20
"""

import argparse
import asyncio
import os
import signal
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NamedTuple

import httpx

from tests.faults.answers import PACE, client_of, settle, start, succeeds, under_way, unserved
from tests.faults.report import Report, Violation, command
from tests.support.processes.fleet import FleetProcess, fleet
from tests.support.processes.restarted import until_healthy

STALLED_S_MAX = 30.0
BEYOND_S = 4.0
"""Answers last so much longer than the pause."""


class Bound(NamedTuple):
    """What a client may see when a process stands still.

    `gap_s` is the longest time without a token, on top of the pause where `stops` says that no tokens can come.
    `served_s` is how long after the pause a new request may fail or wait.
    """

    command_line: str
    stops: bool
    gap_s: float
    served_s: float


BOUNDS = {
    "edge": Bound(" edge ", True, 2.0, 2.0),
    "router": Bound(" router ", False, 2.0, 2.0),
    "worker": Bound("--name worker-0 ", False, 8.0, 2.0),
    "nats-server": Bound("nats-server", True, 4.0, 5.0),
}


class Paused(NamedTuple):
    """What was seen of one pause."""

    gap_s: float
    served_s: float
    problems: list[str]


async def pauses(
    folder: Path, *, seconds: float, kinds: tuple[str, ...] = tuple(BOUNDS), streams: int = 4
) -> Report:
    """Each kind of process in turn, on one fleet."""
    began = time.monotonic()
    lines: list[tuple[str, str]] = [("paused for", f"{seconds:.0f} s")]
    violations: list[Violation] = []
    async with AsyncExitStack() as stack:
        up = await stack.enter_async_context(fleet(folder, "--engine", "sim"))
        client = await stack.enter_async_context(client_of(up.url))
        for kind in kinds:
            bound = BOUNDS[kind]
            seen = await _pause(up, client, bound, seconds, streams)
            most_s = bound.gap_s + (seconds if bound.stops else 0.0)
            lines.append((f"{kind}: longest token gap", f"{seen.gap_s:.2f} s, at most {most_s:.0f}"))
            lines.append((f"{kind}: new request served", f"{seen.served_s:.2f} s after it went on"))
            violations += [Violation(kind, 1, problem) for problem in seen.problems]
            if seen.gap_s > most_s:
                violations.append(Violation(f"{kind}: token gap", 1, f"{seen.gap_s:.2f} s"))
            await until_healthy(up.url, workers=2)
    lines.append(("duration", f"{time.monotonic() - began:.0f} s"))
    return Report("pauses: SIGSTOP under load", lines, violations)


async def _pause(
    up: FleetProcess, client: httpx.AsyncClient, bound: Bound, seconds: float, streams: int
) -> Paused:
    answers = start(client, streams, int((seconds + BEYOND_S) * PACE))
    await under_way(answers)
    pid = up.pids(bound.command_line)[0]
    os.kill(pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(seconds)
    finally:
        os.kill(pid, signal.SIGCONT)
    began = time.monotonic()
    refused = await unserved(lambda: succeeds(client), within_s=bound.served_s)
    served_s = time.monotonic() - began
    problems = [refused] * bool(refused) + await settle(answers, stalled_s=seconds + STALLED_S_MAX)
    return Paused(max(answer.gap_s for answer in answers), served_s, problems)


def main() -> int:
    """The long form."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="how long each process stands still")
    parser.add_argument("--kind", choices=tuple(BOUNDS), action="append")
    parser.add_argument("--streams", type=int, default=16, help="streams at a time")
    given = parser.parse_args()
    kinds = tuple(given.kind or BOUNDS)
    return command(lambda folder: pauses(folder, seconds=given.seconds, kinds=kinds, streams=given.streams))


if __name__ == "__main__":
    sys.exit(main())
