"""Compiled kernels: what the start of a process prepares suffices, and no other environment's numba discards it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numba

import tests
from headwater.ops.start.actor import COMPILING
from headwater.router.index import match
from headwater.schemas import jit, machine_code

ROOT = Path(tests.__path__[0]).parent

COMPILED_LATER = """
import sys
from headwater.ops.start.actor import compile_kernels
from tests.support.data.story import digests

def compiled():
    named = {id(found): found for name, module in list(sys.modules.items()) if name.startswith("headwater.")
             for found in vars(module).values() if hasattr(found, "py_func") and hasattr(found, "signatures")}
    return {(found.py_func.__module__, found.py_func.__name__, str(types)) for found in named.values() for types in found.signatures}

compile_kernels()
before = compiled()
digests(17, 600)
assert len(before) > 10, before
print(sorted(compiled() - before))
"""


def test_nothing_is_compiled_after_the_start() -> None:
    """Decisions, events of every kind and snapshots use the argument types that `compile_kernels` has compiled."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COMPILED_LATER],
        cwd=ROOT,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_each_version_of_numba_has_its_own_cache() -> None:
    """Two environments on one source tree do not compile everything again in turn."""
    jit.load()
    folder = Path(match.find._cache.cache_path)  # type: ignore[attr-defined]  # numba's, of a compiled function
    cache = Path(os.environ.get("NUMBA_CACHE_DIR") or machine_code.CACHE)
    assert cache in folder.parents
    assert numba.__version__ in machine_code.CACHE.name
    assert not numba.config.CACHE_DIR or "NUMBA_CACHE_DIR" in os.environ


def test_the_first_start_says_that_it_compiles_and_can_be_interrupted(tmp_path: Path) -> None:
    """It compiles for ten seconds, before an event loop handles signals."""
    program = "import sys; from headwater.ops.commands.application import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "up", "--data-dir", str(tmp_path / "data")]
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            line = process.stderr.readline()
            process.send_signal(signal.SIGINT)
            rest = process.stderr.read()
            # Its standard error ends before it does.
            process.wait(60)
        finally:
            process.kill()
    assert line == f"headwater: {COMPILING} …\n"
    assert (process.returncode, rest) == (130, "")
