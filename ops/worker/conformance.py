"""`headwater check-engine`: an engine made as a worker makes it, and the suite run over it."""

import asyncio
import sys
from collections import Counter
from collections.abc import Callable

import msgspec
import uvloop

from headwater.engines.conformance.suite import CheckResult, ConformanceRun
from headwater.engines.engine import Engine
from headwater.ops.config.processes import EngineProcess
from headwater.ops.config.worker import WorkerSettings
from headwater.ops.worker import make_engine

LABELS = {"passed": "pass", "failed": "FAIL", "unsupported": "unsupported", "inapplicable": "not applicable"}


def run(worker: WorkerSettings, *, as_json: bool = False) -> int:
    """Print a line per check. Returns 1 if one failed. Raises `EngineUnavailable`."""
    show = _show_json if as_json else _show_line
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        outcomes = runner.run(_run(worker, show))
    if not as_json:
        total = ", ".join(f"{count} {LABELS[outcome]}" for outcome, count in outcomes.items())
        print(f"{worker.engine}: {total}")
    return 1 if outcomes["failed"] else 0


async def _run(worker: WorkerSettings, show: Callable[[CheckResult], None]) -> Counter[str]:
    settings = EngineProcess(worker=worker)

    def make(*, small: bool = False) -> Engine:
        engine, _ = make_engine.make(settings, "check")
        return engine

    outcomes: Counter[str] = Counter()
    async for result in ConformanceRun(make).results():
        outcomes[result.outcome] += 1
        show(result)
        sys.stdout.flush()
    return outcomes


def _show_line(result: CheckResult) -> None:
    detail = f" ({result.detail})" if result.detail else ""
    print(f"{LABELS[result.outcome]:<14}  {result.name}{detail}")


def _show_json(result: CheckResult) -> None:
    print(msgspec.json.encode(result._asdict()).decode())
