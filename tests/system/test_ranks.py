"""Data-parallel ranks of one engine as workers of a fleet, over a real server: they join, answer and end together."""

import asyncio
from pathlib import Path

import pytest

from headwater.actors.runtime.actor import Actor
from headwater.actors.runtime.ports import Ports
from headwater.actors.worker.actor import WorkerActor
from headwater.actors.worker.model_card import Served
from headwater.actors.worker.settings import WorkerProfile
from headwater.engines.engine import Engine
from headwater.engines.model_files import byte_model_files
from headwater.ops.config.processes import MetricsSettings
from headwater.ops.config.sections import NatsSettings
from headwater.ops.nats.server import open_ports
from headwater.ops.start import actor
from headwater.ops.start.engine import rank_name, run_ranks
from headwater.schemas.events import WorkerJoined
from headwater.schemas.names import pool_name
from tests.support.engines.sim_ranks import SETTINGS, SimRanks
from tests.support.servers.nats import NatsServer

pytestmark = pytest.mark.timeout(120)

WORKER = "host-1"


async def joined(world: Ports, count: int) -> list[WorkerJoined]:
    """The first `count` workers that the pool's log tells of."""
    found: list[WorkerJoined] = []
    async with asyncio.timeout(40):
        log = await world.pool_log(pool_name(SETTINGS.model, SETTINGS.block_size))
        async for piece in log.read(0, follow=True):
            for record in piece.records:
                found += [event for event in record.batch.events if isinstance(event, WorkerJoined)]
            if len(found) >= count:
                break
    return found


@pytest.mark.parametrize("end", ["stop", "death"])
async def test_ranks_are_workers_of_one_instance_that_end_together(tmp_path: Path, end: str) -> None:
    """Each under its own name; a stop ends all with 0, a death of the engine ends all with 1."""
    server = NatsServer(tmp_path)
    await server.start()
    try:
        engine = SimRanks(2)
        stop = asyncio.Event()
        host = actor.Host(NatsSettings(server.url), MetricsSettings())
        served = Served("sim", byte_model_files("sim"))

        async def make(world: Ports, name: str, rank: Engine) -> Actor:
            profile = WorkerProfile(instance=WORKER)
            return WorkerActor(world, name, rank, served, drain_s=0.5, profile=profile)

        # Connected before the ranks start: they share this loop, and what they import and compile holds it on a loaded machine.
        async with open_ports(server.url, "default", "watcher") as world:
            running = asyncio.create_task(run_ranks(host, WORKER, engine, make, stop, actor.run_one))
            events = await joined(world, 2)
        assert {event.worker for event in events} == {rank_name(WORKER, number) for number in range(2)}
        assert {event.instance for event in events} == {WORKER}
        assert (engine.starts, engine.stops) == (1, 0)
        if end == "stop":
            stop.set()
        else:
            engine.dead = True
        async with asyncio.timeout(20):
            assert await running == (0 if end == "stop" else 1)
        assert engine.stops == 1
    finally:
        server.stop()
