"""Data-parallel ranks of one engine as workers of a fleet, over a real server: they join, answer and end together."""

import asyncio
from pathlib import Path

import pytest

from headwater.actors.actor import Actor
from headwater.actors.cards import Served
from headwater.actors.engine import EngineActor
from headwater.actors.worker_life import Standing
from headwater.actors.world import World
from headwater.engines.engine import Engine
from headwater.engines.sim_model import sim_model_files
from headwater.ops import run_actor
from headwater.ops.config import Settings
from headwater.ops.run_ranks import rank_name, run_ranks
from headwater.ops.world import open_world
from headwater.schemas.fleet import WorkerJoined
from headwater.schemas.names import pool_name
from tests.support.nats import NatsServer
from tests.support.sim_ranks import SETTINGS, SimRanks

pytestmark = pytest.mark.timeout(60)

WORKER = "host-1"


async def joined(url: str, count: int) -> list[WorkerJoined]:
    """The first `count` workers that the pool's log tells of."""
    found: list[WorkerJoined] = []
    async with asyncio.timeout(20), open_world(url, "default", "watcher") as world:
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
        settings = Settings(nats=server.url, drain_s=0.5)
        served = Served("sim", sim_model_files("sim"))

        async def make(world: World, name: str, rank: Engine) -> Actor:
            standing = Standing(instance=WORKER)
            return EngineActor(world, name, rank, served, drain_s=0.5, standing=standing)

        running = asyncio.create_task(run_ranks(settings, WORKER, engine, make, stop, run_actor.run_one))
        events = await joined(server.url, 2)
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
