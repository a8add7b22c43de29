"""Child processes of the GPU benchmarks: spawned, each with its own environment and log file."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_SPAWN = multiprocessing.get_context("spawn")
STOP_S = 3.0


class ChildFailed(RuntimeError):
    """The child ended or raised; the message names its log."""


class BenchChild:
    """A process that handles one request at a time.

    `body(pipe, *arguments)` runs in it: after `environ` is set and before anything heavy is imported, so that
    CUDA and UCX read their variables. Its standard output and error go to `log`.
    """

    def __init__(
        self, body: Callable[..., None], arguments: tuple[Any, ...], environ: dict[str, str], log: Path
    ) -> None:
        self.log = log
        self._pipe, theirs = _SPAWN.Pipe()
        self._process = _SPAWN.Process(target=_main, args=(body, theirs, arguments, environ, str(log)))
        self._process.start()
        theirs.close()

    def send(self, question: Any) -> None:
        """Send without waiting."""
        self._pipe.send(question)

    def receive(self, timeout_s: float) -> Any:
        """The next reply. Raises `ChildFailed` if there is none in time."""
        try:
            if self._pipe.poll(timeout_s):
                answer = self._pipe.recv()
                if not isinstance(answer, Exception):
                    return answer
                raise ChildFailed(f"{type(answer).__name__}: {answer} (log: {self.log})")
        except EOFError:
            raise ChildFailed(f"the process ended (log: {self.log})") from None
        raise ChildFailed(f"no answer in {timeout_s:.0f} s (log: {self.log})")

    def request(self, question: Any, timeout_s: float) -> Any:
        """Send and wait for the reply. Raises `ChildFailed`."""
        self.send(question)
        return self.receive(timeout_s)

    def stop(self, grace_s: float = STOP_S) -> None:
        """Request its end; after `grace_s` kill it with all processes that it started."""
        pid = self._process.pid
        try:
            self._pipe.send(None)
        except OSError:
            pass  # it has ended already
        self._process.join(grace_s)
        if pid is not None:
            try:
                os.killpg(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # no process of its group is left
        self._process.join(STOP_S)


def _main(
    body: Callable[..., None], pipe: Connection, arguments: tuple[Any, ...], environ: dict[str, str], log: str
) -> None:
    os.setsid()
    os.environ.update(environ)
    with open(log, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        body(pipe, *arguments)
    except Exception as error:
        import traceback

        traceback.print_exc()
        # As text: vLLM's own exceptions do not always survive pickling.
        pipe.send(RuntimeError(f"{type(error).__name__}: {error}"))
        time.sleep(0.1)
        raise


def ucx_choices(log: Path, limit: int = 24) -> list[str]:
    """UCX's choices, from a log written with `UCX_SAYS`: lanes of each connection, protocols of remote reads and
    writes by size, without duplicates; at most `limit` lines.
    """
    found: dict[str, None] = {}
    heading = ""
    for line in log.read_text(errors="replace").splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if " rma(" in line or " rma_am(" in line:
            found.setdefault("lanes " + line.split("cfg#", 1)[-1])
        elif len(cells) == 1 and cells[0].startswith("remote memory"):
            heading = cells[0]
        elif heading and len(cells) == 3:
            if cells[0] != "Range":
                found.setdefault(f"{heading}: {', '.join(cells)}")
        elif "+--" not in line:
            heading = ""
    return list(found)[:limit]
