"""A pytest plugin that writes down how each test ends, line by line: what ended before a crash of the run is known.

Only the process that prints the report writes; workers of pytest-xdist tell it.
"""

import json
from pathlib import Path
from typing import Any, TextIO

import pytest

from tests.support.gate.records import Run

RECORDER = "outcomes-recorder"
"""Name of the plugin's object, which only the process has that writes."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where to write; without it nothing is written."""
    parser.addoption("--outcomes", default="", help="file for the outcome of each test, as lines of JSON")


@pytest.hookimpl(trylast=True)  # after the plugin that chooses the seed
def pytest_configure(config: pytest.Config) -> None:
    """Begin the file."""
    path = config.getoption("outcomes")
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Recorder(config, Path(path)), RECORDER)


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the file."""
    recorder = config.pluginmanager.unregister(name=RECORDER)
    if recorder is not None:
        recorder.close()


class _Recorder:
    def __init__(self, config: pytest.Config, path: Path) -> None:
        self._config = config
        self._file: TextIO = path.open("w", encoding="utf-8")
        self._write(paths=config.args, seed=config.getoption("randomly_seed", None))

    def close(self) -> None:
        self._file.close()

    def _write(self, **fields: Any) -> None:
        print(json.dumps(fields), file=self._file, flush=True)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """One phase of a test, or its worker's crash, under the name by which the final line counts it."""
        kind = self._config.hook.pytest_report_teststatus(report=report, config=self._config)[0]
        if kind:
            self._write(test=Run.plain(report.nodeid), kind=kind)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A module that cannot be imported, for example."""
        if report.failed:
            self._write(uncollected=report.nodeid)

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        """Tests that this run leaves out."""
        self._write(other="deselected", count=len(items))

    def pytest_warning_recorded(self) -> None:
        """Only counted."""
        self._write(other="warnings", count=1)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """The end, if the run reaches it."""
        self._write(collected=session.testscollected, exit=int(exitstatus))
