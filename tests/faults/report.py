"""The table that every run of faults prints, and of the checks of durability, and its exit code."""

import asyncio
import shutil
import sys
import tempfile
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, NamedTuple

import uvloop

from headwater.engines import logs


class Violation(NamedTuple):
    """Something that may not happen: what, how often, and one case of it."""

    what: str
    cases: int
    example: str


class Report(NamedTuple):
    """Lines of (what, number with its unit), and what was wrong."""

    title: str
    lines: list[tuple[str, str]]
    violations: list[Violation]

    def text(self) -> str:
        """As printed."""
        width = max(len(what) for what, _ in self.lines)
        rows = [f"  {what:<{width}}  {value}" for what, value in self.lines]
        verdict = [f"  VIOLATION {one.what} x {one.cases}: {one.example}" for one in self.violations]
        return "\n".join([self.title, *rows, *(verdict or [f"  {'violations':<{width}}  0"])])

    def check(self) -> None:
        """Print it, for a test's output, and fail on a violation."""
        print(self.text())
        assert not self.violations, self.text()


def command(run: Callable[[Path], Coroutine[Any, Any, Report]]) -> int:
    """Run with a folder of its own, print the table; 1 on a violation. Then the folder with all logs is kept."""
    logs.configure("error")
    folder = Path(tempfile.mkdtemp(prefix="headwater-faults-"))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        report = runner.run(run(folder))
    print(report.text(), flush=True)
    if report.violations:
        print(f"logs and data are in {folder}", file=sys.stderr, flush=True)
        return 1
    shutil.rmtree(folder)
    return 0
