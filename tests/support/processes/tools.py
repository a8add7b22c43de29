"""Other projects' programs as processes of a test."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

STOP_S = 10.0


@asynccontextmanager
async def running(
    log: Path, *line: str, cwd: Path | None = None
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A program until the block ends; what it prints is in `log`."""
    with log.open("ab") as output:
        process = await asyncio.create_subprocess_exec(*line, cwd=cwd, stdout=output, stderr=output)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
            try:
                async with asyncio.timeout(STOP_S):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()
