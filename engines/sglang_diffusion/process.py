"""The process of SGLang's diffusion server: started, watched and stopped with all its own processes."""

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import structlog

from headwater.engines import process as engine_process
from headwater.engines.engine import EngineDied, EngineUnavailable

SCRIPT: Final = Path(__file__).with_name("server.py")
STOP_S: Final = 15.0
"""What SGLang has to end its processes before they are killed."""

TAIL_BYTES: Final = 2_000
"""Bytes of the server's output in the error if it did not start."""

_log = structlog.get_logger("headwater.sglang_diffusion")


class ModelDefaults(msgspec.Struct, frozen=True):
    """What SGLang generates for a request that leaves it out; 0 where the model says nothing."""

    width: int = 0
    height: int = 0
    num_frames: int = 0
    fps: int = 0
    num_inference_steps: int = 0


class DiffusionServer:
    """One server, listening on this machine only. Its files are in a folder of its own, which goes with it.

    Its output goes to this process's standard error stream.
    """

    def __init__(self, python: str, model: str, arguments: Sequence[str]) -> None:
        self.folder = engine_process.take("sglang-diffusion")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._command = (
            python or sys.executable,
            str(SCRIPT),
            str(self._defaults),
            *("--model-path", model, "--host", "127.0.0.1", "--port", str(port)),
            *("--output-path", str(self.folder / "outputs")),
            *("--input-save-path", str(self._inputs)),
            *arguments,
        )
        self._process: asyncio.subprocess.Process | None = None
        self._tail = b""
        self._copying: asyncio.Task[None] | None = None

    @property
    def _defaults(self) -> Path:
        return self.folder / "defaults.json"

    async def start(self) -> None:
        """Start the process. Raises `EngineUnavailable` for an interpreter that does not exist."""
        try:
            # A group of its own: what SGLang starts is stopped with it.
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise EngineUnavailable(
                f"{self._command[0]} cannot be run ({error}): the option python must name the interpreter of an "
                "environment with sglang[diffusion]"
            ) from error
        self._copying = asyncio.create_task(self._copy_output(self._process), name="SGLang's output")

    def check(self) -> None:
        """Raises `EngineDied` with the end of its output if the process has ended."""
        if self._process is None or self._process.returncode is not None:
            code = self._process.returncode if self._process is not None else None
            tail = self._tail.decode("utf-8", "replace").strip()
            raise EngineDied(f"SGLang's diffusion server ended with exit code {code}: {tail}")

    def defaults(self) -> ModelDefaults:
        """Return what the model says, once the server is ready."""
        return msgspec.json.decode(self._defaults.read_bytes(), type=ModelDefaults)

    @property
    def _inputs(self) -> Path:
        return self.folder / "inputs"

    def remove_inputs(self) -> None:
        """Remove the images that the server kept of an edit."""
        shutil.rmtree(self._inputs, ignore_errors=True)
        self._inputs.mkdir()

    def remove_output(self, path: str) -> None:
        """Remove a file that the server wrote, if it is one of its own."""
        file = Path(path)
        if file.is_relative_to(self.folder):
            file.unlink(missing_ok=True)

    async def stop(self) -> None:
        """Stop the server and all its processes, and remove its files."""
        process = self._process
        if process is not None and process.returncode is None:
            self._signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(STOP_S):
                    await process.wait()
            except TimeoutError:
                _log.warning("engine_stop_timed_out")
        self._signal(signal.SIGKILL)
        if process is not None:
            await process.wait()
        if self._copying is not None:
            self._copying.cancel()
            await asyncio.gather(self._copying, return_exceptions=True)
        engine_process.give_up(self.folder)

    def _signal(self, number: int) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)

    async def _copy_output(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while data := await process.stdout.read(65_536):
            self._tail = (self._tail + data)[-TAIL_BYTES:]
            sys.stderr.buffer.write(data)
            sys.stderr.buffer.flush()
