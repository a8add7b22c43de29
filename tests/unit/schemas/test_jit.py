"""Machine code that is cached on disk is that of the present sources."""

import os
import subprocess
import sys
from pathlib import Path

KERNEL = """
from headwater.schemas.jit import kernel
from inner import double


@kernel
def quadruple(number):
    return double(double(number))


print(quadruple(3), sum(quadruple.stats.cache_hits.values()))
"""

INNER = """
from headwater.schemas.jit import jitable
from innermost import times


@jitable
def double(number):
    return times(number)
"""

INNERMOST = """
from headwater.schemas.jit import jitable


@jitable
def times(number):
    return {} * number
"""


def run(folder: Path) -> list[int]:
    """(result, functions that came from the cache) of the program in a new process."""
    environment = os.environ | {"NUMBA_CACHE_DIR": str(folder / "cache"), "NUMBA_DISABLE_JIT": "0"}
    done = subprocess.run(
        [sys.executable, str(folder / "outer.py")],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return [int(word) for word in done.stdout.split()]


def test_a_change_in_a_file_that_is_compiled_in_is_noticed(tmp_path: Path) -> None:
    """Numba's own cache looks at the kernel's file alone."""
    (tmp_path / "outer.py").write_text(KERNEL)
    (tmp_path / "inner.py").write_text(INNER)
    (tmp_path / "innermost.py").write_text(INNERMOST.format(2))
    assert run(tmp_path) == [12, 0]
    assert run(tmp_path) == [12, 1]
    (tmp_path / "innermost.py").write_text(INNERMOST.format(3))
    assert run(tmp_path) == [27, 0]
