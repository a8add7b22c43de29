"""A process that has the command line imported already and forks for each command: a command then takes a tenth of a second.

python -m tests.docs.commands      reads lines of JSON (arguments, folder), answers with (status, output)
"""

import importlib
import json
import os
import pkgutil
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path


class CommandServer:
    """Runs `headwater` commands in forks of one process, which imports in the background from the start on."""

    def __init__(self, environment: dict[str, str], folder: Path) -> None:
        self._folder = folder
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.docs.commands"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )

    def run(self, arguments: list[str], environment: dict[str, str]) -> tuple[int, str]:
        """Exit status and output (both streams, in order) of one command; `environment` is added to its own."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([arguments, str(self._folder), environment]) + "\n")
        self._process.stdin.flush()
        status, output = json.loads(self._process.stdout.readline())
        return status, output

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()


def serve() -> None:
    """Answer commands until standard input ends."""
    # What commands need is imported, and their kernels are loaded, once.
    for package in ("headwater.ops.commands", "headwater.ops.whatif", "headwater.ops.sim"):
        for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
            importlib.import_module(module.name)
    importlib.import_module("headwater.ops.start.actor").compile_kernels()
    for line in sys.stdin:
        arguments, folder, environment = json.loads(line)
        with tempfile.TemporaryFile() as output:
            pid = os.fork()
            if pid == 0:
                os.environ.update(environment)
                _become(arguments, folder, output.fileno())
            _, waited = os.waitpid(pid, 0)
            output.seek(0)
            text = output.read().decode()
        print(json.dumps([os.waitstatus_to_exitcode(waited), text]), flush=True)


def _become(arguments: list[str], folder: str, output: int) -> None:
    from headwater.ops import cli

    status = 1
    try:
        os.chdir(folder)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.argv = ["headwater", *arguments]
        status = cli.main() or 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    serve()
