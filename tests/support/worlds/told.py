"""A fleet on virtual time that has a past to show: requests in bursts, one handed over, one that lost its worker, one that failed."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from headwater.actors.runtime.ports import Ports
from headwater.events.ports import Record
from headwater.ops.history.history import History
from headwater.ops.sim.checks import messages
from headwater.ops.sim.fleet import NAMESPACE, POOL, SimFleet
from headwater.ops.sim.loop import VirtualLoop
from headwater.ops.sim.network import Process
from headwater.schemas.events import Role
from tests.sim.disaggregated import ask, fleet_of

ROLES: tuple[Role, ...] = ("both", "both", "both")


def ports_of(fleet: SimFleet) -> Ports:
    """The ports of a process that only reads."""
    return fleet.ports(Process("console", fleet.loop), "console")


async def history_of(fleet: SimFleet) -> History:
    """The whole history of the fleet's pool, read up to now."""
    ports = ports_of(fleet)
    history = History(ports, POOL, await ports.pool_log(POOL))
    await history.open()
    await history.follow()
    return history


async def records_of(fleet: SimFleet) -> list[Record]:
    """All messages of the pool's log."""
    found = [one for one in await messages(fleet.store.pool(POOL)) if isinstance(one, Record)]
    assert found
    return found


async def ask_many(fleet: SimFleet, draw: random.Random, count: int) -> list[Any]:
    """Requests at once, half of which share a prefix."""
    prompts = [
        ([7] * 48 if draw.random() < 0.5 else []) + draw.choices(range(9, 90), k=40) for _ in range(count)
    ]
    return await asyncio.gather(*(ask(fleet, prompt, draw.randrange(2, 20)) for prompt in prompts))


@asynccontextmanager
async def told(clock: VirtualLoop, roles: Sequence[Role] = ROLES, bursts: int = 4) -> AsyncIterator[SimFleet]:
    """The fleet after some bursts, one of which lost a worker."""
    draw = random.Random(5)
    async with fleet_of(clock, roles=roles) as fleet:
        for burst in range(bursts):
            if burst == 2:
                asked = asyncio.ensure_future(ask_many(fleet, draw, 12))
                await asyncio.sleep(0.15)
                victim = fleet.engines[-1]
                await fleet.kill(victim)
                await asked
                await asyncio.sleep(8.0)
                fleet.start(victim)
                await asyncio.sleep(3.0)
            else:
                await ask_many(fleet, draw, 12)
            await asyncio.sleep(1.0)
        yield fleet


__all__ = ["NAMESPACE", "POOL", "Role", "ask_many", "history_of", "ports_of", "records_of", "told"]
