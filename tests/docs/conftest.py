"""One simulated fleet for all pages."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from headwater.ops.start.children import child_environment
from tests.docs.commands import CommandServer
from tests.docs.pages import ROOT

READY_S = 180
"""In a fresh checkout the kernels are compiled first."""
_READY = re.compile(r"ready at http://([\d.:]+)/v1 .*NATS nats://([\d.:]+)")
_REQUEST = re.compile(r"\b(?:chatcmpl|cmpl)-[0-9a-f]{16,}\b")
_SHELL = re.compile(r"[|&;<>$`*~]")


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


class Shell:
    """Runs the commands of the pages against one fleet. Pages use the default ports; here they are replaced."""

    def __init__(self, folder: Path, fleet: "Fleet", server: CommandServer) -> None:
        self._ports = ((fleet.http, "127.0.0.1:8000"), (fleet.nats, "127.0.0.1:4222"))
        self._started = fleet.started
        self._server = server
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
            status, output = self._server.run(shlex.split(command)[1:], self._nats)
        else:
            status, output = self._call("bash", "-c", command)
        seen = _REQUEST.findall(output)
        self._request = seen[-1] if seen else self._request
        return status, self._shown(output)

    def run_until(self, command: str, printed: Callable[[str], bool]) -> tuple[int, str]:
        """Exit status and output of a command that is interrupted, as Ctrl-C does, as soon as its output is the expected one, or after a minute."""
        environment = self._environment
        if command.startswith("headwater up "):
            # A fleet of its own: with its own NATS server, and its data apart.
            environment = {name: value for name, value in environment.items() if name not in self._nats}
            command += f" {' '.join(FREE_PORTS)} --data-dir {self._folder / 'data'}"
        elif command.startswith("headwater edge "):
            command += " --port 0"
        log = self._folder / "interrupted.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                shlex.split(command),
                cwd=self._folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        deadline = time.monotonic() + RUNS_S
        try:
            while process.poll() is None and time.monotonic() < deadline:
                if printed(self._shown(log.read_text())):
                    break
                time.sleep(0.05)
            shown = self._shown(log.read_text())
            process.send_signal(signal.SIGINT)
            return process.wait(RUNS_S), shown
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

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
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two simulated workers on free ports."""
    folder = tmp_path_factory.mktemp("fleet")
    log = folder / "up.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "headwater.ops.cli",
                *UP.split()[1:],
                *FREE_PORTS,
                "--data-dir",
                str(folder / "data"),
            ],
            cwd=folder,
            env=child_environment() | {"PYTHONPATH": str(ROOT / "src")},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + READY_S
        while (ready := _READY.search(log.read_text())) is None:
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.05)
        time.sleep(0.1)
        yield Fleet(ready[1], ready[2], log.read_text())
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


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
def server(checkout: Path) -> Iterator[CommandServer]:
    """It imports while the fleet starts."""
    made = CommandServer(child_environment() | environment(checkout), checkout)
    yield made
    made.close()


@pytest.fixture(scope="module")
def shell(checkout: Path, server: CommandServer, fleet: Fleet) -> Shell:
    """A shell in that folder, against the fleet."""
    return Shell(checkout, fleet, server)
