"""Runs pytest, and what failed once more, alone: `python -m tests.support.gate [--before COMMAND] [--beside COMMAND] [PYTEST'S ARGUMENTS]`.

A test that passes then is listed under FLAKY, and does not fail the run unless there are many such. A test that fails again does, and so
do a module that cannot be collected, tests of which nothing is known, and a run that was interrupted.
"""

import argparse
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.support.gate.records import Run

FLAKY_MAX = 5
"""With more tests than that which pass only when run again, the run fails."""

AGAIN_MAX = 10
"""With more failures than that none is run again: the run fails whatever comes of it, and each may take minutes."""

AGAIN_S_MAX = 900.0
"""For one test; most have a much shorter limit of their own."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.gate", allow_abbrev=False)
    parser.add_argument("--before", default="", help="command to run before the tests, whatever comes of it")
    parser.add_argument(
        "--beside", default="", help="command to run at the same time, which must succeed too"
    )
    given, options = parser.parse_known_args(arguments)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="headwater-gate-") as folder:
        with _beside(given.beside, Path(folder, "beside")) as beside:
            if given.before:
                subprocess.run(shlex.split(given.before), check=False)
            run = _first(options, Path(folder, "first"))
        if beside:
            print(f"{beside[0]}:\n{Path(folder, 'beside').read_text()}", end="", flush=True)
        status = _judge(run, options, folder)
    print("\n" + run.line(time.monotonic() - began), flush=True)
    return status or int(any(beside[1:]))


def _judge(run: Run, options: Sequence[str], folder: str) -> int:
    """Run again what failed and say what came of it; `run` becomes what counts. Returns the exit code."""
    failed = run.failed
    if run.exit not in (0, 1) or run.uncollected or run.unreported:
        if run.unreported:
            _heading("NOT RUN", [], f"{run.unreported} of {run.collected} tests")
        return run.exit or 1
    if not failed:
        return run.exit
    if len(failed) > AGAIN_MAX:
        _heading("NOT RUN AGAIN", [], f"{len(failed)} tests failed, more than {AGAIN_MAX}")
        return 1
    _heading("RUN AGAIN, ALONE", failed)
    flaky = []
    chosen = [one for one in options if one not in run.paths]
    if "-n" in options:
        chosen += ["-n", "0"]
    if run.seed is not None:
        chosen.append(f"--randomly-seed={run.seed}")
    for number, test in enumerate(failed):
        again = _again([*chosen, test], Path(folder, f"again-{number}"))
        if again.passed:
            run.tests[test] = again.tests.get(test, ["passed"])
            flaky.append(test)
    lost = [test for test in failed if test not in flaky]
    if lost:
        _heading("FAILED AGAIN", lost)
    if flaky:
        _heading("FLAKY", flaky, f"{len(flaky)} failed and passed when run again; at most {FLAKY_MAX} may")
    return 1 if lost or len(flaky) > FLAKY_MAX else 0


def _first(arguments: Sequence[str], outcomes: Path) -> Run:
    """The whole run, which Ctrl-C and SIGTERM end in pytest's own way."""
    process = subprocess.Popen(_command(arguments, outcomes))

    def forward(number: int, _: object) -> None:
        # A terminal sends Ctrl-C to both processes.
        if number == signal.SIGTERM:
            process.send_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, forward)
    try:
        status = process.wait()
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    run = Run.read(outcomes)
    # What pytest wrote as its end is not its end if it crashed after that.
    run.exit = status if status >= 0 else 128 - status
    return run


def _again(arguments: Sequence[str], outcomes: Path) -> Run:
    """One test in a process of its own."""
    # A session of its own: nothing that it started is left when it takes too long.
    process = subprocess.Popen(_command(arguments, outcomes), start_new_session=True)
    try:
        status = process.wait(AGAIN_S_MAX)
    except subprocess.TimeoutExpired:
        print(f"{arguments[-1]} did not end within {AGAIN_S_MAX:g} s", flush=True)
        status = 1
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    run = Run.read(outcomes)
    run.exit = status
    return run


def _command(arguments: Sequence[str], outcomes: Path) -> list[str]:
    # In one word: a worker of pytest-xdist takes a path behind the flag for the root of the tests.
    plugin = ("-p", "tests.support.gate.outcomes", f"--outcomes={outcomes}")
    return [sys.executable, "-m", "pytest", *plugin, *arguments]


@contextlib.contextmanager
def _beside(command: str, output: Path) -> Iterator[list[str | int]]:
    """Run a command meanwhile, if one is given; at the end, which waits for it, the list has its name and exit code."""
    ended: list[str | int] = []
    if not command:
        yield ended
        return
    words = shlex.split(command)
    with output.open("wb") as file:
        process = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT)
    try:
        yield ended
    finally:
        ended += [Path(words[0]).name, process.wait()]


def _heading(title: str, lines: Sequence[str], note: str = "") -> None:
    print("\n" + f" {title} ".center(80, "="), *lines, *([note] if note else []), sep="\n", flush=True)


if __name__ == "__main__":
    sys.exit(main())
