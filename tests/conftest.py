"""What all tests share: log lines that cost nothing, how many examples a property gets, which tests run together, and their ids."""

import gc
import signal
from collections.abc import Iterator
from functools import cache
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import settings

from tests.support.processes.zygotes import Zygotes, use

pytest_plugins = ["tests.support.crashes"]

# Checks that ship with the package: a failed assertion shows its values in tests, too.
pytest.register_assert_rewrite("headwater.engines.conformance")

settings.register_profile("ci", max_examples=10, deadline=None)
settings.register_profile("soak", max_examples=500, deadline=None)
settings.load_profile("ci")

ZYGOTES = pytest.StashKey[Zygotes]()
"""The processes from which all workers of pytest-xdist, if any, fork others."""

SHARING = (
    "contract",
    "docs",
    "durability",
    "engines",
    "faults",
    "packaging",
    "sglang",
    "system",
    "tidy",
    "unit",
    "vllm",
)
"""Folders whose modules share servers, fleets, worlds, parsed sources or large imports: each module runs in one worker, so that
none is made twice."""

ID_CHARS_MAX = 200
"""Of an argument in a test's id."""

SHORT = ("tidy", "unit")
"""Folders of tests that take less than a second each."""

INTERLEAVED_FROM, FILLING_SHARE = 0.4, 0.7
"""The part of the other modules that run before any of these folders, and the part of these that runs between the others."""


def pytest_configure(config: pytest.Config) -> None:
    """Log as structlog does unless told otherwise, but for tracebacks.

    With rich installed (vLLM brings it) each traceback would be drawn with the local variables of every frame: one second.
    """
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        # Under nohup, and in the background of a script, they are ignored, and so they would be by every process that a test stops with them.
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    worker: dict[str, Any] | None = getattr(config, "workerinput", None)
    if worker is not None:
        use(worker["zygotes"])
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.StackInfoRenderer(),
            structlog.dev.set_exc_info,
            structlog.processors.TimeStamper("%Y-%m-%d %H:%M:%S", utc=False),
            structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback),
        ]
    )


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Give a worker of pytest-xdist the folder of the zygotes' sockets."""
    stash = node.config.stash
    if ZYGOTES not in stash:
        stash[ZYGOTES] = Zygotes()
        node.config.add_cleanup(stash[ZYGOTES].close)
    node.workerinput["zygotes"] = str(stash[ZYGOTES].folder)


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With groups, those that start processes are joined to lanes."""
    # It imports a plugin, which pytest is to import first.
    from tests.support.lanes import Lanes

    return Lanes(config, log) if config.getoption("dist") == "loadgroup" else None


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Name a long value by its length: some have megabytes, and ids are escaped, and sent between processes many times."""
    if isinstance(val, str | bytes) and len(val) > ID_CHARS_MAX:
        return f"{argname} of {len(val)}"
    return None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Exclude the modules and tests that are collected from garbage collection.

    A full collection over them takes 0.3 to 0.7 s, and many tests end with one, or make one due.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.fixture(autouse=True)
def logging_of_all_tests() -> Iterator[None]:
    """A test that configures structlog, as commands do, leaves it to the next one as it was."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Group the tests that share processes, and order the groups so that the cores are busy to the end and workers end together.

    Those of vLLM and SGLang come first, by folder: the fleet of one ends with it, since also idle engines need some processor time. So those
    that share it come last in their folder. The other lane begins at the same time. Of the rest, those of `SHORT` only compute, and many of the rest only wait: the former fill the time of the latter, and end the run.
    """

    from tests.support.lanes import PROCESSES, lane

    @cache
    def place(path: Path) -> Path:
        return path.relative_to(config.rootpath)

    def folder(item: pytest.Item) -> str:
        return place(item.path).parts[1]

    def is_first(item: pytest.Item) -> bool:
        return item.get_closest_marker("vllm") is not None or folder(item) in ("engines", "sglang")

    def order(item: pytest.Item) -> tuple[bool, str, bool, bool]:
        first, last = is_first(item), item.get_closest_marker("last") is not None
        return not first, folder(item) if first else "", "mixed" in getattr(item, "fixturenames", ()), last

    for item in items:
        module = place(item.path)
        if module.parts[1] in SHARING and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(str(module)))
    items.sort(key=order)
    engines: list[pytest.Item] = []
    processes: list[pytest.Item] = []
    rest: list[pytest.Item] = []
    for item in items:
        group = item.get_closest_marker("xdist_group")
        scope = str(group.args[0]) if group is not None and group.args else ""
        is_process = lane(str(place(item.path)), scope) == PROCESSES
        (engines if is_first(item) else processes if is_process else rest).append(item)
    short, long = (
        [item for item in rest if (folder(item) in SHORT) is is_short] for is_short in (True, False)
    )
    items[:] = [*engines, *together(processes), *interleaved(together(long), short)]


def together(items: list[pytest.Item]) -> list[pytest.Item]:
    """The same items with the modules of a folder of a lane one after the other: such a folder may have a fleet, which ends with the last of them."""
    from tests.support.lanes import FOLDERS

    first: dict[Path, int] = {}

    def place(item: pytest.Item) -> int:
        folder = item.path.relative_to(item.config.rootpath).parts[1]
        return first.setdefault(item.path.parent if folder in FOLDERS else item.path, len(first))

    return sorted(items, key=place)


def interleaved(long: list[pytest.Item], short: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Modules of `long`, from `INTERLEAVED_FROM` of them on with modules of `short` between them, and the rest of `short`."""
    modules = [list(group) for _, group in groupby(long, lambda item: item.path)]
    fillers = [list(group) for _, group in groupby(short, lambda item: item.path)]
    begin = int(len(modules) * INTERLEAVED_FROM)
    each = FILLING_SHARE * len(fillers) / max(1, len(modules) - begin)
    used = 0
    for number, module in enumerate(modules):
        yield from module
        until = int(max(0, number + 1 - begin) * each)
        yield from chain.from_iterable(fillers[used:until])
        used = max(used, until)
    yield from chain.from_iterable(fillers[used:])
