"""The engines that can be chosen here, with versions and capabilities, computed from their classes."""

from collections.abc import Iterable
from importlib import metadata
from typing import Any, Literal, NamedTuple, get_args

from headwater.engines import registry
from headwater.engines.custom.api import declared_capabilities
from headwater.engines.engine import EngineUnavailable
from headwater.engines.registry import EngineEntry
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
        whole = hasattr(kind, "submit")
        capabilities = kind.capabilities if whole else declared_capabilities(kind)
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
    heads += [(one.name, one.version or "-", one.origin) for one in engines]
    lines = _columns(heads)
    lines += [f"{one.name}: {one.problem or one.remark}" for one in engines if one.problem or one.remark]
    readable = [one for one in engines if not one.problem]
    rows: list[tuple[str, ...]] = [("capability", *(one.name for one in readable))]
    for capability in get_args(Capability):
        rows.append((capability, *(SHOWN[one.supports(capability)] for one in readable)))
    lines += ["", *_columns(rows), "", "(yes): depends on the engine's configuration"]
    return "\n".join(lines)


def _columns(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths)).rstrip() for row in rows]


def as_data(engines: list[ListedEngine]) -> list[dict[str, Any]]:
    """The same as plain data."""
    return [
        {
            "engine": one.name,
            "version": one.version,
            "from": one.origin,
            "remark": one.remark,
            "problem": one.problem,
            "capabilities": {name: one.supports(name) for name in get_args(Capability)},
        }
        for one in engines
    ]
