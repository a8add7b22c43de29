"""A test that hangs where no exception ends it fails by its name, with its stack, and the tests after it run."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tidy.source import ROOT

HANGS = """
import asyncio, time

async def test_hangs():
    loop = asyncio.get_running_loop()

    def spin():
        try:
            time.sleep(0.3)
        finally:
            loop.call_soon(spin)

    loop.call_soon(spin)
    await asyncio.Event().wait()

def test_goes_on():
    pass
"""


def run(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Run pytest over `HANGS`, with few plugins: they cost time."""
    (folder / "test_sample.py").write_text(HANGS)
    plugins = ("tests.support.crashes", "pytest_asyncio.plugin", "pytest_timeout", "xdist")
    limits = ("--timeout", "0.2", "-o", "timeout_grace=0.5", "-o", "asyncio_mode=auto")
    environ = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *limits, *flags]
        + [part for plugin in plugins for part in ("-p", plugin)],
        cwd=folder,
        env={**environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("how", ["load", "loadgroup"])
def test_a_hang_fails_by_name_and_the_rest_runs(tmp_path: Path, how: str) -> None:
    """The loop swallows pytest-timeout's exception; another worker runs what is left, once."""
    ended = run(tmp_path, "-n", "1", "--dist", how)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "crashed while running 'test_sample.py::test_hangs'" in ended.stdout
    assert re.search(r"Stack of gw0.*\n.*Timeout.*\n(.*\n)*.* in spin\n", ended.stdout), ended.stdout
    assert "1 failed, 1 passed" in ended.stdout


def test_a_hang_without_workers_ends_the_run_with_its_stack(tmp_path: Path) -> None:
    """There is no other process to go on in."""
    ended = run(tmp_path)
    assert ended.returncode == 1
    assert re.search(r"Timeout.*\n(.*\n)*.* in spin\n", ended.stderr), ended.stdout + ended.stderr
