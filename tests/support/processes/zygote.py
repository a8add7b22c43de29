"""Starts the tests' `headwater` processes by fork from one process that has imported everything.

Executed one by one, each costs 1.5 s of CPU for imports and compiled kernels, more than what most tests do. The
processes are real: own session, environment, outputs and signals.

A second one has imported vLLM as well (14 s of CPU): `vllm=True` forks from that one, and `headwater up` forks its
engine host from itself. A third, `sglang=True`, runs in SGLang's environment and has imported SGLang. `-c PROGRAM` as
arguments runs Python instead of a command. `zygotes` starts these processes.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import IO

from headwater.ops.start.children import child_environment
from headwater.ops.start.spawner import SpawnedProcess, Spawner, serve
from tests.support.processes import zygotes
from tests.support.sglang import forks

PIPE = asyncio.subprocess.PIPE
STDOUT = asyncio.subprocess.STDOUT


class Process:
    """A `headwater` process, with what tests use of `asyncio.subprocess.Process`."""

    def __init__(
        self, spawner: Spawner, process: SpawnedProcess, stdout: asyncio.StreamReader | None
    ) -> None:
        self._spawner = spawner
        self._process = process
        self.stdout = stdout
        self.stderr: asyncio.StreamReader | None = None
        self.outputs: list[asyncio.ReadTransport] = []
        self.pid = process.pid
        self._reaping = asyncio.ensure_future(self._close_at_end())

    async def _close_at_end(self) -> None:
        await self._process.wait()
        self._spawner.close()

    @property
    def returncode(self) -> int | None:
        """None while it runs."""
        return self._process.returncode

    async def wait(self) -> int:
        """Wait for its end; returns the exit code."""
        await asyncio.shield(self._reaping)
        return await self._process.wait()

    async def close_outputs(self) -> None:
        """Close the pipes, which nobody may have read to their end."""
        for output in self.outputs:
            output.close()
        await asyncio.sleep(0)  # closed by the loop

    def send_signal(self, number: signal.Signals) -> None:
        """Raises `ProcessLookupError` once it has ended."""
        self._process.send_signal(number)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)

    async def communicate(self) -> tuple[bytes, bytes]:
        """Everything it prints to pipes; returns at its end."""
        ends = (self.stdout, self.stderr)
        texts = await asyncio.gather(*(_read(end) for end in ends))
        await self.wait()
        return texts[0], texts[1]


async def _read(end: asyncio.StreamReader | None) -> bytes:
    return b"" if end is None else await end.read()


async def start(
    *arguments: str,
    stdout: int | IO[bytes] | None = None,
    stderr: int | IO[bytes] | None = None,
    environ: Mapping[str, str] | None = None,
    vllm: bool = False,
    sglang: bool = False,
) -> Process:
    """Start `headwater ARGUMENTS`; outputs as for `asyncio.create_subprocess_exec`."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(zygotes.socket_of("vllm" if vllm else "sglang" if sglang else ""))
    spawner = Spawner(connection)
    loop = asyncio.get_running_loop()
    reading: list[asyncio.StreamReader | None] = [None, None]
    descriptors = [1, 2]
    ours: list[int] = []
    outputs: list[asyncio.ReadTransport] = []
    for number, wanted in enumerate((stdout, stderr)):
        if wanted == PIPE:
            read, write = os.pipe()
            ours.append(write)
            descriptors[number] = write
            reader = reading[number] = asyncio.StreamReader()
            output, _ = await loop.connect_read_pipe(
                lambda reader=reader: asyncio.StreamReaderProtocol(reader),  # type: ignore[misc]
                os.fdopen(read, "rb", buffering=0),
            )
            outputs.append(output)
        elif wanted == STDOUT:
            descriptors[number] = descriptors[0]
        elif wanted is not None:
            descriptors[number] = wanted if isinstance(wanted, int) else wanted.fileno()
    try:
        process = await spawner.spawn(
            arguments, child_environment() if environ is None else environ, descriptors
        )
    finally:
        for end in ours:
            os.close(end)
    made = Process(spawner, process, reading[0])
    made.stderr = reading[1]
    made.outputs = outputs
    return made


def _reap(*_: object) -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _run(arguments: Sequence[str]) -> int:
    """Run a headwater command, or a program of Python."""
    from headwater.ops import cli

    if arguments[0] != "-c":
        return cli.main(arguments)
    sys.argv = ["-c", *arguments[2:]]
    exec(arguments[1], {"__name__": "__main__"})
    return 0


def main(descriptor: int, engine: str) -> None:
    """Fork a spawner for each connection, until killed or the test process is gone."""
    from headwater.engines.process import freeze_heap
    from headwater.engines.vllm import preload
    from headwater.ops import cli  # noqa: F401
    from headwater.ops.start import edge, router  # noqa: F401
    from headwater.ops.start import engine as engine_process  # noqa: F401
    from headwater.ops.start.actor import compile_kernels
    from headwater.ops.start.machine import Machine
    from headwater.ops.start.signals import die_with_parent

    die_with_parent()
    if engine == "vllm":
        preload.preload()
        Machine.forked_engines |= {"vllm", "diffusers"}
    if engine == "sglang":
        forks.preload()
        Machine.forked_engines |= {"sglang"}
    compile_kernels()
    freeze_heap()
    listener = socket.socket(fileno=descriptor)
    # Reaped here and not by the kernel, so that their CPU time counts as this process's children's.
    signal.signal(signal.SIGCHLD, _reap)
    while True:
        connection, _ = listener.accept()
        if not os.fork():
            listener.close()
            serve(connection, _run)
        connection.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
