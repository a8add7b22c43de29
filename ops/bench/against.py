"""`headwater bench edge --against COMMIT`: the same benchmark with the code of another commit, in turns on this machine.

Each round runs both, one after the other, so that what else the machine does meets both alike. The other commit runs with the
packages of this environment. It needs a Git checkout.
"""

import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Final

import msgspec

from headwater.ops.bench.report import Measure, Report
from headwater.ops.config.errors import ConfigError

ROOT: Final = Path(__file__).resolve().parents[2]
"""The checkout."""

ROUNDS: Final = 3


def bench(words: Sequence[str], commit: str) -> Report:
    """Run `headwater bench` with these words, and the same of `commit`. Raises `ConfigError` for a commit that is not there."""
    with tempfile.TemporaryDirectory(prefix="headwater-against-") as folder:
        other = Path(folder)
        _extract(commit, other)
        rounds = [(_run(words, ROOT), _run(words, other)) for _ in range(ROUNDS)]
    measures: list[Measure] = []
    for measure in rounds[0][0].measures:
        ours = statistics.median(_value(one, measure.name) for one, _ in rounds)
        theirs = statistics.median(_value(one, measure.name) for _, one in rounds)
        measures += (
            Measure(measure.name, ours, measure.unit),
            Measure(f"  at {commit}", theirs, measure.unit),
            Measure("  ratio", ours / theirs if theirs else 0.0, "times"),
        )
    conditions = {**rounds[0][0].conditions, "rounds, in turns": ROUNDS, "against": commit}
    return Report(f"{rounds[0][0].benchmark}, against {commit}", conditions, measures)


def _extract(commit: str, folder: Path) -> None:
    try:
        archive = subprocess.run(
            ["git", "-C", str(ROOT), "archive", commit], check=True, capture_output=True
        ).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", b"") or str(error).encode()
        raise ConfigError(f"--against {commit}: {reason.decode().strip()}") from error
    with tarfile.open(fileobj=BytesIO(archive)) as files:
        files.extractall(folder, filter="data")


def _run(words: Sequence[str], tree: Path) -> Report:
    """The report of one run, with the code of a source tree."""
    environ = {**os.environ, "PYTHONPATH": str(tree / "src")}
    command = [sys.executable, "-m", "headwater.ops.cli", "bench", *words, "--json"]
    done = subprocess.run(command, cwd=tree, env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(f"--against: bench of {tree} ended with {done.returncode}: {done.stderr[-500:]}")
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=Report)


def _value(report: Report, name: str) -> float:
    return next((measure.value for measure in report.measures if measure.name == name), 0.0)
