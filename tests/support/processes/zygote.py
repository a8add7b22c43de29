"""Starts the tests' `headwater` processes by fork from one process that has imported everything.

Executed one by one, each costs 1.5 s of CPU for imports and compiled kernels, more than what most tests do. The
processes are real: own session, environment, outputs and signals.

A second one has imported vLLM as well (14 s of CPU): `vllm=True` forks from that one, and `headwater up` forks its
engine host from itself. A third, `sglang=True`, runs in SGLang's environment and has imported SGLang. `-c PROGRAM` as
arguments runs Python instead of a command. `zygotes` starts these processes.
"""

import asyncio
import contextlib
import gc
import importlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any
from unittest.mock import patch

from headwater.ops.start.children import child_environment
from headwater.ops.start.spawner import SpawnedProcess, Spawner, serve
from tests.support.processes import zygotes
from tests.support.sglang import forks

PRELOADS = (
    "headwater.engines.sim.engine",
    "headwater.ops.cli",
    "headwater.ops.console.process",
    *(f"headwater.ops.start.{name}" for name in ("edge", "engine", "router")),
)

COMMANDS = ("up", "edge", "router", "engine", "replay")
"""What nearly every test with a fleet runs."""

VLLM_MODELS = ("qwen2_audio", "qwen2_vl", "whisper")
"""Of whose processors vLLM makes some in each process of an engine; their modules are imported when first used."""

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


def prepare_vllm() -> None:
    """Do once in a process that has imported vLLM what each engine forked from it would do when it starts, and again when it ends: 2 s of
    processor time.
    """
    from vllm.platforms import current_platform

    # It looks through the attributes of all modules.
    current_platform.register_triton_kernel_overrides()
    patch.object(current_platform, "register_triton_kernel_overrides", lambda: None).start()
    # VLLM's processes collect garbage when they end, and before that would have everything looked at that was imported here.
    patch.object(gc, "unfreeze", lambda: None).start()


def _import_processors() -> None:
    """A process of an engine that takes media makes some processors: 1.5 s of processor time."""
    from transformers.models.auto.video_processing_auto import video_processor_class_from_name

    # It imports the processors of all models.
    video_processor_class_from_name("Qwen2VLVideoProcessor")
    for name in VLLM_MODELS:
        importlib.import_module(f"vllm.model_executor.models.{name}")
        importlib.import_module(f"transformers.models.{name}.processing_{name}")
    importlib.import_module("transformers.tokenization_mistral_common")


def _prepare_commands() -> None:
    """Assemble the arguments of a fleet's commands once: 0.03 to 0.1 s of processor time in each process, which reads one line."""
    from cyclopts.argument import ArgumentCollection

    from headwater.ops.commands.application import application

    assemble: Callable[..., Any] = ArgumentCollection._from_callable
    assembled: dict[object, Any] = {}

    def take(function: object, *given: Any, **more: Any) -> Any:
        # They hold what was read, so they are good for one line.
        known = None if more.get("parse_docstring") else assembled.pop(function, None)
        return assemble(function, *given, **more) if known is None else known

    for name in COMMANDS:
        app = application(needed=name)[name]
        assembled[app.default_command] = app.assemble_argument_collection()
    patch.object(ArgumentCollection, "_from_callable", take).start()


def main(descriptor: int, engine: str) -> None:
    """Fork a spawner for each connection, until killed or the test process is gone."""
    from headwater.engines.process import freeze_heap
    from headwater.engines.vllm import preload
    from headwater.ops.start.actor import compile_kernels
    from headwater.ops.start.machine import Machine
    from headwater.ops.start.signals import die_with_parent

    die_with_parent()
    for name in PRELOADS:
        importlib.import_module(name)
    if engine == "vllm":
        preload.preload()
        _import_processors()
        prepare_vllm()
        Machine.forked_engines |= {"vllm", "diffusers"}
    if engine == "sglang":
        forks.preload()
        Machine.forked_engines |= {"sglang"}
    compile_kernels()
    _prepare_commands()
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
