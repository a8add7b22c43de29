"""Runs commands one after the other, each in a fork of this process, which was executed in the surroundings of a test.

python -m tests.support.processes.surrounded REPORT CLOSED COMMANDS

COMMANDS is a JSON list of (words, port): with a port, the command serves, and is told to end once the port accepts connections. Each end is
a line of JSON on the descriptor REPORT: exit code and output. Streams in CLOSED (1, 2) stay closed. Imports nothing of Headwater before
its first command may: an import that fails here is that command's failure.
"""

import contextlib
import fcntl
import importlib
import json
import os
import pkgutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

POLL_S = 0.02

PACKAGES = (
    "headwater.ops.commands",
    "headwater.ops.start",
    "headwater.ops.sim",
    "headwater.ops.whatif",
)


def main(report: int, closed: Sequence[int], commands: Sequence[tuple[Sequence[str], int]]) -> None:
    """Run the commands, and report how they end."""
    os.set_inheritable(report, False)
    # What fails here fails again in each command that needs it.
    with contextlib.suppress(Exception), _held_streams():
        _import()
    for words, port in commands:
        made = os.memfd_create("output")
        # Not the number of a stream that is closed.
        output = fcntl.fcntl(made, fcntl.F_DUPFD_CLOEXEC, 10)
        os.close(made)
        pid = os.fork()
        if not pid:
            os._exit(_command(words, output, closed))
        code = _code(pid, port)
        text = os.pread(output, 1 << 20, 0).decode(errors="replace")
        os.close(output)
        os.write(report, json.dumps([code, text]).encode() + b"\n")


@contextlib.contextmanager
def _held_streams() -> Iterator[None]:
    """What a library opens while it is imported gets no number of a closed stream: a process that runs one command opens those before."""
    held = []
    while (opened := os.open(os.devnull, os.O_RDWR)) <= 2:
        held.append(opened)
    missing = [name for name in ("stdin", "stdout", "stderr") if getattr(sys, name) is None]
    for name in missing:
        # Modules may keep it.
        setattr(sys, name, open(os.dup(opened), "r+", closefd=False))  # noqa: SIM115
    os.close(opened)
    try:
        yield
    finally:
        for one in held:
            os.close(one)
        for name in missing:
            setattr(sys, name, None)


def _import() -> None:
    for package in PACKAGES:
        for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
            importlib.import_module(module.name)
    importlib.import_module("headwater.ops.start.actor").compile_kernels()


def _code(pid: int, port: int) -> int:
    """The exit code of a command; one that serves is told to end once it does."""
    told = not port
    while True:
        ended, status = os.waitpid(pid, 0 if told else os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            os.kill(pid, signal.SIGTERM)
            told = True
        time.sleep(POLL_S)


def _command(words: Sequence[str], output: int, closed: Sequence[int]) -> int:
    for descriptor in (1, 2):
        if descriptor not in closed:
            os.dup2(output, descriptor)
    sys.argv = ["headwater", *words]
    code: Any = 1
    try:
        code = importlib.import_module("headwater.ops.cli").main(words)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        os.write(output, traceback.format_exc().encode(errors="replace"))
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    return int(code)


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3]))
