"""What fails is run once more, alone: what passes then is named and does not fail the run, unless there is much of it."""

import re
import sys

import pytest

from tests.support.gate.records import Run
from tests.tidy.source import ROOT

pytest_plugins = ["pytester"]

ONCE = """
import os
import signal
from pathlib import Path

import pytest


def second(name):
    mark = Path(name.replace("/", "_"))
    there = mark.exists()
    mark.touch()
    return there
"""
"""A test that asks `second` learns whether it runs for the second time."""

WORKERS = ("-n", "2", "--dist", "loadgroup", "--no-loadscope-reorder")

PASSES = "def test_passes(): pass\n"
FAILS = "def test_fails(): assert False\n"


@pytest.fixture(autouse=True)
def few_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """They cost time, and this run's options are not theirs."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_PLUGINS", "xdist.plugin,pytest_timeout,tests.support.crashes")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name in ("PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT"):
        monkeypatch.delenv(name, raising=False)


def gate(pytester: pytest.Pytester, source: str, *arguments: str) -> tuple[int, str]:
    """Exit code and output of a run over one module."""
    pytester.makeini("[pytest]\nmarkers =\n    timeout: of pytest-timeout\n")
    pytester.makepyfile(test_sample=ONCE + source)
    options = ("-p", "no:cacheprovider", "-c", "tox.ini", "--rootdir", ".")
    command = (sys.executable, "-m", "tests.support.gate", *arguments, *options)
    ended = pytester.run(*command, timeout=180)
    return int(ended.ret), ended.stdout.str()


def section(output: str, title: str) -> list[str]:
    """The lines under a heading that are names of tests."""
    found = re.search(rf"^=+ {title} =+\n((?:.+\n)*)", output, re.MULTILINE)
    return [line for line in found[1].splitlines() if "::" in line] if found else []


def counts(output: str) -> dict[str, int]:
    """What the last line says, which is one that pytest could have printed."""
    last = output.strip().splitlines()[-1]
    assert re.fullmatch(r"=+ (\d+ \w+(, )?)+ in [\d.]+s \(\d:\d\d:\d\d\) =+", last), last
    return {name: int(count) for count, name in re.findall(r"(\d+) (\w+)", last.partition(" in ")[0])}


def test_what_passes_alone_is_named_and_counts_as_passed(pytester: pytest.Pytester) -> None:
    """Whichever phase failed, in whichever group, with whatever in its name. Five may."""
    source = """
@pytest.fixture
def late():
    yield
    assert second("teardown")

def test_body():
    assert second("body")

def test_end(late):
    pass

@pytest.mark.parametrize("value", ["a@b", "a]b", "a b::c"])
@pytest.mark.xdist_group("some group")
def test_group(value):
    assert second(value)

@pytest.mark.skip(reason="here")
def test_left_out(): pass
"""
    status, output = gate(pytester, source + PASSES, *WORKERS)
    assert status == 0, output
    assert sorted(section(output, "FLAKY")) == sorted(
        f"test_sample.py::{name}"
        for name in ("test_body", "test_end", "test_group[a@b]", "test_group[a]b]", "test_group[a b::c]")
    )
    assert counts(output) == {"passed": 6, "skipped": 1}


def test_a_run_without_failures_is_not_repeated(pytester: pytest.Pytester) -> None:
    status, output = gate(pytester, PASSES)
    assert (status, section(output, "FLAKY"), counts(output)) == (0, [], {"passed": 1})
    assert output.count("test session starts") == 1


def test_what_fails_again_fails_the_run(pytester: pytest.Pytester) -> None:
    source = "def test_body(): assert second('body')\n"
    status, output = gate(pytester, source + FAILS + PASSES)
    assert status == 1
    assert section(output, "FLAKY") == ["test_sample.py::test_body"]
    assert section(output, "FAILED AGAIN") == ["test_sample.py::test_fails"]
    assert counts(output) == {"failed": 1, "passed": 2}


def test_a_test_that_is_skipped_the_second_time_has_not_passed(pytester: pytest.Pytester) -> None:
    source = "def test_body():\n    second('body') and pytest.skip('now')\n    assert False\n"
    status, output = gate(pytester, source)
    assert (status, section(output, "FAILED AGAIN")) == (1, ["test_sample.py::test_body"])
    assert counts(output) == {"failed": 1}


@pytest.mark.soak
def test_more_than_five_may_not_be_flaky(pytester: pytest.Pytester) -> None:
    source = """
@pytest.mark.parametrize("number", range(6))
def test_body(number):
    assert second(f"body {number}")
"""
    status, output = gate(pytester, source)
    assert (status, len(section(output, "FLAKY")), counts(output)) == (1, 6, {"passed": 6})


def test_with_many_failures_nothing_is_run_again(pytester: pytest.Pytester) -> None:
    source = "@pytest.mark.parametrize('number', range(11))\ndef test_body(number): assert False\n"
    status, output = gate(pytester, source)
    assert (status, counts(output)) == (1, {"failed": 11})
    assert output.count("test session starts") == 1


def test_a_test_that_ended_its_worker_is_run_again(pytester: pytest.Pytester) -> None:
    """Another worker runs the rest; alone, one ends its process again and the other does not."""
    source = """
