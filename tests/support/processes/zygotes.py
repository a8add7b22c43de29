"""The processes from which tests fork others, one for each engine: started when a test first needs it, shared by all workers.

Each worker of pytest-xdist would otherwise import vLLM, or SGLang, for itself. The controller holds the sockets on which they
listen; a connection to one of them starts its process, which then takes the socket over.
"""

import atexit
import os
import selectors
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from functools import cache
from pathlib import Path
from typing import Literal, cast, get_args

from tests.support.sglang.environment import PYTHON, ROOT

Engine = Literal["", "vllm", "sglang"]

_shared: list[Path] = []


class Zygotes:
    """All of them. `folder` holds their sockets."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="headwater-zygotes-"))
        self._processes: dict[Path, subprocess.Popen[bytes]] = {}
        self._waiting = selectors.DefaultSelector()
        for engine in get_args(Engine):
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            listener.bind(_socket(self.folder, engine))
            listener.listen(64)
            self._waiting.register(listener, selectors.EVENT_READ, engine)
        # It never ends: the kernel kills a zygote with the thread that started it.
        threading.Thread(target=self._start_when_needed, name="zygotes", daemon=True).start()

    def _start_when_needed(self) -> None:
        while True:
            for key, _ in self._waiting.select():
                with cast(socket.socket, key.fileobj) as listener:
                    self._waiting.unregister(listener)
                    log = self.folder / f"zygote-{key.data}.log"
                    self._processes[log] = _start(key.data, listener, log)

    def close(self) -> None:
        """Kill them, and with them what they have forked."""
        for log, process in self._processes.items():
            if process.poll() is not None:
                # None of them ends by itself.
                print(f"{log.stem} ended with {process.returncode}:\n{log.read_text()}", file=sys.stderr)
            process.kill()
            process.wait()
            assert process.stdin is not None
            process.stdin.close()
        for key in list(self._waiting.get_map().values()):
            cast(socket.socket, key.fileobj).close()
        shutil.rmtree(self.folder, ignore_errors=True)


def use(folder: str) -> None:
    """Use those of another process, whose sockets are in `folder`."""
    _shared[:] = [Path(folder)]


def begin(*engines: Engine) -> None:
    """Have those of a whole run import what they fork with, before the first test that needs them waits for that."""
    if not _shared:
        return
    for engine in engines:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.connect(socket_of(engine))


def socket_of(engine: Engine) -> str:
    """Path of the socket of an engine's zygote."""
    return _socket(_shared[0] if _shared else _own().folder, engine)


@cache
def _own() -> Zygotes:
    """Those of this process, for a run without pytest-xdist."""
    made = Zygotes()
    atexit.register(made.close)
    return made


def _socket(folder: Path, engine: str) -> str:
    return str(folder / (engine or "headwater"))


def _start(engine: Engine, listener: socket.socket, log: Path) -> subprocess.Popen[bytes]:
    # Every run of pytest imports this module, the shortest, too.
    from headwater.ops.start.children import child_environment

    environ, python = child_environment(), sys.executable
    if engine == "sglang":
        python = str(PYTHON)
        # Headwater is not installed there.
        environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    with log.open("wb") as output:
        return subprocess.Popen(
            [python, "-m", "tests.support.processes.zygote", str(listener.fileno()), engine],
            pass_fds=[listener.fileno()],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            env=environ,
        )
