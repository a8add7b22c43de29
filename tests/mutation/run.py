"""Does a test fail when a line is wrong? mutmut breaks one expression after another of three modules on which the most depends.

    python -m tests.mutation.run [MODULE ...]

Prints for each module how many mutants the tests killed, and the change of each that survived. Exit code 1 if a module's share is below
what it was when its tests were last looked at. Needs `make mutmut`.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

import tests

ROOT: Final = Path(tests.__path__[0]).parent
MUTMUT: Final = ROOT / ".mutmut"
START: Final = f"import sys; sys.path.append({str(MUTMUT)!r}); from mutmut.__main__ import cli; cli()"
"""Behind the packages of the environment, some of which mutmut brings in other versions."""

PACKAGES: Final = ("actors", "engines", "events", "ops", "router", "schemas")


class Target(NamedTuple):
    """A module, the tests that have to notice, and the least share of mutants that they kill.

    Those that survive change texts of reasons, or nothing that a caller can see.
    """

    file: str
    tests: tuple[str, ...]
    killed_min: float


TARGETS: Final = {
    "saga": Target("actors/edge/saga/saga.py", ("tests/unit/actors/edge/saga",), 0.95),
    "decide": Target("router/decide.py", ("tests/unit/router",), 0.93),
    "chain": Target(
        "events/chain.py",
        ("tests/unit/events/test_chain.py", "tests/unit/events/test_chains_together.py"),
        0.97,
    ),
}


class Counts(msgspec.Struct):
    """What mutmut counted."""

    total: int
    survived: int
    no_tests: int


def main() -> int:
    """Run the mutations; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("modules", nargs="*", choices=[[], *TARGETS], metavar="MODULE")
    chosen = parser.parse_args().modules or list(TARGETS)
    if not MUTMUT.exists():
        raise SystemExit("mutmut is missing: make mutmut")
    too_few = []
    for name in chosen:
        target = TARGETS[name]
        with tempfile.TemporaryDirectory(prefix="headwater-mutation-") as folder:
            counts, survivors = _run(Path(folder), target)
        share = 1 - (counts.survived + counts.no_tests) / counts.total
        for change in survivors:
            print(change)
        print(
            f"{name}: {share:.3f} of {counts.total} mutants killed, at least {target.killed_min}", flush=True
        )
        too_few += [name] if share < target.killed_min else []
    return 1 if too_few else 0


def _run(tree: Path, target: Target) -> tuple[Counts, list[str]]:
    """Run mutmut in a copy of the tree; returns what it counted, and the changes that survived."""
    _copy(tree, target)
    _mutmut(tree, "run", "--max-children", "2")
    _mutmut(tree, "export-cicd-stats")
    counts = msgspec.json.decode((tree / "mutants" / "mutmut-cicd-stats.json").read_bytes(), type=Counts)
    names = [
        name
        for name, _, verdict in (
            line.strip().partition(": ") for line in _mutmut(tree, "results").splitlines()
        )
        if verdict in ("survived", "no tests")
    ]
    return counts, [_change(_mutmut(tree, "show", name)) for name in names]


def _copy(tree: Path, target: Target) -> None:
    """Copy packages and tests. `src/headwater` has links, which mutmut does not follow."""
    source = tree / "src" / "headwater"
    source.mkdir(parents=True)
    for name in ("__init__.py", "py.typed"):
        shutil.copy(ROOT / "src" / "headwater" / name, source)
    for package in PACKAGES:
        shutil.copytree(ROOT / package, source / package)
    shutil.copytree(ROOT / "tests", tree / "tests")
    project = (ROOT / "pyproject.toml").read_text()
    _, marker, rest = project.partition("[tool.pytest.ini_options]")
    pytest_table = marker + rest.partition("\n[tool.")[0]
    (tree / "pyproject.toml").write_text(f"{pytest_table}\n{_table(target)}")


def _table(target: Target) -> str:
    """Mutmut's configuration. Tests run in one order: a mutant is run with those that came through its function."""
    return "\n".join(
        [
            "[tool.mutmut]",
            'source_paths = ["src"]',
            f'only_mutate = ["src/headwater/{target.file}"]',
            'pytest_add_cli_args = ["-n0", "-q", "-x", "-p", "no:randomly"]',
            f"pytest_add_cli_args_test_selection = {list(target.tests)}",
            "use_git_change_detection = false",
            "track_dependencies = false",
        ]
    )


def _mutmut(tree: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", START, *arguments],
        cwd=tree,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"mutmut {arguments[0]}:\n{done.stdout[-3000:]}{done.stderr[-2000:]}")
    return done.stdout


def _change(shown: str) -> str:
    """The lines that differ."""
    lines = [line for line in shown.splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    return "\n".join(["survived:", *lines])


if __name__ == "__main__":
    sys.exit(main())
