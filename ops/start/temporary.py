"""A fleet of simulated engines on a server, ports and a folder of its own, which ends with its block: for benchmarks and replays."""

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

from headwater.ops.config.processes import LocalFleetSettings, with_settings
from headwater.ops.start.machine import Machine
from headwater.ops.start.up import plan_of

READY_S: Final = 120.0
"""How long a fleet may take to start; a busy machine takes more than half a minute."""

_OWN: Final[Mapping[str, Any]] = {
    "worker.engine": "sim",
    "http.port": 0,
    "nats.port": 0,
    "console.port": 0,
    "log.level": "error",
}


@asynccontextmanager
async def temporary_fleet(settings: Mapping[str, Any]) -> AsyncIterator[Machine]:
    """A fleet that is ready. `settings` are those that differ from the defaults, by key. Raises `TimeoutError`."""
    folder = tempfile.mkdtemp(prefix="headwater-")
    fleet = Machine(plan_of(with_settings(LocalFleetSettings(data_dir=folder), {**_OWN, **settings})))
    try:
        await fleet.start()
        async with asyncio.timeout(READY_S):
            await fleet.ready()
        yield fleet
    finally:
        await fleet.stop()
        shutil.rmtree(folder, ignore_errors=True)
