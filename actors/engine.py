"""The engine actor: one engine as a worker of the fleet.

Subjects in
    hw.<ns>.engine.<worker>.<epoch>.{generate,cancel,status,embed,claim,drain};
    hw.<ns>.worker.<worker>.{resync,control}
Subjects out
    hw.<ns>.edge.<edge>.frames, hw.<ns>.engine.<worker>.<epoch>.claim (of another worker), and the pool log: fleet,
    kv and load events of this worker
State
    requests the engine has, with their tokens so far; hand-offs it holds; the lease and its epoch
On lag
    kv events wait in a bounded queue; past its bound they are given up, and once the log takes appends
    again the worker announces its cache anew
On loss of the log
    goes on generating; events wait as above, and new requests are still taken
On loss of the lease store
    goes on generating; where the lease lapsed meanwhile and is free, takes it again under the same epoch
On loss of the lease to another incarnation
    aborts what runs (the edges move it elsewhere), takes a new lease and joins as a new epoch, announcing
    what the engine still has cached; the engine itself goes on
On death of the engine (`actors.health` notices)
    gives its requests up, gives the lease back, tells the log why (`actors.departure`), and ends with the reason
On stop
    says that it drains, finishes what runs within `drain_s`, aborts the rest, leaves, stops the engine
"""

import asyncio
from collections.abc import Coroutine
from typing import Any

import msgspec

from headwater.actors import lease
from headwater.actors.actor import Actor
from headwater.actors.adapter_gate import AdapterGate
from headwater.actors.adapters import Adapters, AdapterSettings
from headwater.actors.bus_port import Message
from headwater.actors.cards import Served, publish
from headwater.actors.control import WorkerControl
from headwater.actors.departure import depart, leave, why
from headwater.actors.embedding import Embedding
from headwater.actors.gate import Gate
from headwater.actors.health import EngineHealth, HealthSettings
from headwater.actors.intake import Intake
from headwater.actors.persistence import Persistence
from headwater.actors.tasks import cancel_all
from headwater.actors.telling import tell_cache, tell_load
from headwater.actors.work import Work
from headwater.actors.worker_life import Standing, WorkerLife
from headwater.actors.worker_subjects import WorkerSubjects
from headwater.actors.world import World
from headwater.engines.engine import Engine, EngineInfo
from headwater.events.writer import WriterFenced
from headwater.schemas import subjects
from headwater.schemas.names import pool_name

_encode = msgspec.msgpack.Encoder().encode

