"""Processes of a fleet that tests signal: found by name in whatever life they are in."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tests.support.processes.fleet import FleetProcess, command_line

GONE_S_MAX = 10.0
"""A killed process is gone within this, also on a loaded machine."""


class Victim(NamedTuple):
    """A process that may be signalled; `pid` is 0 while it is down."""

    name: str
    pid: Callable[[], int]


def victim_of(up: FleetProcess, name: str) -> Victim:
    """A process that `headwater up` keeps alive."""
    what = name if name == "nats-server" else f"--name {name} "
    return Victim(name, lambda: next(iter(up.pids(what)), 0))


def worker_names(up: FleetProcess) -> list[str]:
    """The workers that run as processes of their own."""
    names = set()
    for pid in up.pids(" engine "):
        words = command_line(pid).split()
        names.add(words[words.index("--name") + 1])
    return sorted(names)


async def gone(pid: int, within_s: float = GONE_S_MAX) -> float:
    """Wait until a killed process was reaped, so that its last thread has closed its sockets; the time of that."""
    deadline = time.monotonic() + within_s
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    return time.monotonic()
