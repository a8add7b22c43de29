"""A pytest plugin: a worker of pytest-xdist that crashes, or whose test hangs, leaves its stack with the test's name.

pytest-timeout raises an exception in whatever the main thread runs. Where that is a callback of an event loop, the loop reports the exception
and goes on; code that never returns to the interpreter does not even see it. So a process whose test outlives its timeout by
`timeout_grace` seconds writes the stack of every thread and exits. pytest-xdist reports the test as failed and starts another worker,
which runs what the first had left, without that test: a second hang would cost as much again, and pytest-xdist gives up after some.
"""

import faulthandler
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TextIO

import pytest
from xdist.scheduler import LoadGroupScheduling  # type: ignore[import-untyped]

STACKS = pytest.StashKey[TemporaryDirectory[str]]()
"""The folder where the processes of pytest-xdist, if any, write their stacks when they crash."""

STACK = pytest.StashKey[TextIO]()
"""Where this process writes its stack."""

# UCX would take the signals of a crash from faulthandler, and print to the output that pytest captures and loses.
os.environ.setdefault("UCX_HANDLE_ERRORS", "none")


def pytest_addoption(parser: pytest.Parser) -> None:
    """How long a test may outlive its timeout."""
    help_ = (
        "seconds that a test, and the end of its fixtures, may take after its timeout before its process ends"
    )
    parser.addini("timeout_grace", help_, default="60")


@pytest.hookimpl(trylast=True)  # after pytest's own faulthandler
def pytest_configure(config: pytest.Config) -> None:
    """Write stacks to a file of this worker, without pytest-xdist to the standard error output that pytest has not captured."""
    worker: dict[str, Any] | None = getattr(config, "workerinput", None)
    if worker is None:
        stack = os.fdopen(os.dup(2), "w")
    else:
        stack = Path(worker["stacks"], worker["workerid"]).open("w", encoding="utf-8")  # noqa: SIM115 (until the process ends)
        faulthandler.enable(stack)
        config.add_cleanup(faulthandler.disable)
    config.stash[STACK] = stack
    config.add_cleanup(stack.close)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Give a worker of pytest-xdist the folder for its stack."""
    stash = node.config.stash
    if STACKS not in stash:
        stash[STACKS] = TemporaryDirectory(prefix="headwater-stacks-")
        node.config.add_cleanup(stash[STACKS].cleanup)
    node.workerinput["stacks"] = stash[STACKS].name


class WithoutCrashed(LoadGroupScheduling):  # type: ignore[misc]
    """Groups of tests, of which the one that ended its worker is not given to another, as it would be by pytest-xdist 3.8."""

    def remove_node(self, node: Any) -> str | None:
        """Returns the test that ended the worker, if any."""
        work = self.assigned_work[node]
        crashed = next(
            ((unit, test) for unit in work.values() for test, done in unit.items() if not done), None
        )
        if crashed is None:
            return str(found) if (found := super().remove_node(node)) else None
        unit, test = crashed
        unit[test] = True
        # A worker that gets a group with nothing left to do waits for ever.
        for group in [group for group, unit in work.items() if all(unit.values())]:
            del work[group]
        super().remove_node(node)
        return str(test)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> WithoutCrashed | None:
    """In place of pytest-xdist's own for groups."""
    return WithoutCrashed(config, log) if config.getoption("dist") == "loadgroup" else None


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> None:
    """End the process some time after pytest-timeout should have ended the test; pytest-timeout sets its own timer, too."""
    limit_s = settings.timeout + float(item.config.getini("timeout_grace"))
    faulthandler.dump_traceback_later(limit_s, exit=True, file=item.config.stash[STACK])


def pytest_runtest_logfinish() -> None:
    """The test and the fixtures that end with it have ended."""
    faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(crashitem: str, report: pytest.TestReport, sched: Any) -> None:
    """Report the stack of the worker that crashed or hung during a test."""
    for stack in Path(sched.config.stash[STACKS].name).iterdir():
        if f"'{stack.name}'" in str(report.longrepr):
            report.sections.append((f"Stack of {stack.name}", stack.read_text(encoding="utf-8")))
