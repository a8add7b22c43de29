"""An edge actor that fails inside its process: whoever waits for an answer has an error at once."""

import asyncio

from headwater.actors.edge.saga.workers import WorkerLost, WorkerRegistry
from headwater.actors.http.errors import ApiError
from headwater.schemas.inference import EmbedRequest
from tests.support.worlds.clock import ManualClock
from tests.support.worlds.edge import NoTasks
from tests.support.worlds.memory import memory_world


class Owed:
    """A request that is owed an end."""

    def __init__(self) -> None:
        self.error: ApiError | None = None

    def abort(self, error: ApiError) -> None:
        """See `headwater.actors.edge.saga.workers.ClientCall`."""
        self.error = error


async def test_every_open_request_ends_with_an_error() -> None:
    """503 with Retry-After, whatever state it is in; nothing new is begun."""
    fleet = WorkerRegistry(memory_world(ManualClock()), "e1", NoTasks().spawn)
    calls = [Owed(), Owed()]
    fleet.calls.update(calls)
    await fleet.close("it failed")
    assert fleet.closed
    for call in calls:
        assert call.error is not None
        assert (call.error.status, call.error.retry_after_s) == (503, 1.0)


async def test_a_question_to_a_worker_ends() -> None:
    """An embedding that a worker still computes is not waited for."""
    world = memory_world(ManualClock())
    fleet = WorkerRegistry(world, "e1", NoTasks().spawn)

    async def never(message: object) -> None:
        del message

    subscription = await world.bus.subscribe("hw.ns.engine.w1.1.embed", never)
    asked = asyncio.ensure_future(fleet.embed("w1", 1, EmbedRequest("r", ())))
    await asyncio.sleep(0)
    await fleet.close("it failed")
    done, _ = await asyncio.wait({asked}, timeout=5.0)
    assert done
    assert isinstance(asked.exception(), WorkerLost)
    await subscription.unsubscribe()
