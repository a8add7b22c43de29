"""Headwater commands run to their end, and fleets started with any flags and environment."""

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO, NamedTuple

from headwater.ops.start.children import child_environment
from tests.support.processes import zygote
from tests.support.processes.fleet import FleetProcess, descendants

READY = re.compile(rb"ready at (https?://[^/]+)/v1 .*NATS (nats://[0-9.:]+)")

NO_ENVIRON: Mapping[str, str] = {}


class Ended(NamedTuple):
    """What a command left: its exit code and everything it printed."""

    code: int
    output: str

    def told(self) -> str:
        """The only error line of a command that failed as it should: non-zero, without a traceback."""
        assert "Traceback" not in self.output, self.output
        assert self.code not in (0, None), self.output
        assert self.code > 0, f"ended by signal {-self.code}: {self.output}"
        lines = [
            line
            for line in self.output.splitlines()
            if line.startswith("headwater: ") or (line.startswith("headwater ") and ": error: " in line)
        ]
        assert len(lines) == 1, f"{len(lines)} error lines: {self.output}"
        return lines[0]


async def spawn(
    *arguments: str,
    environ: Mapping[str, str] = NO_ENVIRON,
    stdout: int | IO[bytes] | None = None,
    vllm: bool = False,
) -> zygote.Process:
    """A headwater command in a process group of its own; with `stdout` only its errors can be read.

    `vllm`: forked from a process that has imported vLLM.
    """
    return await zygote.start(
        *arguments,
        stdout=zygote.PIPE if stdout is None else stdout,
        stderr=zygote.STDOUT if stdout is None else zygote.PIPE,
        environ=child_environment() | dict(environ),
        vllm=vllm,
    )


async def ended(
    *arguments: str,
    within_s: float = 30,
    environ: Mapping[str, str] = NO_ENVIRON,
    stdout: int | IO[bytes] | None = None,
    vllm: bool = False,
) -> Ended:
    """Run a command to its end. Fails, with what it printed, if it still runs after `within_s`."""
    process = await spawn(*arguments, environ=environ, stdout=stdout, vllm=vllm)
    printed = process.stdout if stdout is None else process.stderr
    assert printed is not None
    output = bytearray()

    async def read() -> None:
        while piece := await printed.read(65536):
            output.extend(piece)
        await process.wait()

    try:
        async with asyncio.timeout(within_s):
            await read()
    except TimeoutError as error:
        text = output.decode(errors="replace")
        raise AssertionError(f"{arguments} still runs after {within_s:g} s: {text[-3000:]}") from error
    finally:
        await kill_all(process)
    assert process.returncode is not None
    return Ended(process.returncode, output.decode(errors="replace"))


async def kill_all(process: zygote.Process) -> None:
    """SIGKILL a process and everything below it, if it still runs; close its pipes."""
    if process.returncode is None:
        for pid in [*descendants(process.pid), process.pid]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        await process.wait()
    await process.close_outputs()


@asynccontextmanager
async def launched(
    folder: Path,
    *flags: str,
    ready_s: float = 40,
    environ: Mapping[str, str] = NO_ENVIRON,
    command: str = "up",
) -> AsyncIterator[FleetProcess]:
    """`headwater up`, or `launch`, with these flags and no others, ready; killed at the end, in whatever state it is."""
    log = folder / "launched.log"
    with log.open("ab") as errors:
        process = await zygote.start(
            command, *flags, stdout=zygote.PIPE, stderr=errors, environ=child_environment() | dict(environ)
        )
    assert process.stdout is not None
    try:
        try:
            async with asyncio.timeout(ready_s):
                while True:
                    line = await process.stdout.readline()
                    assert line, f"headwater {command} ended before it was ready:\n{log.read_text()[-3000:]}"
                    if match := READY.search(line):
                        break
        except TimeoutError as error:
            raise AssertionError(
                f"not ready within {ready_s:g} s:\n{log.read_text(errors='replace')[-3000:]}"
            ) from error
        made = FleetProcess(process, match[1].decode(), match[2].decode(), log)
        try:
            yield made
        finally:
            await made.close()
    finally:
        await kill_all(process)
