"""A throw-away fleet of simulated engines for the benchmarks of edge and router."""

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from headwater.ops.config import Settings
from headwater.ops.up import Fleet


@asynccontextmanager
async def running(workers: int) -> AsyncIterator[Fleet]:
    """A fleet whose engines take no time, on its own server and ports."""
    folder = tempfile.mkdtemp(prefix="headwater-bench-")
    fleet = Fleet(
        Settings(
            engine="sim",
            sim_step_time="zero",
            workers=workers,
            port=0,
            nats_port=0,
            data_dir=folder,
            log_level="error",
        )
    )
    try:
        await fleet.start()
        async with asyncio.timeout(30):
            await fleet.ready()
        yield fleet
    finally:
        await fleet.stop()
        shutil.rmtree(folder, ignore_errors=True)
