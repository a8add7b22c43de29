"""Does a test fail when an important line is wrong? Breaks one line after another in a copy of the tree and runs tests.

    python -m tests.mutation.run [--only NUMBER ...] [--list]

Prints a row for each mutation: detected (with the first test that failed) or SURVIVED. Exit code 1 if one survived.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import tests
from tests.mutation.mutation import Mutation
from tests.mutation.table import MUTATIONS

ROOT = Path(tests.__path__[0]).parent
TESTS_S = 300.0
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


def main() -> int:
    """Run the mutations; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", type=int, nargs="+", default=[], metavar="NUMBER")
    parser.add_argument("--list", action="store_true", help="print the table and run nothing")
    arguments = parser.parse_args()
    chosen = [
        (number, mutation)
        for number, mutation in enumerate(MUTATIONS, 1)
        if not arguments.only or number in arguments.only
    ]
    if arguments.list:
        for number, mutation in chosen:
            print(f"{number:3} {mutation.file}: {mutation.why}")
        return 0
    survived = 0
    with tempfile.TemporaryDirectory(prefix="headwater-mutation-") as folder:
        tree = Path(folder) / "tree"
        _copy(tree)
        for number, mutation in chosen:
            began = time.monotonic()
            verdict = _verdict(tree, mutation)
            survived += verdict.startswith("SURVIVED")
            took = time.monotonic() - began
            print(f"{number:3} {mutation.file}: {mutation.why}: {verdict} ({took:.0f} s)", flush=True)
    print(f"{len(chosen) - survived} of {len(chosen)} mutations detected")
    return 1 if survived else 0


def _copy(tree: Path) -> None:
    """Copy what git tracks, and the kernels compiled beside it: they take half a minute to compile."""
    shutil.copytree(
        ROOT,
        tree,
        symlinks=True,
        ignore=shutil.ignore_patterns(".git", ".venv", ".gpu", ".mypy_cache", "headwater-data", "_build"),
    )


def _verdict(tree: Path, mutation: Mutation) -> str:
    path = tree / mutation.file
    text = path.read_text()
    found = text.count(mutation.before)
    if found != 1:
        raise SystemExit(f"{mutation.file}: the line to mutate occurs {found} times: {mutation.before!r}")
    path.write_text(text.replace(mutation.before, mutation.after))
    # A cached kernel is not compiled anew when one that it calls has changed.
    kernels = {"NUMBA_CACHE_DIR": str(tree / f".kernels-{time.monotonic_ns()}")} if "@kernel" in text else {}
    try:
        run = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-x", "-n0", "-p", "no:cacheprovider", *mutation.tests],
            cwd=tree,
            env={
                **os.environ,
                "PYTHONPATH": f"{tree / 'src'}{os.pathsep}{tree}",
                "PYTHONDONTWRITEBYTECODE": "1",
                **kernels,
            },
            capture_output=True,
            text=True,
            timeout=TESTS_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "detected: tests hang"
    finally:
        path.write_text(text)
    if run.returncode == 0:
        return "SURVIVED"
    if run.returncode != 1:
        raise SystemExit(f"pytest ended with {run.returncode}:\n{run.stdout[-3000:]}{run.stderr[-2000:]}")
    failed = FAILED.search(run.stdout)
    return f"detected by {failed[1] if failed else 'a test'}"


if __name__ == "__main__":
    sys.exit(main())
