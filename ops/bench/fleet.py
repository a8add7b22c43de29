"""A temporary fleet of simulated engines for the benchmarks of edge and router."""

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

from headwater.ops.config.processes import LocalFleetSettings
from headwater.ops.config.tree import with_settings
from headwater.ops.fleet.up import LocalFleet

READY_S = 120.0
"""How long a fleet may take to start; a busy machine takes more than half a minute."""


NO_SETTINGS: Final[Mapping[str, Any]] = {}


@asynccontextmanager
async def running(workers: int, settings: Mapping[str, Any] = NO_SETTINGS) -> AsyncIterator[LocalFleet]:
    """A fleet whose engine steps take no time, on its own server and ports. `settings` are further ones, by key."""
    folder = tempfile.mkdtemp(prefix="headwater-bench-")
    fleet = LocalFleet(
        with_settings(
            LocalFleetSettings(data_dir=folder),
            {
                "worker.engine": "sim",
                "sim.step_time": "zero",
                "fleet.workers": workers,
                "http.port": 0,
                "nats.port": 0,
                "log.level": "error",
                **settings,
            },
        )
    )
    try:
        await fleet.start()
        async with asyncio.timeout(READY_S):
            await fleet.ready()
        yield fleet
    finally:
        await fleet.stop()
        shutil.rmtree(folder, ignore_errors=True)
