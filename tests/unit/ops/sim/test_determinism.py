"""One log, one state: whatever the interpreter's hash seed is, and with or without the compiler."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import tests
from tests.support.data.story import digests

ROOT = Path(tests.__path__[0]).parent
SEED, RECORDS = 22, 600


def digest_elsewhere(**environment: str) -> str:
    """The digest that a fresh interpreter folds the same story to."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.support.data.story", str(SEED), str(RECORDS)],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def digest_here() -> str:
    """The digest in this process: compiled, with a random hash seed."""
    told = digests(SEED, RECORDS)
    cold, early = map(int, told.split()[2:])
    assert cold >= 3
    assert early >= 2
    return told


def test_the_fold_does_not_depend_on_the_hash_seed(digest_here: str) -> None:
    """Sets and dictionaries order themselves otherwise in another process; the state may not show it."""
    other = "4242" if os.environ.get("PYTHONHASHSEED") != "4242" else "0"
    assert digest_elsewhere(PYTHONHASHSEED=other) == digest_here


def test_the_fold_does_not_depend_on_the_compiler(digest_here: str) -> None:
    """With NUMBA_DISABLE_JIT=1 the same kernels run as plain Python and reach the same state."""
    assert digest_elsewhere(NUMBA_DISABLE_JIT="1") == digest_here


def test_different_logs_have_different_digests(digest_here: str) -> None:
    """The digest is worth comparing: another story, or one record less, has another."""
    others = {digests(SEED, RECORDS - 1), digests(SEED + 1, RECORDS)}
    assert len({told.split()[0] for told in (*others, digest_here)}) == 3
