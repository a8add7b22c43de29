"""Machine code that is cached on disk is that of the present sources."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

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


LAZY = """
import sys
import numpy
from headwater.router.index import prefix_index
from headwater.schemas import hashing, jit

kept, tokens = hashing._chain, numpy.arange(64, dtype=numpy.uint32)
assert "numba" not in sys.modules
expected = hashing.chain_plain(tokens.tolist(), 16, 0)
assert hashing.sequence_hashes(tokens, 16).tolist() == expected
left = [(name, key) for name, module in sys.modules.items() if name.startswith("headwater.")
        for key, found in vars(module).items() if isinstance(found, jit._StandIn)]
out = numpy.empty(4, numpy.uint64)
kept(hashing.as_read_only(tokens), 16, numpy.uint64(0), hashing._NO_EXTRA, out)
assert out.tolist() == expected
print(len(left), len(hashing._chain.signatures))
"""

WITHOUT_CACHE = """
import errno, os, tempfile
from numba.core import caching

def refuse(*args, **kwargs):
    raise OSError(errno.{error}, os.strerror(errno.{error}))

{what} = refuse
"""
"""What a folder that cannot be written does to numba, for root too."""


def test_the_first_call_of_a_kernel_imports_numba_and_replaces_all_stand_ins() -> None:
    """One that was kept elsewhere than in a module goes on working."""
    environment = os.environ | {"NUMBA_DISABLE_JIT": "0"}
    done = subprocess.run(
        [sys.executable, "-c", LAZY], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.stderr, done.stdout.split()) == ("", ["0", "1"])


def run(folder: Path) -> list[int]:
    """(result, functions that came from the cache) of the program in a new process."""
    environment = os.environ | {
        "NUMBA_CACHE_DIR": str(folder / "cache"),
        "NUMBA_DISABLE_JIT": "0",
        "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
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


@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("tempfile.TemporaryFile", "EROFS"),
        *(
            pytest.param(*rest, marks=pytest.mark.soak)
            for rest in (
                ("caching.IndexDataCacheFile.save", "ENOSPC"),
                ("tempfile.TemporaryFile", "EACCES"),
                ("tempfile.TemporaryFile", "ENOSPC"),
                ("caching.IndexDataCacheFile.save", "EROFS"),
                ("caching.IndexDataCacheFile.save", "EACCES"),
            )
        ),
    ],
)
def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path, what: str, error: str) -> None:
    """No folder can be written, or the disk is full by the time: the function is compiled and runs."""
    (tmp_path / "outer.py").write_text(WITHOUT_CACHE.format(what=what, error=error) + KERNEL)
    (tmp_path / "inner.py").write_text(INNER)
    (tmp_path / "innermost.py").write_text(INNERMOST.format(2))
    assert run(tmp_path) == [12, 0]


@pytest.mark.soak
def test_a_cache_that_cannot_be_written_is_read(tmp_path: Path) -> None:
    """An image that was warmed up when it was built starts as quickly where its root is read-only."""
    names = ("outer.py", "inner.py", "innermost.py")
    for name, text in zip(names, (KERNEL, INNER, INNERMOST.format(2))):
        (tmp_path / name).write_text(text)
    assert run(tmp_path) == [12, 0]
    broken = WITHOUT_CACHE.format(what="tempfile.TemporaryFile", error="EROFS")
    # The kernel's own file stays as it was: numba looks at its time.
    (tmp_path / "sitecustomize.py").write_text(broken)
    assert run(tmp_path) == [12, 1]


def test_a_damaged_cache_is_made_again(tmp_path: Path) -> None:
    """A process was killed, or the disk was full, while the cache was written."""
    for name, text in zip(("outer.py", "inner.py", "innermost.py"), (KERNEL, INNER, INNERMOST.format(2))):
        (tmp_path / name).write_text(text)
    assert run(tmp_path) == [12, 0]
    files = [path for path in (tmp_path / "cache").rglob("*.nb?") if path.is_file()]
    assert files
    for path in files:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert run(tmp_path) == [12, 0]
    assert run(tmp_path) == [12, 1]
