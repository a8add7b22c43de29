"""The engines that can be chosen: entry points of the group `headwater.engines`, a file, or a class by its module's path.

Headwater's own engines are entry points like those of any other package, so there is one list. An entry names a class:
one that implements the `Engine` protocol and is created by Headwater, or one with the two methods of
`headwater.engines.custom`.
"""

import difflib
import importlib
import importlib.util
import inspect
import re
import sys
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Final, NamedTuple

from headwater.engines.engine import EngineUnavailable
from headwater.engines.traits import EngineTraits

GROUP: Final = "headwater.engines"
OWN_PACKAGE: Final = "headwater"
DEFAULT_ENGINE: Final = "vllm"
"""The engine of a fleet that names none."""

METHODS: Final = ("start", "generate")
"""What makes a class in a file an engine."""

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class EngineEntry(NamedTuple):
    """An engine that can be chosen: its `name`, and `value`, the module or file and its class, "" if there is only one.

    `package` and `version` are those of the distribution that offers it; both are empty for a file or a class path.
    """

    name: str
    module: str
    attribute: str = ""
    package: str = ""
    version: str = ""

    @property
    def is_file(self) -> bool:
        """Is it a file and not a module?"""
        return self.module.endswith(".py")

    @property
    def is_own(self) -> bool:
        """Is it one of Headwater's own, created from its settings?"""
        return self.package == OWN_PACKAGE

    @property
    def origin(self) -> str:
        """Return where the engine comes from, for people."""
        return f"{self.package} {self.version}" if self.package else self.module


def installed() -> dict[str, EngineEntry]:
    """The engines that installed packages offer, by name. Raises `EngineUnavailable` if two offer the same name."""
    by_name: dict[str, EngineEntry] = {}
    for entry in _entries(tuple(sys.path)):
        other = by_name.setdefault(entry.name, entry)
        if (other.module, other.attribute) != (entry.module, entry.attribute):
            raise EngineUnavailable(
                f"{other.package} and {entry.package} both offer an engine {entry.name!r}: uninstall one of them"
            )
    return by_name


@cache
def _entries(_path: tuple[str, ...]) -> tuple[EngineEntry, ...]:
    """All entries of the group on this path: reading them takes 10 ms in an environment of 200 packages."""
    # Each look at a distribution's name or version parses its metadata: 1 ms.
    names: dict[metadata.Distribution, tuple[str, str]] = {}
    entries = []
    for point in metadata.entry_points(group=GROUP):
        package, version = "", ""
        if point.dist is not None:
            if point.dist not in names:
                text = point.dist.metadata
                names[point.dist] = (text["Name"], text["Version"])
            package, version = names[point.dist]
        entries.append(EngineEntry(point.name, point.module, point.attr, package, version))
    return tuple(entries)


def traits_of(engine: str) -> EngineTraits:
    """The traits of an engine: the `TRAITS` of the package in which its module is. Raises `EngineUnavailable`.

    Only the package is imported, and only that of an entry point: an engine in a file or named by its class has the default traits.
    """
    entry = find(engine)
    package = entry.module.rpartition(".")[0]
    if not entry.package or not package:
        return EngineTraits()
    traits = getattr(_load_module(EngineEntry(entry.name, package)), "TRAITS", EngineTraits())
    if not isinstance(traits, EngineTraits):
        raise EngineUnavailable(f"{package}.TRAITS, of the engine {entry.name}, is no EngineTraits")
    fields = getattr(traits.options, "_fields", None)
    if traits.options is not None and (fields is None or set(fields) != set(traits.options._field_defaults)):
        raise EngineUnavailable(
            f"{package}.TRAITS, of the engine {entry.name}: options is no NamedTuple whose fields all have defaults"
        )
    return traits


@cache
def all_traits() -> dict[str, EngineTraits]:
    """The traits of all engines that installed packages offer, by name: the default engine's first, then those of engines that load something.

    An engine whose package cannot be imported has the default traits here; `traits_of` says what is wrong with it.
    """
    by_name: dict[str, EngineTraits] = {}
    for name in sorted({entry.name for entry in _entries(tuple(sys.path))}):
        try:
            by_name[name] = traits_of(name)
        except EngineUnavailable:
            by_name[name] = EngineTraits()
    order = sorted(by_name, key=lambda name: (name != DEFAULT_ENGINE, by_name[name].loads == "nothing"))
    return {name: by_name[name] for name in order}


def find(text: str) -> EngineEntry:
    """The engine that `--engine` names: a name, a file (`echo.py`, `echo.py:Echo`) or a class (`package.module:Echo`).

    Nothing is imported yet. Raises `EngineUnavailable`.
    """
    place, _, attribute = text.partition(":")
    if place.endswith(".py"):
        path = Path(place).expanduser().absolute()
        if not path.is_file():
            raise EngineUnavailable(f"there is no file {path}")
        return EngineEntry(_checked_name(path.stem), str(path), attribute)
    if attribute:
        return EngineEntry(_checked_name(place.rpartition(".")[2]), place, attribute)
    available = installed()
    if text in available:
        return available[text]
    if not any(entry.is_own for entry in available.values()):
        raise EngineUnavailable(
            f"there is no engine {text!r}, nor any of headwater's own: its installation is older than its source; "
            "install it again"
        )
    near = difflib.get_close_matches(text, available, n=1)
    hint = f"did you mean {near[0]}?" if near else f"installed are {', '.join(sorted(available))}"
    raise EngineUnavailable(
        f"there is no engine {text!r}: {hint} (a file is given as echo.py, a class as package.module:Echo)"
    )


def load(entry: EngineEntry) -> Any:
    """The class of an engine. Runs its module. Raises `EngineUnavailable` if that fails, or has no such class."""
    module = _load_module(entry)
    if not entry.attribute:
        return _only_engine(module, entry)
    resolved: Any = module
    for part in entry.attribute.split("."):
        resolved = getattr(resolved, part, None)
    if not inspect.isclass(resolved):
        raise EngineUnavailable(f"{entry.module} has no class {entry.attribute}")
    return resolved


def _load_module(entry: EngineEntry) -> Any:
    try:
        if not entry.is_file:
            return importlib.import_module(entry.module)
        return _run_file(Path(entry.module))
    except Exception as error:
        where = f" (line {error.lineno})" if isinstance(error, SyntaxError) else ""
        raise EngineUnavailable(
            f"{entry.module} cannot be imported: {type(error).__name__}: {error}{where}"
        ) from error


def _run_file(path: Path) -> Any:
    name = f"headwater_engine_{path.stem}"
    if name in sys.modules and sys.modules[name].__file__ == str(path):
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Like a script's: the file may import what lies next to it.
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _only_engine(module: Any, entry: EngineEntry) -> Any:
    classes = [
        candidate
        for candidate in vars(module).values()
        if inspect.isclass(candidate)
        and candidate.__module__ == module.__name__
        and all(callable(getattr(candidate, method, None)) for method in METHODS)
    ]
    if len(classes) == 1:
        return classes[0]
    if not classes:
        raise EngineUnavailable(f"{entry.module} has no class with the methods {' and '.join(METHODS)}")
    names = ", ".join(candidate.__name__ for candidate in classes)
    raise EngineUnavailable(
        f"{entry.module} has several engines ({names}): name one, as {entry.module}:{classes[0].__name__}"
    )


def _checked_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise EngineUnavailable(
            f"{name!r} is no name for an engine: rename it to at most 64 letters, digits, - and _"
        )
    return name
