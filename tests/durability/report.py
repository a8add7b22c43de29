"""The table that every run of this folder prints, and its exit code."""

import asyncio
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

import uvloop

from headwater.engines import logs
from tests.durability.history import Violation


class Report(NamedTuple):
    """Lines of (what, number with its unit), and what was wrong."""

    title: str
    lines: list[tuple[str, str]]
    violations: list[Violation]

    def text(self) -> str:
        """As printed."""
        width = max(len(what) for what, _ in self.lines)
        rows = [f"  {what:<{width}}  {value}" for what, value in self.lines]
        verdict = [f"  VIOLATION {one.kind} x {one.cases}: {one.example}" for one in self.violations]
        return "\n".join([self.title, *rows, *(verdict or [f"  {'violations':<{width}}  0"])])


def command(run: Callable[[Path], Awaitable[Report]]) -> int:
    """Run with a folder of its own, print the table; 1 on a violation."""
    logs.configure("error")
    with (
        tempfile.TemporaryDirectory(prefix="headwater-durability-") as folder,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        report = runner.run(_run(run, Path(folder)))
    print(report.text(), flush=True)
    return 1 if report.violations else 0


async def _run(run: Callable[[Path], Awaitable[Report]], folder: Path) -> Report:
    return await run(folder)
