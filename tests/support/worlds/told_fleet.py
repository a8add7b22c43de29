"""Both logs of a fleet as a test tells them: sealed, chained, with decisions that a router would make on them."""

from typing import Any

from headwater.actors.runtime.ports import Ports
from headwater.events.ports import Entry, Log, Record, Stored
from headwater.router.decide import DecisionContext, decide, prompt_of
from headwater.router.state import RouterState
from headwater.schemas.encoding import NO_DIGEST, SCHEMA_VERSION, Batch, decode_batch, seal
from headwater.schemas.events import BlocksCleared, Event, LoadReported
from headwater.schemas.routing import Decision, RouteQuery, Weights
from headwater.schemas.subjects import PoolKind, pool_subject, request_subject
from tests.support.data.examples import joined
from tests.support.worlds.clock import ManualClock
from tests.support.worlds.memory import memory_world

ROUTER, EDGE = "r1", "e1"


class ToldFleet:
    """A pool `p` and the request log, in memory or on a server. `state` is the fold of what was told."""

    def __init__(self, ports: Ports, log: Log) -> None:
        self.ports = ports
        self.log = log
        self.state = RouterState()
        self._heads: dict[str, tuple[int, int, bytes]] = {}
        self._decisions = 0

    async def tell(self, kind: PoolKind, writer: str, *events: Event, epoch: int = 1) -> int:
        """Append a message to the pool's log; returns its position."""
        subject = pool_subject(self.ports.ns, "p", kind, writer)
        position, data = await self._append(self.log, subject, writer, epoch, events)
        self.state.apply(Record(position, subject, self.ports.clock.wall_ns(), decode_batch(data)))
        return position

    async def tell_request(self, *events: Event, edge: str = EDGE) -> int:
        """Append a message to the request log; returns its position."""
        subject = request_subject(self.ports.ns, edge)
        return (await self._append(self.ports.requests, subject, edge, 1, events))[0]

    async def _append(
        self, log: Log, subject: str, writer: str, epoch: int, events: tuple[Event, ...]
    ) -> tuple[int, bytes]:
        at, seq, digest = self._heads.get(subject, (0, 0, NO_DIGEST))
        seq = seq + 1 if at == epoch else 1
        wall_ns = self.ports.clock.wall_ns()
        batch: Batch[Any] = Batch(SCHEMA_VERSION, writer, epoch, seq, wall_ns, events, previous=digest)
        message = seal(batch)
        self._heads[subject] = (epoch, seq, message.digest)
        stored = await log.append(Entry(subject, message))
        assert isinstance(stored, Stored)
        return stored.position, message.data

    async def join(self, *workers: str, **fields: int) -> None:
        """Workers join, with an empty cache."""
        for worker in workers:
            await self.tell("fleet", worker, joined(worker, **fields))
            await self.tell("kv", worker, BlocksCleared())

    async def report(
        self, worker: str, running: int = 0, waiting: int = 0, used: int = 0, *, epoch: int = 1, **lists: Any
    ) -> int:
        """A worker reports its load."""
        return await self.tell(
            "load", worker, LoadReported(running, waiting, used, 1000, **lists), epoch=epoch
        )

    async def decide(self, query: RouteQuery) -> Decision:
        """A router decides on the state so far, and tells it."""
        made = await self.try_to_decide(query)
        assert made is not None, "no worker may take it"
        return made

    async def try_to_decide(self, query: RouteQuery) -> Decision | None:
        """The same; None where no worker may take the request."""
        self._decisions += 1
        context = DecisionContext(
            self._decisions,
            self.state.position,
            self._decisions - 1,
            self.ports.clock.wall_ns(),
            Weights(),
            False,
        )
        state = self.state
        made = decide(state.index, state.loads, state.cold, prompt_of(query), query, context)
        if not isinstance(made, Decision):
            self._decisions -= 1
            return None
        await self.tell("route", ROUTER, made)
        return made


async def told_fleet(ports: Ports | None = None) -> ToldFleet:
    """An empty fleet; in memory, on a clock that stands still, unless it has ports."""
    ports = ports or memory_world(ManualClock())
    return ToldFleet(ports, await ports.pool_log("p"))


def clock_of(told: ToldFleet) -> ManualClock:
    """The clock of a fleet in memory."""
    assert isinstance(told.ports.clock, ManualClock)
    return told.ports.clock
