"""What all tests share: log lines that cost nothing, how many examples a property gets, which tests run together, their ids,
and the stack of a worker that crashed.
"""

import faulthandler
import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import structlog
from hypothesis import settings

from tests.support.processes.zygotes import Zygotes, use

# Checks that ship with the package: a failed assertion shows its values in tests, too.
pytest.register_assert_rewrite("headwater.engines.conformance")

settings.register_profile("ci", max_examples=10, deadline=None)
settings.register_profile("soak", max_examples=500, deadline=None)
settings.load_profile("ci")

STACKS = pytest.StashKey[TemporaryDirectory[str]]()
"""The folder where the processes of pytest-xdist, if any, write their stacks when they crash."""

ZYGOTES = pytest.StashKey[Zygotes]()
"""The processes from which all workers of pytest-xdist, if any, fork others."""

# UCX would take the signals of a crash from faulthandler, and print to the output that pytest captures and loses.
os.environ.setdefault("UCX_HANDLE_ERRORS", "none")

SHARING = ("contract", "docs", "durability", "faults", "packaging", "sglang", "system", "tidy", "vllm")
"""Folders whose modules share servers, fleets or parsed sources: each module runs in one worker, so that none is made twice."""

ID_CHARS_MAX = 200
"""Of an argument in a test's id."""

SHORT = ("tidy", "unit")
"""Folders of tests that take less than a second each."""


@pytest.hookimpl(trylast=True)  # after pytest's own faulthandler
def pytest_configure(config: pytest.Config) -> None:
    """Log as structlog does unless told otherwise, but for tracebacks; a crashing worker of pytest-xdist leaves its stack.

    With rich installed (vLLM brings it) each traceback would be drawn with the local variables of every frame: one second.
    """
    worker: dict[str, Any] | None = getattr(config, "workerinput", None)
    if worker is not None:
        use(worker["zygotes"])
        stack = Path(worker["stacks"], worker["workerid"]).open("w", encoding="utf-8")  # noqa: SIM115 (until the worker ends)
        faulthandler.enable(stack)
        config.add_cleanup(faulthandler.disable)
        config.add_cleanup(stack.close)
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
    """Give a worker of pytest-xdist the folder for its stack, and that of the zygotes' sockets."""
    stash = node.config.stash
    if ZYGOTES not in stash:
        stash[ZYGOTES] = Zygotes()
        node.config.add_cleanup(stash[ZYGOTES].close)
    node.workerinput["zygotes"] = str(stash[ZYGOTES].folder)
    if STACKS not in stash:
        stash[STACKS] = TemporaryDirectory(prefix="headwater-stacks-")
        node.config.add_cleanup(stash[STACKS].cleanup)
    node.workerinput["stacks"] = stash[STACKS].name


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(crashitem: str, report: pytest.TestReport, sched: Any) -> None:
    """Report the stack of the worker that crashed during a test."""
    for stack in Path(sched.config.stash[STACKS].name).iterdir():
        if f"'{stack.name}'" in str(report.longrepr):
            report.sections.append((f"Stack of {stack.name}", stack.read_text(encoding="utf-8")))


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Name a long value by its length: some have megabytes, and ids are escaped, and sent between processes many times."""
    if isinstance(val, str | bytes) and len(val) > ID_CHARS_MAX:
        return f"{argname} of {len(val)}"
    return None


@pytest.fixture(autouse=True)
def logging_of_all_tests() -> Iterator[None]:
    """A test that configures structlog, as commands do, leaves it to the next one as it was."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Group the tests that share processes. Those of vLLM and SGLang come first and the short ones last, so that workers end together.

    Those by folder: the fleet of one ends with it, since also idle engines need some processor time.
    """

    def order(item: pytest.Item) -> tuple[bool, str, bool, bool]:
        folder = _folder(config, item)
        first = item.get_closest_marker("vllm") is not None or folder == "sglang"
        last = item.get_closest_marker("last") is not None
        return not first, folder if first else "", folder in SHORT, last

    for item in items:
        if _folder(config, item) in SHARING and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(str(item.path.relative_to(config.rootpath))))
    items.sort(key=order)


def _folder(config: pytest.Config, item: pytest.Item) -> str:
    return item.path.relative_to(config.rootpath / "tests").parts[0]
