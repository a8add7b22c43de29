"""The engine actor: one engine as a worker of the fleet.

Subjects in
    hw.<ns>.engine.<worker>.<epoch>.{generate,cancel,status,drain}; hw.<ns>.worker.<worker>.resync
Subjects out
    hw.<ns>.edge.<edge>.frames, and the pool log: fleet, kv and load events of this worker
State
    requests the engine has, with their tokens so far; the lease and its epoch
On lag
    kv events wait in a bounded queue; past its bound they are given up, and once the log takes appends
    again the worker announces its cache anew
On loss of the log
    goes on generating; events wait as above, and new requests are still taken
On loss of the lease
    aborts what runs (the edges move it elsewhere), takes a new lease and joins as a new epoch, announcing
    what the engine still has cached; the engine itself goes on
On stop
    says that it drains, finishes what runs within `drain_s`, aborts the rest, leaves, stops the engine
"""

import asyncio
import contextlib
from typing import Any

import msgspec

from headwater.actors import lease
from headwater.actors.actor import Actor
from headwater.actors.adapter_gate import AdapterGate
from headwater.actors.adapters import Adapters, AdapterSettings
from headwater.actors.bus_port import Message, Subscription
from headwater.actors.cards import Served, publish
from headwater.actors.frames import FrameSender
from headwater.actors.tasks import cancel_all
from headwater.actors.worker_life import Progress, Standing, WorkerLife
from headwater.actors.world import World
from headwater.engines.engine import Engine, EngineInfo, RequestRejected, Step
from headwater.events.writer import WriterFenced
from headwater.schemas import subjects
from headwater.schemas.inference import (
    Accepted,
    Cancel,
    GenerateReply,
    GenerateRequest,
    Refused,
    StatusQuery,
)
from headwater.schemas.names import pool_name

LOAD_PERIOD_S = 1.0
LOAD_INTERVAL_S = 0.005
CHECK_PERIOD_S = 1.0

_encode = msgspec.msgpack.Encoder().encode
_generate = msgspec.msgpack.Decoder(GenerateRequest)
_cancel = msgspec.msgpack.Decoder(Cancel)
_status = msgspec.msgpack.Decoder(StatusQuery)


