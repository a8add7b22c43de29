"""Stops an engine that loads, and waits for a part of itself that never comes."""

import asyncio
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.support.processes import zygote
from tests.support.processes.fleet import command_line, descendants

LOADS_S = 200.0
ENDS_S = 30.0
"""vLLM gives its own processes 5 s before it kills them; the rest is for a machine that does other work."""


async def end_while_loading(
    folder: Path,
    *arguments: str,
    number: signal.Signals,
    process_name: str,
    vllm: bool = False,
    sglang: bool = False,
    environ: Mapping[str, str] | None = None,
) -> int:
    """Start `headwater ARGUMENTS` and send it `number` once the engine's process `process_name` runs; its exit code.

    Fails if it has not ended after `ENDS_S`, or if a process below it is left.
    """
    with (folder / "process.log").open("wb") as log:
        process = await zygote.start(
            *arguments, stdout=log, stderr=log, vllm=vllm, sglang=sglang, environ=environ
        )
    try:
        await _until(
            lambda: any(process_name in command_line(pid) for pid in descendants(process.pid)),
            lambda: f"the engine does not load:\n{_end_of(folder)}",
            LOADS_S,
        )
        below = descendants(process.pid)
        process.send_signal(number)
        try:
            async with asyncio.timeout(ENDS_S):
                code = await process.wait()
        except TimeoutError:
            raise AssertionError(f"still runs {ENDS_S} s after {number.name}:\n{_end_of(folder)}") from None
        await _until(
            lambda: not any(command_line(pid) for pid in below),
            lambda: f"left behind: {[line for line in map(command_line, below) if line]}",
            5.0,
        )
        return code
    finally:
        if process.returncode is None:
            for pid in [*descendants(process.pid), process.pid]:
                os.kill(pid, signal.SIGKILL)
            await process.wait()


async def _until(holds: Callable[[], bool], failure: Callable[[], str], within_s: float) -> None:
    try:
        async with asyncio.timeout(within_s):
            while not holds():
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise AssertionError(failure()) from None


def _end_of(folder: Path) -> str:
    return (folder / "process.log").read_text(errors="replace")[-3000:]
