"""`headwater check-engine`: an engine made as a worker makes it, and the suite run over it."""

import asyncio
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import uvloop

from headwater.engines.conformance.case import MakeAdapter
from headwater.engines.conformance.suite import CheckResult, ConformanceRun
from headwater.engines.engine import Engine, EngineUnavailable, LoraAdapter
from headwater.engines.lora_files import sources
from headwater.engines.lora_files.sources import LoraError
from headwater.ops.config.processes import EngineProcess
from headwater.ops.config.worker import WorkerSettings
from headwater.ops.model_download.source import with_folder
from headwater.ops.process.actor import compile_kernels
from headwater.ops.start import make_engine

LABELS = {"passed": "pass", "failed": "FAIL", "unsupported": "unsupported", "inapplicable": "not applicable"}


def run(worker: WorkerSettings, lora_adapters: Sequence[str] = (), *, as_json: bool = False) -> int:
    """Print a line per check. Returns 1 if one failed. Raises `EngineUnavailable`.

    `lora_adapters` are folders of at least two adapters, or none.
    """
    worker = with_folder(EngineProcess(worker=worker)).worker
    show = _show_json if as_json else _show_line
    make_adapter = _adapters(lora_adapters) if lora_adapters else None
    # As in a worker: otherwise the first hash of a block would compile, on the event loop of the engine.
    compile_kernels()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        outcomes = runner.run(_run(worker, show, make_adapter))
    if not as_json:
        total = ", ".join(f"{count} {LABELS[outcome]}" for outcome, count in outcomes.items())
        print(f"{worker.engine}: {total}")
    return 1 if outcomes["failed"] else 0


def _adapters(folders: Sequence[str]) -> MakeAdapter:
    """Each variant is another folder's. Raises `EngineUnavailable` for one that is no adapter, and for a single one."""
    if len(folders) < 2:
        raise EngineUnavailable("--lora-adapter: give two adapters, whose answers are compared")
    try:
        ranks = [sources.read(Path(folder)).rank for folder in folders]
    except (LoraError, OSError) as error:
        raise EngineUnavailable(f"--lora-adapter: {error}") from error

    def make(name: str, variant: int, rank: int) -> LoraAdapter:
        at = variant % len(folders)
        return LoraAdapter(name, folders[at], max(rank, ranks[at]))

    return make


async def _run(
    worker: WorkerSettings, show: Callable[[CheckResult], None], make_adapter: MakeAdapter | None
) -> Counter[str]:
    settings = EngineProcess(worker=worker)

    def make(*, small: bool = False) -> Engine:
        engine, _ = make_engine.make(settings, "check")
        return engine

    outcomes: Counter[str] = Counter()
    async for result in ConformanceRun(make, make_adapter=make_adapter).results():
        outcomes[result.outcome] += 1
        show(result)
        sys.stdout.flush()
    return outcomes


def _show_line(result: CheckResult) -> None:
    detail = f" ({result.detail})" if result.detail else ""
    print(f"{LABELS[result.outcome]:<14}  {result.name}{detail}")


def _show_json(result: CheckResult) -> None:
    print(msgspec.json.encode(result._asdict()).decode())
