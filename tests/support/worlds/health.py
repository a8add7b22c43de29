"""A worker whose engine's health is watched: quickly, and until it dies."""

from typing import Any

from headwater.actors.worker.settings import HealthSettings
from headwater.schemas import subjects
from tests.support.worlds.control import Worker
from tests.support.worlds.virtual import Stage, until

QUICK = HealthSettings(canary_s=5.0, idle_s=10.0, probe_s=4.0, stuck_s=60.0)

LEASE = subjects.lease_key("worker", "w1")


async def lease_of(stage: Stage) -> Any:
    """The worker's lease as the server has it."""
    return await stage.fleet.store.leases.get(LEASE)


async def dies(stage: Stage, worker: Worker, within_s: float) -> float:
    """Wait until the worker's process would end; its lease is gone by then."""
    took = await until(lambda: worker.ended is not None, within_s)
    assert worker.ended
    assert await lease_of(stage) is None
    return took
