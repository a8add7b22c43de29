"""A worker on a virtual-time stage that takes commands, and somebody who gives them."""

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from headwater.actors.runtime.ports import Ports
from headwater.actors.worker.actor import WorkerActor
from headwater.actors.worker.model_card import Served
from headwater.actors.worker.settings import HealthSettings, WorkerProfile
from headwater.events.memory import MemoryLog
from headwater.events.ports import AppendResult, Entry
from headwater.ops.sim.fleet import FILES, MODEL, NAMESPACE, SETTINGS
from headwater.schemas import subjects
from headwater.schemas.control import Command, ControlReply, ControlRequest
from headwater.schemas.hashing import pack_tokens
from headwater.schemas.inference import (
    EmbedReply,
    EmbedRequest,
    GenerateReply,
    GenerateRequest,
    Leg,
    Sampling,
    StatusQuery,
    StatusReply,
)
from tests.support.engines.controlled import ControlledSim
from tests.support.worlds.virtual import Stage, until

_encode = msgspec.msgpack.Encoder().encode
_reply: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(GenerateReply)


class Worker:
    """A worker that was started: not yet joined. `asks` is somebody else's world on the same stage."""

    def __init__(self, stage: Stage, actor: WorkerActor, engine: ControlledSim) -> None:
        self.stage = stage
        self.actor = actor
        self.engine = engine
        self.ended: str | None = None
        self._asks: Ports | None = None

    @property
    def asks(self) -> Ports:
        """The world of who gives commands and requests."""
        if "asker" not in self.stage.fleet.processes:
            self.stage.asker = self.stage.world("asker")[1]  # type: ignore[attr-defined]
        world: Ports = self.stage.asker  # type: ignore[attr-defined]
        return world

    async def told(self, command: Command, by: str = "me", **arguments: Any) -> ControlReply:
        """Give a command; its first answer."""
        data = _encode(ControlRequest(command, arguments, by))
        subject = subjects.control(NAMESPACE, self.actor.name)
        return msgspec.msgpack.decode(
            await self.asks.bus.request(subject, data, timeout_s=1_000.0), type=ControlReply
        )

    async def given(self, number: int, tokens: int = 400, epoch: int = 0, leg: Leg = "") -> Any:
        """Give it a request of two blocks, as an edge does; its answer."""
        request = GenerateRequest(
            f"r{number}-0-1",
            "e1",
            number,
            pack_tokens([number] * 32),
            Sampling(tokens, ignore_eos=True),
            leg=leg,
        )
        subject = subjects.engine(NAMESPACE, self.actor.name, epoch or self.actor.epoch, "generate")
        return _reply.decode(await self.asks.bus.request(subject, _encode(request), timeout_s=2.0))

    async def pooled(self, name: str) -> EmbedReply:
        """Give it a prompt to pool, as an edge does; its answer."""
        request = EmbedRequest(name, (pack_tokens([1, 2, 3]),))
        subject = subjects.engine(NAMESPACE, self.actor.name, self.actor.epoch, "embed")
        data = await self.asks.bus.request(subject, _encode(request), timeout_s=500.0)
        reply: EmbedReply = msgspec.msgpack.decode(data, type=EmbedReply)
        return reply

    async def status_of(self, number: int) -> StatusReply:
        """What an edge hears that asks after a silent request."""
        subject = subjects.engine(NAMESPACE, self.actor.name, self.actor.epoch, "status")
        data = _encode(StatusQuery(f"r{number}-0-1", 0))
        return msgspec.msgpack.decode(
            await self.asks.bus.request(subject, data, timeout_s=2.0), type=StatusReply
        )


async def start(
    stage: Stage,
    name: str = "w1",
    make: type[ControlledSim] = ControlledSim,
    *,
    health: HealthSettings | None = None,
    profile: WorkerProfile | None = None,
    lora: Any = None,
    log: Callable[[MemoryLog], Any] | None = None,
    prepare: Callable[[ControlledSim], None] = lambda _: None,
) -> Worker:
    """Start a worker and do not wait for it. `log` puts something between it and the pool log."""
    process, world = stage.world(name)
    if log is not None:
        made = log(stage.pool)

        async def pool_log(_: str) -> Any:
            return made

        world = world._replace(pool_log=pool_log)
    engine = make(SETTINGS, process)
    prepare(engine)
    actor = WorkerActor(
        world, name, engine, Served(MODEL, FILES), drain_s=1.0, health=health, profile=profile
    )
    actor.lora = lora
    worker = Worker(stage, actor, engine)

    async def live() -> None:
        worker.ended = await actor.run()

    process.start(live(), "actor")
    return worker


async def ready(stage: Stage, **more: Any) -> Worker:
    """A worker that has joined."""
    worker = await start(stage, **more)
    await until(worker.actor.ready.is_set, within_s=200.0)
    return worker


class HeldLog:
    """The pool log, which takes nothing before `go` returns."""

    def __init__(self, log: MemoryLog, go: Callable[[], Awaitable[Any]]) -> None:
        self._log = log
        self._go = go

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)

    async def append(self, *entries: Entry, deadline_s: float = 5.0) -> AppendResult:
        """See `Log.append`."""
        await self._go()
        return await self._log.append(*entries)
