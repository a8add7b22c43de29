"""Tests of one group run in one process: a fleet that several of them share is built once."""

import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

GROUPED = """
import os
from pathlib import Path
import pytest

def note(name):
    path = Path(os.environ["NOTES"]) / os.environ["PYTEST_XDIST_WORKER"]
    with path.open("a") as file:
        print(name, file=file)

@pytest.mark.xdist_group("fleet")
@pytest.mark.parametrize("number", range(8))
def test_marked(number):
    note(f"fleet {number}")

class TestMarked:
    pytestmark = [pytest.mark.xdist_group("other")]

    @pytest.mark.parametrize("number", range(8))
    def test_in_a_class(self, number):
        note(f"other {number}")

@pytest.mark.parametrize("engine", ["sim", pytest.param("vllm", marks=pytest.mark.xdist_group("third"))])
@pytest.mark.parametrize("number", range(8))
def test_marked_by_a_parameter(engine, number):
    note(f"{'third' if engine == 'vllm' else 'free'} {number}")
"""

MARKED_MODULE = """
import pytest
from test_one import note

pytestmark = [pytest.mark.xdist_group("fleet")]

@pytest.mark.parametrize("number", range(8))
def test_of_another_module(number):
    note(f"fleet {8 + number}")
"""


@pytest.fixture
def notes(tmp_path: Path) -> dict[str, list[str]]:
    """Which worker of a small test run, started as this suite is, ran what: names of groups by worker."""
    (tmp_path / "notes").mkdir()
    (tmp_path / "test_one.py").write_text(GROUPED)
    (tmp_path / "test_two.py").write_text(MARKED_MODULE)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    unused: none\n")
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        "2",
        "--dist",
        "loadgroup",
        "-p",
        "no:cacheprovider",
        "-p",
        "xdist",
    ]
    done = subprocess.run(
        [*command, "--rootdir", tmp_path, "-c", tmp_path / "pytest.ini", tmp_path],
        cwd=tmp_path,
        env=environ
        | {
            "NOTES": str(tmp_path / "notes"),
            "PYTHONPATH": os.pathsep.join(paths),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # no other plugin has a say in groups
        },
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {path.name: path.read_text().splitlines() for path in (tmp_path / "notes").iterdir()}


@pytest.mark.timeout(120)
def test_all_tests_of_a_group_run_in_one_worker(notes: dict[str, list[str]]) -> None:
    """Whether a test, a class, a module or a parameter is marked; pytest 9.2 with xdist 3.8 ignores all of them."""
    workers: dict[str, set[str]] = defaultdict(set)
    ran: list[str] = []
    for worker, names in notes.items():
        ran += names
        for name in names:
            workers[name.split()[0]].add(worker)
    groups = {"fleet": 16, "other": 8, "third": 8, "free": 8}
    assert sorted(ran) == sorted(
        f"{group} {number}" for group, count in groups.items() for number in range(count)
    )
    assert {group: len(workers[group]) for group in ("fleet", "other", "third")} == {
        "fleet": 1,
        "other": 1,
        "third": 1,
    }
    assert set(notes) == {"gw0", "gw1"}, "both workers had something to do"
