"""What the log says of a worker that took commands."""

import asyncio

from headwater.router.state import RouterState
from headwater.schemas.events import WorkerChanged, WorkerControlled
from tests.support.worlds.virtual import Stage, events_of


async def folded(stage: Stage) -> RouterState:
    """What a router knows."""
    state = RouterState()
    for one in await stage.records():
        assert state.apply(one) is None
    return state


async def audited(stage: Stage) -> list[WorkerControlled]:
    """The audit, once everything is written."""
    await asyncio.sleep(0.1)
    return events_of(await stage.records(), WorkerControlled)


async def states(stage: Stage) -> list[tuple[str, str]]:
    """How the worker stood, one after the other."""
    await asyncio.sleep(0.1)
    return [(one.state, one.role) for one in events_of(await stage.records(), WorkerChanged)]
