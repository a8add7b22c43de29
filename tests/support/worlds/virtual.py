"""Production actors on a virtual-time loop with simulated ports, one after the other and as a test likes them."""

import asyncio
import inspect
import random
from collections.abc import Awaitable, Callable, Coroutine
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import msgspec

from headwater.actors.router.actor import RouterActor
from headwater.actors.runtime import lease
from headwater.actors.runtime.actor import Actor
from headwater.actors.runtime.ports import Ports
from headwater.actors.worker.actor import WorkerActor
from headwater.actors.worker.model_card import Served
from headwater.actors.worker.settings import WorkerProfile
from headwater.engines.sim.engine import SimEngine
from headwater.events.memory import MemoryLog
from headwater.events.ports import Record
from headwater.ops.sim import loop
from headwater.ops.sim.checks import messages
from headwater.ops.sim.fleet import FILES, MODEL, POOL, SETTINGS, SimFleet
from headwater.ops.sim.loop import VirtualLoop
from headwater.ops.sim.network import Process
from headwater.router.queue import QueueSettings
from headwater.schemas import subjects
from headwater.schemas.tables import Lease

P = ParamSpec("P")
T = TypeVar("T")
First = TypeVar("First")
Test = Coroutine[Any, Any, None]
POLL_S = 0.01


class Stage:
    """A store and a network, and the processes that a test starts on them."""

    def __init__(self, clock: VirtualLoop) -> None:
        self.clock = clock
        self.fleet = SimFleet(clock, random.Random(1), lambda *_: None, [], [], [])
        self.workers: dict[str, WorkerActor] = {}
        self.routers: dict[str, RouterActor] = {}

    @property
    def pool(self) -> MemoryLog:
        """The pool log as the server has it."""
        return self.fleet.store.pool(POOL)

    def world(self, name: str) -> tuple[Process, Ports]:
        """A process and its ports."""
        process = self.fleet.processes[name] = Process(name, self.clock)
        return process, self.fleet.ports(process, name)

    async def engine(
        self, name: str, make: type[SimEngine] = SimEngine, *, revision: str = ""
    ) -> WorkerActor:
        """A worker that has joined."""
        process, world = self.world(name)
        actor = self.workers[name] = WorkerActor(
            world,
            name,
            make(SETTINGS, process),
            Served(MODEL, FILES),
            drain_s=1.0,
            profile=WorkerProfile(instance=name, revision=revision),
        )
        await self._start(process, actor)
        return actor

    async def router(self, name: str, queue: QueueSettings | None = None) -> RouterActor:
        """A router that has caught up."""
        process, world = self.world(name)
        actor = self.routers[name] = RouterActor(world, name, POOL, queue=queue)
        await self._start(process, actor)
        return actor

    async def _start(self, process: Process, actor: Actor) -> None:
        process.start(actor.run(), "actor")
        await until(actor.ready.is_set, within_s=20.0)

    async def records(self) -> list[Record]:
        """The pool log's messages."""
        return [one for one in await messages(self.pool) if isinstance(one, Record)]

    async def kill(self, name: str) -> None:
        """SIGKILL."""
        assert await self.fleet.processes[name].kill() == []


async def until(holds: Callable[[], object], within_s: float = 10.0) -> float:
    """Wait until something is true; returns how many virtual seconds it took."""
    clock = asyncio.get_running_loop()
    began = clock.time()
    while not holds():
        assert clock.time() - began < within_s, "it never came true"
        await asyncio.sleep(POLL_S)
    return clock.time() - began


def play(work: Callable[[Stage], Awaitable[T]]) -> T:
    """Run a test on a stage of its own; every process is killed behind it."""

    async def run(clock: VirtualLoop) -> T:
        stage = Stage(clock)
        try:
            return await work(stage)
        finally:
            for name, process in stage.fleet.processes.items():
                if process.alive:
                    await stage.kill(name)

    return loop.run(run)


def _run_by(
    runner: Callable[[Callable[[First], Test]], None], test: Callable[Concatenate[First, P], Test]
) -> Callable[P, None]:
    """The test that `runner` gives its first argument, and pytest the others."""

    @wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        runner(lambda first: test(first, *args, **kwargs))

    whole = inspect.signature(test)
    parameters = list(whole.parameters.values())[1:]
    run.__signature__ = whole.replace(parameters=parameters)  # type: ignore[attr-defined]
    return run


def virtual(test: Callable[Concatenate[VirtualLoop, P], Test]) -> Callable[P, None]:
    """A test in virtual time, whose first argument is the loop."""
    return _run_by(loop.run, test)


def staged(test: Callable[Concatenate[Stage, P], Test]) -> Callable[P, None]:
    """A test on a stage of its own, its first argument; every process is killed behind it."""
    return _run_by(play, test)


def events_of(records: list[Record], kind: type[Any]) -> list[Any]:
    """All events of a type."""
    return [event for record in records for event in record.batch.events if isinstance(event, kind)]


async def logged_requests(stage: Stage, kind: type[Any]) -> list[Any]:
    """Events of the request log of a type, once they are written."""
    await asyncio.sleep(1.0)
    records = [one for one in await messages(stage.fleet.store.requests) if isinstance(one, Record)]
    return events_of(records, kind)


async def another_takes_the_lease(stage: Stage, worker: str) -> None:
    """Another incarnation holds a worker's lease for as long as one lasts, and lets it lapse."""
    table = stage.fleet.store.leases
    claim = msgspec.json.encode(Lease(kind="worker", name=worker, pool=POOL, incarnation="another"))
    assert await table.create(subjects.lease_key("worker", worker), claim, ttl_s=lease.TTL_S) is not None
    stage.clock.later(lease.TTL_S, table.expire)
