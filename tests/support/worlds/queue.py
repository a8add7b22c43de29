"""A fleet at its threshold on a virtual clock, and an edge whose queries wait at its router."""

import asyncio

import msgspec

from headwater.actors.edge.saga.http_call import NO_HINTS
from headwater.actors.edge.saga.placement import Dispatcher
from headwater.actors.edge.saga.workers import WorkerRegistry
from headwater.actors.runtime.ports import Ports
from headwater.ops.sim.fleet import NAMESPACE, POOL
from headwater.router.queue import BusyLimits, QueueLimits, QueueSettings
from headwater.schemas import subjects
from headwater.schemas.hashing import pack_tokens
from headwater.schemas.inference import Accepted, Cancel, GenerateReply, GenerateRequest, Sampling
from headwater.schemas.routing import Decision, RouteRefused
from tests.support.data.examples import packed
from tests.support.data.queries import route_query
from tests.support.worlds.virtual import Stage, until

Asking = asyncio.Task[Decision | RouteRefused]
FULL = BusyLimits(0, kv=0.01)
"""One request of two blocks is more than a hundredth of a worker's 96."""

LIMITS = QueueLimits(requests=3, tenant_share=1.0)

_reply: msgspec.msgpack.Decoder[GenerateReply] = msgspec.msgpack.Decoder(GenerateReply)


class Edge:
    """Somebody who asks, and hands requests to workers."""

    def __init__(self, stage: Stage, name: str = "edge") -> None:
        self.name = name
        self.process, world = stage.world(name)
        self.world: Ports = world
        self.dispatcher = Dispatcher(WorkerRegistry(world, name, self.process.start), POOL, NO_HINTS)

    def ask(
        self,
        name: str,
        tenant: str = "",
        *,
        priority: int = 0,
        deadline_ms: int = 0,
        waits: bool = True,
        exclude: tuple[str, ...] = (),
    ) -> Asking:
        """Ask where a request of two blocks should go."""
        query = route_query(
            name,
            32,
            16,
            packed(1, 2),
            exclude=exclude,
            priority=priority,
            tenant=tenant,
            deadline_ms=deadline_ms,
            waits=waits,
        )
        return asyncio.ensure_future(self.dispatcher.query(query))

    async def send(self, made: Decision, tokens: int = 20) -> None:
        """Give a request to its worker, which generates so many tokens."""
        sampling = Sampling(tokens, ignore_eos=True)
        request = GenerateRequest(made.request, self.name, 1, pack_tokens([7] * 32), sampling)
        data = await self.world.bus.request(
            subjects.engine(NAMESPACE, made.worker, made.epoch, "generate"),
            msgspec.msgpack.encode(request),
            timeout_s=2.0,
        )
        assert isinstance(_reply.decode(data), Accepted)

    async def cancel(self, made: Decision) -> None:
        """Have a worker stop."""
        subject = subjects.engine(NAMESPACE, made.worker, made.epoch, "cancel")
        await self.world.bus.publish(subject, msgspec.msgpack.encode(Cancel((made.request,))))


async def crowded(stage: Stage, limits: QueueLimits = LIMITS) -> tuple[Edge, Decision]:
    """One worker, busy with one request that takes long; one router, `r1`."""
    await stage.engine("w1")
    await stage.router("r1", QueueSettings(FULL, limits))
    edge = Edge(stage)
    made = await edge.ask("first")
    assert isinstance(made, Decision)
    assert made.waited_ms == 0
    await edge.send(made, 1_400)
    return edge, made


def waiting(stage: Stage, router: str = "r1") -> int:
    """How many wait at a router."""
    count: int = stage.routers[router].stats()["waiting"]
    return count


async def parked(stage: Stage, edge: Edge, name: str, **wishes: object) -> Asking:
    """Ask, and see that it waits."""
    before = waiting(stage)
    asking = edge.ask(name, **wishes)  # type: ignore[arg-type]
    await until(lambda: waiting(stage) == before + 1, 1.0)
    return asking
