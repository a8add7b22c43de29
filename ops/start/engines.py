"""`headwater engines`: the engines that can be chosen here, with versions and capabilities, computed from their classes.

`headwater check-engine` makes an engine as a worker makes it, and runs the suite over it.
"""

import asyncio
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import msgspec
import uvloop

from headwater.engines import lora_sources, registry
from headwater.engines.conformance.case import MakeAdapter
from headwater.engines.conformance.suite import CheckResult, ConformanceRun
from headwater.engines.custom.api import declared_capabilities
from headwater.engines.engine import Engine, EngineUnavailable, LoraAdapter
from headwater.engines.lora_sources import LoraError
from headwater.engines.registry import EngineEntry
from headwater.ops.config.processes import EngineProcess
from headwater.ops.config.worker import WorkerSettings
from headwater.ops.start import plan
from headwater.ops.start.actor import compile_kernels
from headwater.ops.start.model_source import with_folder
from headwater.schemas.tables import Capability

Support = Literal["yes", "configurable", "no"]
"""The support of a capability by an engine: always, depending on its configuration, or never."""

SHOWN: dict[Support, str] = {"yes": "yes", "configurable": "(yes)", "no": "-"}


NOT_INSTALLED = "not installed"


class ListedEngine(NamedTuple):
    """One engine. `version` is that of the distribution it runs on, "" for a file; `problem`: why it cannot be read."""

    name: str
    origin: str
    version: str = ""
    capabilities: frozenset[Capability] = frozenset()
    possible: frozenset[Capability] = frozenset()
    remark: str = ""
    problem: str = ""

    def supports(self, capability: Capability) -> Support:
        """See `Support`."""
        if capability in self.capabilities:
            return "yes"
        return "configurable" if capability in self.possible else "no"


def catalog(more: Iterable[str] = ()) -> list[ListedEngine]:
    """The installed engines by name, then `more` as `--engine` names them. Raises `EngineUnavailable` for an unknown one."""
    entries = [entry for _, entry in sorted(registry.installed().items())]
    return [describe(entry) for entry in (*entries, *map(registry.find, more))]


def describe(entry: EngineEntry) -> ListedEngine:
    """Return what an engine's class says of itself."""
    listed = ListedEngine(entry.name, entry.origin)
    try:
        kind = registry.load(entry)
        # A class of the whole protocol has its capabilities as an attribute.
        is_full_engine = hasattr(kind, "submit")
        capabilities = kind.capabilities if is_full_engine else declared_capabilities(kind)
    except EngineUnavailable as error:
        return listed._replace(problem=str(error))
    return listed._replace(
        version=_version(kind, entry),
        capabilities=capabilities,
        possible=getattr(kind, "possible", frozenset()),
        remark=getattr(kind, "remark", ""),
    )


def _version(kind: Any, entry: EngineEntry) -> str:
    packages = getattr(kind, "packages", ())
    if not packages:
        return entry.version
    for package in packages:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return NOT_INSTALLED


def as_table(engines: list[ListedEngine]) -> str:
    """The engines, and below them their capabilities in columns."""
    heads: list[tuple[str, ...]] = [("engine", "version", "from")]
    heads += [(engine.name, engine.version or "-", engine.origin) for engine in engines]
    lines = _columns(heads)
    lines += [
        f"{engine.name}: {engine.problem or engine.remark}"
        for engine in engines
        if engine.problem or engine.remark
    ]
    readable = [engine for engine in engines if not engine.problem]
    rows: list[tuple[str, ...]] = [("capability", *(engine.name for engine in readable))]
    for capability in get_args(Capability):
        rows.append((capability, *(SHOWN[engine.supports(capability)] for engine in readable)))
    lines += ["", *_columns(rows), "", "(yes): depends on the engine's configuration"]
    return "\n".join(lines)


def _columns(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths)).rstrip() for row in rows]


def as_data(engines: list[ListedEngine]) -> list[dict[str, Any]]:
    """The same as plain data."""
    return [
        {
            "engine": engine.name,
            "version": engine.version,
            "from": engine.origin,
            "remark": engine.remark,
            "problem": engine.problem,
            "capabilities": {name: engine.supports(name) for name in get_args(Capability)},
        }
        for engine in engines
    ]


OUTCOME_LABELS = {
    "passed": "pass",
    "failed": "FAIL",
    "unsupported": "unsupported",
    "inapplicable": "not applicable",
}


def check_engine(worker: WorkerSettings, lora_adapters: Sequence[str] = (), *, as_json: bool = False) -> int:
    """Print a line per check. Returns 1 if one failed. Raises `EngineUnavailable`.

    `lora_adapters` are folders of at least two adapters, or none.
    """
    worker = with_folder(EngineProcess(worker=worker)).worker
    show = _show_json if as_json else _show_line
    make_adapter = _adapters(lora_adapters) if lora_adapters else None
    # As in a worker: otherwise the first hash of a block would compile, on the event loop of the engine.
    compile_kernels()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        outcomes = runner.run(_check(worker, show, make_adapter))
    if not as_json:
        total = ", ".join(f"{count} {OUTCOME_LABELS[outcome]}" for outcome, count in outcomes.items())
        print(f"{worker.engine}: {total}")
    return 1 if outcomes["failed"] else 0


def _adapters(folders: Sequence[str]) -> MakeAdapter:
    """Each variant is another folder's. Raises `EngineUnavailable` for one that is no adapter, and for a single one."""
    if len(folders) < 2:
        raise EngineUnavailable("--lora-adapter: give two adapters, whose answers are compared")
    try:
        ranks = [lora_sources.read(Path(folder)).rank for folder in folders]
    except (LoraError, OSError) as error:
        raise EngineUnavailable(f"--lora-adapter: {error}") from error

    def make(name: str, variant: int, rank: int) -> LoraAdapter:
        at = variant % len(folders)
        return LoraAdapter(name, folders[at], max(rank, ranks[at]))

    return make


async def _check(
    worker: WorkerSettings, show: Callable[[CheckResult], None], make_adapter: MakeAdapter | None
) -> Counter[str]:
    settings = EngineProcess(worker=worker)

    def make(*, small: bool = False) -> Engine:
        engine, _ = plan.make_engine(settings, "check")
        return engine

    outcomes: Counter[str] = Counter()
    async for result in ConformanceRun(make, make_adapter=make_adapter).results():
        outcomes[result.outcome] += 1
        show(result)
        sys.stdout.flush()
    return outcomes


def _show_line(result: CheckResult) -> None:
    detail = f" ({result.detail})" if result.detail else ""
    print(f"{OUTCOME_LABELS[result.outcome]:<14}  {result.name}{detail}")


def _show_json(result: CheckResult) -> None:
    print(msgspec.json.encode(result._asdict()).decode())