class EngineActor(Actor):
    """See the module."""

    kind = "worker"

    def __init__(
        self,
        world: World,
        name: str,
        engine: Engine,
        served: Served,
        *,
        drain_s: float = 30.0,
        standing: Standing | None = None,
        lora: AdapterSettings | None = None,
    ) -> None:
        super().__init__(world, name)
        self.engine = engine
        self.adapters: Adapters | None = None
        self._lora = lora or AdapterSettings()
        self._gate = AdapterGate(engine, self.spawn)
        self.standing = standing or Standing(instance=name)
        self._served = served
        self._drain_s = drain_s
        self._frames = FrameSender(world.bus, world.ns, name)
        self._info: EngineInfo | None = None
        self._pool = ""
        self._life: WorkerLife | None = None
        self._subscriptions: list[Subscription] = []
        self._held: dict[str, None] = {}
        self._progress: tuple[list[str], list[str], list[str]] = ([], [], [])
        self._moved = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def info(self) -> EngineInfo:
        """What the engine said when it started."""
        if self._info is None:
            raise RuntimeError("the engine is not started")
        return self._info

    def stats(self) -> dict[str, Any]:
        """See `Actor.stats`."""
        if self._info is None:
            return {"state": "starting", "pool": self._pool}
        load = self.engine.load()
        return {
            "state": "draining" if self.stopping else "ready",
            "pool": self._pool,
            "epoch": self._frames.epoch,
            "running": load.running,
            "waiting": load.waiting,
            "used_blocks": load.used_blocks,
            "total_blocks": load.total_blocks,
            "loras": list(self.standing.loras),
            "tokens_total": self._frames.tokens,
            "kv_events_pending": self._life.kv.pending if self._life else 0,
        }

    async def start(self) -> None:
        """See `Actor.start`. The engine comes up first, so a lease always stands for a working engine."""
        self._info = await self.engine.start()
        self._pool = pool_name(self._info.model, self._info.block_size)
        self.log = self.log.bind(pool=self._pool)
        await publish(self.world, self._served, self.engine, self._info)
        self._start_adapters(self._info)
        self.spawn(self._frames.run(), "frames")
        self.spawn(self._live(), "life")
        self.spawn(self._check(), "check")
        while self._life is None:
            await self.world.clock.sleep(0.01)

    def _start_adapters(self, info: EngineInfo) -> None:
        models = (self._served.name, info.model)
        self.adapters = Adapters(self.world, self._pool, self.engine, info, self._lora, models, self._holds)
        self._gate.adapters = self.adapters
        self.standing = self.standing._replace(lora_on_demand=self.adapters.on_demand)
        if self.adapters.able:
            self.spawn(self.adapters.run(), "adapters")

    def _holds(self, loras: tuple[str, ...]) -> None:
        """The worker holds these adapters from now on."""
        if loras != self.standing.loras:
            self.standing = self.standing._replace(loras=loras)
            if self._life is not None:
                self._life.changed()

    async def _live(self) -> None:
        """One epoch after the other."""
        while True:
            try:
                reason = await self._one_life()
            except* WriterFenced as errors:
                reason = str(errors.exceptions[0])
            self.log.warning("lease_lost", reason=reason, epoch=self._frames.epoch)
            for request in list(self._frames.active):
                self._gate.abort(request)

    async def _one_life(self) -> str:
        world = self.world
        held = await lease.take(
            world.leases, "worker", self.name, world.clock, pool=self._pool, ids=world.ids()
        )
        log = await world.pool_log(self._pool)
        life = WorkerLife(
            world,
            held,
            log,
            self.name,
            self._pool,
            self.engine,
            self.info,
            lambda: list(self._held),
            self._take_progress,
            lambda: self.standing,
        )
        self._frames.epoch = held.epoch
        self._held, self._progress = {}, ([], [], [])
        try:
            async with asyncio.TaskGroup() as group:
                lost = group.create_task(held.hold(), name="lease")
                loops: list[asyncio.Task[Any]] = [lost]
                # Requests are taken once the log knows of this life.
                position = await life.join()
                await self._listen(life.epoch)
                loops += [
                    group.create_task(work, name="log")
                    for work in (life.kv.run(), life.load.run(), life.fleet.run(), self._report(life))
                ]
                loops.append(group.create_task(self._pump(life), name="kv"))
                self._life = life
                self.log.info("worker_joined", epoch=life.epoch, log_position=position)
                reason = await lost
                await cancel_all(loops)
                return reason
        finally:
            self._life = None
            await self._unsubscribe()

    async def _listen(self, epoch: int) -> None:
        verbs: list[tuple[subjects.EngineVerb, Any]] = [
            ("generate", self._on_generate),
            ("cancel", self._on_cancel),
            ("status", self._on_status),
            ("drain", self._on_drain),
        ]
        for verb, handler in verbs:
            subject = subjects.engine(self.world.ns, self.name, epoch, verb)
            self._subscriptions.append(await self.world.bus.subscribe(subject, handler))
        subject = subjects.resync(self.world.ns, self.name)
        self._subscriptions.append(await self.world.bus.subscribe(subject, self._on_resync))

    async def _unsubscribe(self) -> None:
        for subscription in self._subscriptions:
            await subscription.unsubscribe()
        self._subscriptions.clear()

    async def _on_generate(self, message: Message) -> None:
        await self.world.bus.publish(message.reply, _encode(self._take(message.data)))

    def _take(self, data: bytes) -> GenerateReply:
        try:
            request = _generate.decode(data)
        except msgspec.DecodeError as error:
            return Refused(f"unreadable request: {error}", False)
        if self.stopping:
            return Refused(f"worker {self.name} drains", True)
        if request.request in self._frames.active:
            return Accepted()
        self._frames.open(request)
        epoch = self._frames.epoch
        first = True

        def emit(step: Step) -> None:
            nonlocal first
            # What a life before this one took ended for the log when that life did.
            mine = epoch == self._frames.epoch
            if first and mine:
                first = False
                self._progress[1].append(request.request)
                self._moved.set()
            self._frames.step(request.request, step)
            if step.finish:
                if mine:
                    self._held.pop(request.request, None)
                    self._progress[2].append(request.request)
                    self._moved.set()
                if not self._frames.active:
                    self._idle.set()

        try:
            self._gate.submit(request, emit)
        except RequestRejected as error:
            self._frames.active.pop(request.request, None)
            return Refused(str(error), error.retryable)
        self._idle.clear()
        self._held[request.request] = None
        self._progress[0].append(request.request)
        self._moved.set()
        return Accepted()

    async def _on_cancel(self, message: Message) -> None:
        for request in _cancel.decode(message.data).requests:
            self._gate.abort(request)

    async def _on_status(self, message: Message) -> None:
        query = _status.decode(message.data)
        reply = self._frames.status(query.request, query.received)
        await self.world.bus.publish(message.reply, _encode(reply))

    async def _on_drain(self, message: Message) -> None:
        self.log.info("drain_asked")
        self.stop()
        if message.reply:
            await self.world.bus.publish(message.reply, b"")

    async def _on_resync(self, message: Message) -> None:
        self.log.info("resync_asked")
        if self._life is not None:
            await self._life.resync()
        if message.reply:
            await self.world.bus.publish(message.reply, b"")

    async def _pump(self, life: WorkerLife) -> None:
        """Engine cache events into the log."""
        async for events in self.engine.kv_events():
            life.tell(events)

    async def _report(self, life: WorkerLife) -> None:
        """Load into the log: soon after a change, and once a second anyway."""
        clock = self.world.clock
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOAD_PERIOD_S):
                    await self._moved.wait()
            self._moved.clear()
            life.load.offer(life.report(*self._take_progress()))
            await clock.sleep(LOAD_INTERVAL_S)

    def _take_progress(self) -> Progress:
        """Which requests moved on since the last call."""
        accepted, prefilled, finished = self._progress
        self._progress = ([], [], [])
        return tuple(accepted), tuple(prefilled), tuple(finished)

    async def _check(self) -> None:
        """Raises when the engine died: the actor ends, and its supervisor starts a new one."""
        while True:
            await self.world.clock.sleep(CHECK_PERIOD_S)
            await self.engine.check()

    async def drain(self) -> None:
        """See `Actor.drain`."""
        life = self._life
        if life is not None:
            life.drain()
        self.log.info("draining", requests=len(self._frames.active))
        try:
            async with asyncio.timeout(self._drain_s):
                await self._idle.wait()
        except TimeoutError:
            self.log.warning("drain_cut_short", requests=len(self._frames.active), after_s=self._drain_s)
            for request in list(self._frames.active):
                self._gate.abort(request)
            await self.world.clock.sleep(0.1)
        if life is not None and life is self._life:
            try:
                async with asyncio.timeout(2.0):
                    await self._frames.flush()
                    await life.leave()
            except TimeoutError:
                self.log.warning("left_without_telling_the_log")
                await life.lease.release()

    async def close(self) -> None:
        """See `Actor.close`."""
        await self._unsubscribe()
        if self._lora.files is not None:
            self._lora.files.close()
        await self.engine.stop()
