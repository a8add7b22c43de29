"""One simulated fleet for all pages."""

import asyncio
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from headwater.ops.start.children import child_environment
from tests.docs.pages import ROOT
from tests.support.processes import zygote
from tests.support.processes.commands import kill_all

READY_S = 180
"""In a fresh checkout the kernels are compiled first."""
_READY = re.compile(r"ready at http://([\d.:]+)/v1 .*NATS nats://([\d.:]+)")
_REQUEST = re.compile(r"\b(?:chatcmpl|cmpl)-[0-9a-f]{16,}\b")
_SHELL = re.compile(r"[|&;<>$`*~]")

IN_FOLDER = """
import os, sys
from headwater.ops import cli
os.chdir(sys.argv[1])
sys.exit(cli.main(sys.argv[2:]))
"""


def environment(folder: Path) -> dict[str, str]:
    """Variables of the commands."""
    return {
        "PATH": f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}",
        "COLUMNS": "200",
    }


UP = "headwater up --engine sim"
RUNS_S = 60
FREE_PORTS = ("--port", "0", "--nats-port", "0")


async def started(
    folder: Path, words: Sequence[str], environ: Mapping[str, str], log: Path
) -> zygote.Process:
    """A headwater command, given without its first word, in a folder; what it prints is in `log`."""
    with log.open("wb") as out:
        return await zygote.start(
            "-c", IN_FOLDER, str(folder), *words, stdout=out, stderr=out, environ=environ
        )


async def until_printed(
    process: zygote.Process, log: Path, holds: Callable[[str], bool], within_s: float
) -> str:
    """What a command has printed when that holds, when it has ended, or after `within_s`."""
    try:
        async with asyncio.timeout(within_s):
            while process.returncode is None and not holds(log.read_text()):
                await asyncio.sleep(0.05)
    except TimeoutError:
        pass
    return log.read_text()


class Shell:
    """Runs the commands of the pages against one fleet. Pages use the default ports; here they are replaced."""

    def __init__(self, folder: Path, fleet: "Fleet", runner: asyncio.Runner) -> None:
        self._ports = ((fleet.http, "127.0.0.1:8000"), (fleet.nats, "127.0.0.1:4222"))
        self._started = fleet.started
        self._runner = runner
        self._nats = {"HEADWATER_NATS": f"nats://{fleet.nats}"}
        self._request = ""
        self._folder = folder
        self._environment = child_environment() | environment(folder) | self._nats

    def run(self, command: str) -> tuple[int, str]:
        """Exit status and output. `chatcmpl-…` is the request that was seen last."""
        if command == UP:
            return 0, self._shown(self._started)
        for real, shown in self._ports:
            command = command.replace(shown, real)
        command = re.sub(r"\b(?:chatcmpl|cmpl)-…", self._request, command)
        if command.startswith("headwater ") and not _SHELL.search(command):
            status, output = self._runner.run(self._ended(command, self._environment, lambda text: False))
        else:
            status, output = self._call("bash", "-c", command)
        seen = _REQUEST.findall(output)
        self._request = seen[-1] if seen else self._request
        return status, self._shown(output)

    def run_until(self, command: str, printed: Callable[[str], bool]) -> tuple[int, str]:
        """Exit status and output of a command that is interrupted, as Ctrl-C does, as soon as its output is the expected one and not empty, or after a minute."""
        environment = self._environment
        if command.startswith("headwater up "):
            # A fleet of its own: with its own NATS server, and its data apart.
            environment = {name: value for name, value in environment.items() if name not in self._nats}
            command += f" {' '.join(FREE_PORTS)} --data-dir {self._folder / 'data'}"
        elif command.startswith("headwater edge "):
            command += " --port 0"
        status, output = self._runner.run(
            self._ended(command, environment, lambda text: bool(text) and printed(self._shown(text)))
        )
        return status, self._shown(output)

    async def _ended(
        self, command: str, environ: Mapping[str, str], interrupted: Callable[[str], bool]
    ) -> tuple[int, str]:
        """Exit status and output of a headwater command, to which Ctrl-C is sent once that holds for its output."""
        log = self._folder / "command.log"
        process = await started(self._folder, shlex.split(command)[1:], environ, log)
        try:
            await until_printed(process, log, interrupted, RUNS_S)
            if process.returncode is None:
                process.send_signal(signal.SIGINT)
            async with asyncio.timeout(RUNS_S):
                return await process.wait(), log.read_text()
        finally:
            await kill_all(process)

    def python(self, code: str) -> tuple[int, str]:
        """Exit status and output of a program."""
        for real, shown in self._ports:
            code = code.replace(shown, real)
        status, output = self._call(sys.executable, "-c", code)
        return status, self._shown(output)

    def _call(self, *words: str) -> tuple[int, str]:
        """Exit status and output of a process."""
        done = subprocess.run(
            words,
            cwd=self._folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=RUNS_S,
            check=False,
        )
        return done.returncode, done.stdout.decode()

    def _shown(self, output: str) -> str:
        for real, shown in self._ports:
            output = output.replace(real, shown)
        return output.replace("\r\n", "\n")


class Fleet(NamedTuple):
    """A running `headwater up`: the addresses of its edge and its NATS server, and what it printed until it was ready."""

    http: str
    nats: str
    started: str


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    """The event loop of the module's processes."""
    with asyncio.Runner() as made:
        yield made


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, runner: asyncio.Runner) -> Iterator[Fleet]:
    """Two simulated workers on free ports."""
    folder = tmp_path_factory.mktemp("fleet")
    log = folder / "up.log"
    words = (*UP.split()[1:], *FREE_PORTS, "--data-dir", str(folder / "data"))
    process = runner.run(started(folder, words, child_environment(), log))
    try:
        text = runner.run(until_printed(process, log, lambda text: "\ntry: " in text, READY_S))
        ready = _READY.search(text)
        assert ready is not None, text[-3000:]
        yield Fleet(ready[1], ready[2], text)
        process.send_signal(signal.SIGINT)
        runner.run(asyncio.wait_for(process.wait(), 30))
    finally:
        runner.run(kill_all(process))


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that looks like a checkout with an installed `headwater`."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("docs", "examples", "ops", "src", "tests", "pyproject.toml"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "bin").mkdir()
    script = folder / "bin" / "headwater"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -m headwater.ops.cli "$@"\n')
    script.chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def shell(checkout: Path, fleet: Fleet, runner: asyncio.Runner) -> Shell:
    """A shell in that folder, against the fleet."""
    return Shell(checkout, fleet, runner)