def test_once():
    second("once") or os.kill(os.getpid(), signal.SIGKILL)

def test_always():
    os.kill(os.getpid(), signal.SIGKILL)
"""
    status, output = gate(pytester, source + PASSES, *WORKERS)
    assert status == 1
    assert section(output, "FLAKY") == ["test_sample.py::test_once"]
    assert section(output, "FAILED AGAIN") == ["test_sample.py::test_always"]
    assert counts(output) == {"failed": 1, "passed": 2}


def test_a_test_beyond_its_time_limit_is_run_again(pytester: pytest.Pytester) -> None:
    source = """
import threading

@pytest.mark.timeout(0.2)
def test_once():
    second("once") or threading.Event().wait()
"""
    status, output = gate(pytester, source)
    assert (status, section(output, "FLAKY")) == (0, ["test_sample.py::test_once"])


def test_a_run_that_ends_before_its_end_fails(pytester: pytest.Pytester) -> None:
    """There is nobody to say what became of the tests that were left."""
    source = "def test_crash():\n    second('crash') or os.kill(os.getpid(), signal.SIGKILL)\n"
    status, output = gate(pytester, PASSES + source + "def test_left(): pass\n")
    assert status == 128 + 9
    assert counts(output) == {"passed": 1}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param((), id="alone", marks=pytest.mark.soak),
        pytest.param(("--continue-on-collection-errors",), id="continued", marks=pytest.mark.soak),
        pytest.param(WORKERS, id="workers"),
    ],
)
def test_a_module_that_cannot_be_collected_is_not_flaky(
    pytester: pytest.Pytester, options: tuple[str, ...]
) -> None:
    """Even if it could be, a second time."""
    pytester.makepyfile(
        test_other=ONCE + "assert second('import ' + os.environ.get('PYTEST_XDIST_WORKER', ''))\n" + PASSES
    )
    status, output = gate(pytester, PASSES, *options)
    assert status != 0
    assert not section(output, "FLAKY")
    assert "error" in counts(output) or "errors" in counts(output)


def test_no_tests_are_no_success(pytester: pytest.Pytester) -> None:
    status, output = gate(pytester, "")
    assert status == 5
    assert "no tests ran" in output.splitlines()[-1]


def test_what_was_chosen_is_chosen_for_the_second_run(pytester: pytest.Pytester) -> None:
    """Options are the same, but the folders and files of the whole run are not run again."""
    source = """
def test_body(request):
    assert second("body") and request.config.getoption("keyword") == "not other"
"""
    status, output = gate(pytester, source + PASSES, "-k", "not other", "test_sample.py")
    assert (status, section(output, "FLAKY")) == (0, ["test_sample.py::test_body"])
    assert counts(output) == {"passed": 2}


@pytest.mark.parametrize(("code", "wanted"), [(0, 0), (3, 1)])
def test_a_command_beside_the_tests_must_succeed(pytester: pytest.Pytester, code: int, wanted: int) -> None:
    """Its output comes before the last line."""
    pytester.makefile(".py", program=f"import sys; print('has spoken'); sys.exit({code})")
    status, output = gate(pytester, PASSES, "--beside", f"'{sys.executable}' program.py")
    assert status == wanted
    assert "has spoken" in output.splitlines()
    assert counts(output) == {"passed": 1}


def test_a_command_before_the_tests_has_ended_when_they_begin(pytester: pytest.Pytester) -> None:
    """Whatever comes of it: what it could not do shows in the tests."""
    pytester.makefile(".py", program="import pathlib, sys; pathlib.Path('there').touch(); sys.exit(3)")
    source = "def test_body(): assert Path('there').exists()\n"
    status, output = gate(pytester, source, "--before", f"'{sys.executable}' program.py")
    assert status == 0, output


def test_the_seed_of_the_first_run_is_that_of_the_second(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What fails by chance fails again: it is a fault that was found, not flaky."""
    monkeypatch.setenv("PYTEST_PLUGINS", "pytest_randomly")
    source = """
def test_body(request):
    mark = Path("seed")
    seed = str(request.config.getoption("randomly_seed"))
    if not mark.exists():
        mark.write_text(seed)
        raise AssertionError
    assert mark.read_text() == seed
"""
    status, output = gate(pytester, source)
    assert (status, section(output, "FLAKY")) == (0, ["test_sample.py::test_body"]), output


def test_groups_are_no_part_of_names() -> None:
    assert Run.plain("a.py::test_b@group") == "a.py::test_b"
    assert Run.plain("a.py::test_b[c@d]") == "a.py::test_b[c@d]"
    assert Run.plain("a.py::test_b[c@d]@some group") == "a.py::test_b[c@d]"
