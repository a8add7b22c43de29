"""What one life of a worker keeps telling the log: its cache as it changes, and its load."""

import asyncio
import contextlib

from headwater.actors.health import EngineHealth
from headwater.actors.intake import Intake
from headwater.actors.worker_life import WorkerLife
from headwater.engines.engine import Engine
from headwater.schemas.clock import Clock

LOAD_PERIOD_S = 1.0
LOAD_INTERVAL_S = 0.005


async def tell_cache(life: WorkerLife, engine: Engine) -> None:
    """The engine's cache events, for ever."""
    async for events in engine.kv_events():
        life.tell(events)


async def tell_load(life: WorkerLife, intake: Intake, health: EngineHealth, clock: Clock) -> None:
    """The load, for ever: soon after a change, and once a second anyway."""
    while True:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOAD_PERIOD_S):
                await intake.moved.wait()
        if health.probing and not intake.moved.is_set():
            # What the engine runs is a canary.
            continue
        intake.moved.clear()
        life.load.offer(life.report(intake.take_progress()))
        await clock.sleep(LOAD_INTERVAL_S)