STOP_DEAD_S_MAX = 10.0
"""How long an engine that died may take to end; its processes are killed with this one."""


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
        health: HealthSettings | None = None,
        lora: AdapterSettings | None = None,
    ) -> None:
        super().__init__(world, name)
        self.engine = engine
        self.adapters: Adapters | None = None
        self._lora = lora or AdapterSettings()
        self._gate = AdapterGate(engine, self.spawn)
        self.standing = standing or Standing(instance=name)
        self._served = served
        self.drain_s = drain_s
        self.intake = Intake(world, name, self._gate, self.spawn, self._refuses)
        self._info: EngineInfo | None = None
        self._pool = ""
        self._life: WorkerLife | None = None
        self._subjects = WorkerSubjects(world, name)
        self._persistence = Persistence(world.clock, self.log)
        self._lease: lease.LeaseHandle | None = None
        self._fallen = ""
        self._ready_gate = Gate(world.bus, name, self.spawn)
        self.embedding = Embedding(world.bus, engine, self.spawn, self._refuses, self.intake.account)
        self.work = Work(self._gate, self.intake, self.embedding)
        self.control = WorkerControl(self)
        self.health = EngineHealth(
            engine,
            world.clock,
            world.ids,
            health or HealthSettings(),
            self.work,
            judged=lambda: not self.stopping and self.standing.state in ("ready", "draining"),
        )

    @property
    def info(self) -> EngineInfo:
        """What the engine said when it started."""
        if self._info is None:
            raise RuntimeError("the engine is not started")
        return self._info

    @property
    def pool(self) -> str:
        """The pool that it serves, empty before the engine told."""
        return self._pool

    @property
    def life(self) -> WorkerLife | None:
        """The present life in the log, None between two."""
        return self._life

    @property
    def epoch(self) -> int:
        """Of the present life, or the last one."""
        return self.intake.frames.epoch

    def stats(self) -> dict[str, Any]:
        """See `Actor.stats`."""
        if self._info is None:
            return {"state": "starting", "pool": self._pool}
        load = self.engine.load()
        return {
            "state": "draining" if self.stopping else self.standing.state,
            "role": self.standing.role,
            "pool": self._pool,
            "epoch": self.intake.frames.epoch,
            "running": load.running,
            "waiting": load.waiting,
            "used_blocks": load.used_blocks,
            "total_blocks": load.total_blocks,
            "loras": list(self.standing.loras),
            "tokens_total": self.intake.frames.tokens,
            "handoffs_held": len(self.intake.handoffs),
            "kv_events_pending": self._life.kv.pending if self._life else 0,
        }

    async def start(self) -> None:
        """See `Actor.start`. The engine comes up first, so a lease always stands for a working engine."""
        info = await self.engine.start()
        await self.health.first(info, self.standing.role)
        self._info = info
        self._pool = pool_name(self._info.model, self._info.block_size)
        self.log = self.log.bind(pool=self._pool)
        await publish(self.world, self._served, self.engine, self._info)
        self._start_adapters(info)
        self.spawn(self._persistence.run(), "persistence")
        self.spawn(self.intake.frames.run(), "frames")
        self.spawn(self.intake.expire(), "hand-offs")
        self.spawn(self._or_depart(self._live()), "life")
        self.spawn(self._or_depart(self.health.run(info)), "health")
        while self._life is None:
            await self.world.clock.sleep(0.01)

    def _start_adapters(self, info: EngineInfo) -> None:
        models = (self._served.name, info.model)
        self.adapters = Adapters(self.world, self._pool, self.engine, info, self._lora, models, self._holds)
        self._gate.adapters = self.adapters
        self.standing = self.standing._replace(lora_on_demand=self.adapters.on_demand)
        if self.adapters.able:
            self.control.adapters = self.adapters
            self.spawn(self.adapters.run(), "adapters")

    def _holds(self, loras: tuple[str, ...]) -> None:
        """The worker holds these adapters from now on."""
        if loras != self.standing.loras:
            self.standing = self.standing._replace(loras=loras)
            if self._life is not None:
                self._life.changed()

    async def _live(self) -> None:
        """One epoch after the other, while there is an engine."""
        while not self._fallen:
            try:
                reason = await self._one_life()
            except* WriterFenced as errors:
                reason = str(errors.exceptions[0])
            self.log.warning("lease_lost", reason=reason, epoch=self.intake.frames.epoch)
            self.work.give_up()

    async def _one_life(self) -> str:
        world = self.world
        log = await world.pool_log(self._pool)
        held = await lease.take(
            world.leases,
            "worker",
            self.name,
            world.clock,
            pool=self._pool,
            ids=world.ids(),
            newest=lease.newest_epoch(log, *self._written_subjects()),
        )
        life = WorkerLife(
            world,
            held,
            log,
            self.name,
            self._pool,
            self.engine,
            self.info,
            lambda: list(self.intake.held),
            self.intake.take_progress,
            lambda: self.standing,
        )
        held.is_stalled = lambda: self._persistence.is_stalled
        # The load is told each second: an append that stalls is seen at once.
        self._persistence.add("pool log", lambda: life.load.stalled_s)
        self._persistence.add("lease store", lambda: held.stalled_s)
        self.intake.begin(held.epoch)
        self._lease = held
        try:
            async with asyncio.TaskGroup() as group:
                lost = group.create_task(held.hold(), name="lease")
                loops: list[asyncio.Task[Any]] = [lost]
                # Requests are taken once the log knows of this life: until then they wait at the gate.
                await self._listen(life.epoch)
                position = await life.join()
                loops += [
                    group.create_task(work, name="log")
                    for work in (
                        life.kv.run(),
                        life.load.run(),
                        life.fleet.run(),
                        tell_load(life, self.intake, self.health, world.clock),
                    )
                ]
                loops.append(group.create_task(tell_cache(life, self.engine), name="kv"))
                self._life = life
                self._ready_gate.open()
                self.control.joined()
                self.log.info("worker_joined", epoch=life.epoch, log_position=position)
                reason = await lost
                await cancel_all(loops)
                return reason
        finally:
            self._life = None
            self._ready_gate.shut()
            await self._subjects.close()

    def _written_subjects(self) -> list[str]:
        kinds: tuple[subjects.PoolKind, ...] = ("fleet", "kv", "load")
        return [subjects.pool_subject(self.world.ns, self._pool, kind, self.name) for kind in kinds]

    def _refuses(self) -> str:
        """Why nothing is taken at present, for whoever asks; "" where something is."""
        return self._fallen or self.control.refusal()

    async def _listen(self, epoch: int) -> None:
        ready = self._ready_gate.before
        await self._subjects.open(
            epoch,
            (
                ("generate", ready(self.intake.on_generate)),
                ("cancel", ready(self.intake.on_cancel)),
                ("status", self.intake.on_status),
                ("claim", self.intake.on_claim),
                ("embed", ready(self.embedding.on_embed)),
                ("cancel", self.embedding.on_cancel),
                ("drain", self._on_drain),
            ),
            resync=self._on_resync,
            control=self.control.on_message,
        )

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

    async def _or_depart(self, work: Coroutine[Any, Any, None]) -> None:
        """What ends this actor with an error is told to everybody before it does."""
        try:
            await work
        except Exception as error:
            if not self._fallen:
                self._fallen = f"worker {self.name} failed: {why(error)}"
                await depart(self.intake.frames, self._lease, self._life, why(error))
            raise

    async def drain(self) -> None:
        """See `Actor.drain`."""
        life = self._life
        if life is not None:
            life.drain()
        self.log.info("draining", requests=len(self.work))
        try:
            async with asyncio.timeout(self.drain_s):
                await self.work.over()
        except TimeoutError:
            self.log.warning("drain_cut_short", requests=len(self.work), after_s=self.drain_s)
            self.work.give_up()
            await self.world.clock.sleep(0.1)
        if life is not None and life is self._life:
            await leave(self.intake.frames, life)

    async def close(self) -> None:
        """See `Actor.close`."""
        await self._subjects.close()
        if self._lora.files is not None:
            self._lora.files.close()
        try:
            async with asyncio.timeout(STOP_DEAD_S_MAX if self._fallen else None):
                await self.engine.stop()
        except TimeoutError:
            self.log.error("dead_engine_does_not_end", after_s=STOP_DEAD_S_MAX)
