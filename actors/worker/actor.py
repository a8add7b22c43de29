"""The worker actor: one engine, or one data-parallel rank of it, as a worker of the fleet.

Subjects in
    hw.<ns>.engine.<worker>.<epoch>.{generate,cancel,status,embed,encode,image,claim,offer,drain};
    hw.<ns>.worker.<worker>.{resync,control}
Subjects out
    hw.<ns>.edge.<edge>.{frames,media,streams.<epoch>}, hw.<ns>.engine.<worker>.<epoch>.{claim,offer} (of another worker), and the pool log: fleet,
    kv and load events of this worker
State
    requests in flight with their tokens so far; hand-offs kept for other workers; the lease and its epoch
On lag
    KV events wait in a bounded queue; past its bound they are dropped, and once the log accepts appends again the
    worker announces its whole cache
On loss of the log
    continues to generate and to accept requests; events wait as above
On loss of the lease store
    continues to generate; if the lease lapsed in the meantime and is free, reclaims it under the same epoch
On loss of the lease to another incarnation
    aborts its requests (the edges migrate them), takes a new lease and joins under a new epoch, announcing the
    engine's cached blocks; the engine keeps running
On death of the engine (see `health`)
    ends its requests with an error, releases the lease, publishes the reason (see `incarnation`), and fails with it
On stop
    publishes that it drains, finishes requests in flight within `drain_s`, aborts the rest, leaves, stops the engine
"""

import asyncio
from collections.abc import Coroutine
from typing import Any

import msgspec

from headwater.actors.limits import DRAIN_TIMEOUT_S
from headwater.actors.runtime import lease
from headwater.actors.runtime.actor import Actor, cancel_all
from headwater.actors.runtime.lease import OfferAnswers
from headwater.actors.runtime.ports import Handler, Message, Persistence, Ports, Subscription
from headwater.actors.worker.control import WorkerControl
from headwater.actors.worker.encoding import EmbeddingReader, EncodeRequests
from headwater.actors.worker.handoffs import OrphanWatch
from headwater.actors.worker.health import EngineHealth
from headwater.actors.worker.incarnation import (
    CommandAudit,
    Incarnation,
    ReadyGate,
    describe_failure,
    shutdown_after_drain,
    shutdown_after_failure,
    written_subjects,
)
from headwater.actors.worker.inflight import WorkerStatus
from headwater.actors.worker.jobs import FileJobs, PoolingRequests
from headwater.actors.worker.lora import LoraGate, LoraManager, LoraSettings
from headwater.actors.worker.model_card import CardKeeper, Served, media_processor, name_revision
from headwater.actors.worker.requests import RequestIntake
from headwater.actors.worker.settings import HealthSettings, WorkerProfile
from headwater.engines.engine import Engine, EngineInfo
from headwater.engines.transfer.slab import OpenTransfer, TensorTransfer
from headwater.events.writer import WriterFenced
from headwater.schemas import subjects
from headwater.schemas.names import pool_name
from headwater.schemas.subjects import EngineVerb
from headwater.schemas.tables import ModelCard, kinds_encoded

STOP_DEAD_S_MAX = 10.0
"""How long a dead engine may take to stop; its processes are killed with this one."""


class WorkerActor(Actor):
    """The worker as an actor. Implements `WorkerContext`."""

    kind = "worker"

    def __init__(
        self,
        ports: Ports,
        name: str,
        engine: Engine,
        served: Served,
        *,
        drain_s: float = DRAIN_TIMEOUT_S,
        profile: WorkerProfile | None = None,
        health: HealthSettings | None = None,
        lora: LoraSettings | None = None,
        open_transfer: OpenTransfer | None = None,
        open_media_transfer: OpenTransfer | None = None,
    ) -> None:
        super().__init__(ports, name)
        self.engine = engine
        self.drain_s = drain_s
        self.lora: LoraManager | None = None
        self.status = WorkerStatus(name, profile or WorkerProfile(instance=name), self._stopping)
        self.status.embedding_format = self.status.embedding_format or engine.name
        self._gate = LoraGate(engine, self.spawn)
        self._reader = EmbeddingReader(ports.bus, ports.ns, engine, ports.clock)
        self.intake = RequestIntake(ports, name, self._gate, self.spawn, self.status, self._reader)
        self.inflight = self.intake.inflight
        self._reader.on_read = self.inflight.note_read
        serving = (ports.bus, engine, self.spawn, self.status, self.inflight, self.intake.media)
        self.pooling = PoolingRequests(*serving)
        self.encoding = EncodeRequests(*serving)
        self.files = FileJobs(*serving, ports.clock)
        self._offers = OfferAnswers(ports.bus)
        self._open_transfer = open_transfer
        self._open_media_transfer = open_media_transfer
        self.health = EngineHealth(
            engine, ports.clock, ports.ids, health or HealthSettings(), self.inflight, self.status
        )
        self.audit = CommandAudit()
        self.control = WorkerControl(self, self.audit)
        self._served = served
        self._lora_settings = lora or LoraSettings()
        self._info: EngineInfo | None = None
        self._own_card: ModelCard | None = None
        self._pool = ""
        self._lease: lease.LeaseHandle | None = None
        self._incarnation: Incarnation | None = None
        self._has_joined = asyncio.Event()
        self._subscriptions: list[Subscription] = []
        self._ready_gate = ReadyGate(ports.bus, name, self.spawn)
        self._persistence = Persistence(ports.clock, self.log)
        self._transfer: TensorTransfer | None = None

    @property
    def info(self) -> EngineInfo:
        """What the engine reported when it started."""
        if self._info is None:
            raise RuntimeError("the engine is not started")
        return self._info

    @property
    def pool(self) -> str:
        """The pool that it serves; empty before the engine is started."""
        return self._pool

    @property
    def incarnation(self) -> Incarnation | None:
        """The present incarnation; None between two."""
        return self._incarnation

    @property
    def epoch(self) -> int:
        """The epoch of the present incarnation, or of the last one."""
        return self.intake.frames.epoch

    def stats(self) -> dict[str, Any]:
        """See `Actor.stats`."""
        self.requests.errors = self.status.refused
        if self._info is None or (self._incarnation is None and not self.stopping):
            return {"state": "starting", "pool": self._pool}
        load = self.engine.load()
        card = self._own_card
        slab = self._transfer.stats() if self._transfer is not None else None
        return {
            "state": "draining" if self.stopping else self.status.state,
            "role": self.status.role,
            "revision": self.status.revision,
            "pool": self._pool,
            "epoch": self.epoch,
            "running": load.running,
            "waiting": load.waiting,
            "used_blocks": load.used_blocks,
            "total_blocks": load.total_blocks,
            "loras": list(self.status.loras),
            "model": self._served.name,
            "engine": self.engine.name,
            "engine_version": self._info.version if self._info is not None else "",
            "tokenizer": card.tokenizer if card is not None else "",
            "chat_template": card.chat_template if card is not None else "",
            "tokens_total": self.inflight.tokens,
            "refused_total": self.status.refused,
            "handoffs_held": self.inflight.handoffs,
            "embedding_bytes_held": slab.capacity - slab.free if slab is not None else 0,
            "kv_events_pending": self._incarnation.kv.pending if self._incarnation else 0,
            **(self.inflight.kv_stats() if "kv_events" in self.engine.capabilities else {}),
        }

    def readiness(self) -> tuple[bool, dict[str, Any]]:
        """See `Actor.readiness`: whether its present incarnation has joined in the pool's log, so that routers may choose it."""
        ready, document = super().readiness()
        if self._incarnation is None:
            return False, {"status": "rejoining"} if ready else document
        return ready, document | {"state": self.status.state, "pool": self._pool, "epoch": self.epoch}

    def log_fields(self) -> dict[str, Any]:
        """See `Actor.log_fields`."""
        return {**super().log_fields(), "pool": lambda: self._pool, "log_position": self._log_position}

    def _log_position(self) -> int:
        """The newest position at which the pool log has an event of this worker."""
        return self._incarnation.log_position if self._incarnation is not None else 0

    async def start(self) -> None:
        """See `Actor.start`. The engine starts first, so that every lease stands for a working engine."""
        info = await self.engine.start()
        await self.health.check_started(info, self.status.role)
        self._info = info
        self._pool = pool_name(self._served.name, info.block_size)
        self.log = self.log.bind(pool=self._pool)
        await self._start_transfer()
        self.status.media_processor = media_processor(self._served.files, info)
        keeper = CardKeeper(self.ports, self._served, self.engine, info, self.name)
        self._own_card = keeper.own
        self.status.revision = self.status.revision or name_revision(keeper.own)
        if self.status.role == "encode":
            await keeper.check()
        else:
            self.status.tokenizer = (await keeper.publish()).tokenizer
            self.spawn(self._published_failure(keeper.run()), "model card")
        self._start_lora(info)
        self.spawn(self._persistence.run(), "persistence")
        self.spawn(self.intake.frames.run(), "frames")
        self.spawn(self.intake.expire_handoffs(), "hand-offs")
        self.spawn(self.files.expire(), "file requests")
        kinds = (self.intake, self.pooling, self.encoding, self.files)
        orphans = OrphanWatch(self.ports, kinds, self.intake)
        self.spawn(orphans.run(), "orphans")
        self.spawn(self._published_failure(self._run_incarnations()), "incarnations")
        self.spawn(self._published_failure(self.health.run(info)), "health")
        await self._has_joined.wait()

    async def _start_transfer(self) -> None:
        """The slabs of an engine that takes media, and of one that computes image embeddings for others, or reads them."""
        if self._open_media_transfer is not None and self.info.media.capabilities:
            self.intake.media.transfer = await self._open_media_transfer()
        encodes, reads = (name in self.engine.capabilities for name in ("encode", "image_embeddings"))
        if not (encodes or reads) or self._open_transfer is None:
            return
        transfer = await self._open_transfer()
        self._transfer = transfer
        if encodes:
            self.encoding.transfer = self._offers.transfer = transfer
        else:
            self._reader.transfer = transfer
            self.inflight.reads_embeddings = True

    def _start_lora(self, info: EngineInfo) -> None:
        models = (self._served.name, info.model)
        manager = LoraManager(
            self.ports, self._pool, self.engine, info, self._lora_settings, models, self.status
        )
        self._gate.manager = manager
        self.status.lora_on_demand = manager.on_demand
        if manager.able:
            self.lora = manager
            self.spawn(manager.run(), "LoRA")

    async def _run_incarnations(self) -> None:
        """One incarnation after the other, as long as the engine works."""
        while not self.status.failure_reason:
            try:
                reason = await self._run_incarnation()
            except* WriterFenced as errors:
                reason = str(errors.exceptions[0])
            self.log.warning("lease_lost", reason=reason, epoch=self.epoch)
            self.abort_all()

    async def _run_incarnation(self) -> str:
        """Returns why the lease was lost. Raises `WriterFenced` in a group once a later incarnation has joined."""
        ports = self.ports
        log = await ports.pool_log(self._pool)
        held = await lease.take(
            ports.leases,
            "worker",
            self.name,
            ports.clock,
            pool=self._pool,
            ids=ports.ids(),
            newest=lease.newest_epoch(log, *written_subjects(ports.ns, self._pool, self.name)),
        )
        incarnation = Incarnation(
            ports, held, log, self.engine, self.info, self.inflight, self.status, self.audit
        )
        held.persistence = self._persistence
        # The load is published each second, so an append that stalls is noticed at once.
        self._persistence.watch("pool log", incarnation.load)
        self._persistence.measure("load", incarnation.load)
        self._persistence.measure("kv", incarnation.kv)
        self._persistence.watch("lease store", held)
        self.intake.begin_incarnation(held.epoch)
        self.encoding.epoch = held.epoch
        held.reported = msgspec.structs.replace(
            held.reported,
            reads_embeddings=self._reader.transfer is not None,
            embedding_format=self.status.embedding_format if self._transfer is not None else "",
            revision=self.status.revision,
            endpoint=self.status.endpoint,
            encodes=kinds_encoded(self.info.media.placeholders, self.engine.capabilities),
        )
        self._lease = held
        try:
            async with asyncio.TaskGroup() as group:
                lost = group.create_task(held.hold(), name="lease")
                # Requests are accepted once the pool log has the incarnation: until then they wait at the gate.
                await self._subscribe(held.epoch)
                position = await incarnation.join()
                loops = [
                    group.create_task(loop, name="incarnation") for loop in incarnation.loops(self.health)
                ]
                self._set_incarnation(incarnation)
                self.log.info("worker_joined", epoch=held.epoch, log_position=position)
                reason = await lost
                await cancel_all(loops)
                return reason
        finally:
            self._set_incarnation(None)
            await self._unsubscribe()

    def _set_incarnation(self, incarnation: Incarnation | None) -> None:
        self._incarnation = incarnation
        if incarnation is None:
            self.status.publish = None
            self._ready_gate.close()
            self.audit.end_incarnation()
        else:
            self.status.publish = incarnation.publish_status
            self._ready_gate.open()
            self._has_joined.set()
            incarnation.publish_missed_status()
            self.audit.begin_incarnation(incarnation.publish_command)

    async def _subscribe(self, epoch: int) -> None:
        guard = self._ready_gate.guard

        def counted(handler: Handler) -> Handler:
            async def handle(message: Message) -> None:
                self.requests.total += 1
                await handler(message)

            return guard(handle)

        # Each handler of a verb gets every message.
        verbs: list[tuple[EngineVerb, Handler]] = [
            ("generate", counted(self.intake.on_generate)),
            ("cancel", guard(self.intake.on_cancel)),
            ("status", self.intake.on_status),
            ("claim", self.intake.on_claim),
            ("embed", counted(self.pooling.on_request)),
            ("encode", counted(self.encoding.on_request)),
            ("offer", self._offers.on_offer),
            ("cancel", self.pooling.on_cancel),
            ("file", guard(self.files.on_request)),
            ("cancel", self.files.on_cancel),
            ("drain", self._on_drain),
        ]
        ns, name = self.ports.ns, self.name
        handlers = [(subjects.engine(ns, name, epoch, verb), handler) for verb, handler in verbs]
        # The same for every incarnation.
        handlers.append((subjects.resync(ns, name), self._on_resync))
        handlers.append((subjects.control(ns, name), self.control.on_message))
        for subject, handler in handlers:
            self._subscriptions.append(await self.ports.bus.subscribe(subject, handler))

    async def _unsubscribe(self) -> None:
        while self._subscriptions:
            await self._subscriptions.pop(0).unsubscribe()

    async def _on_drain(self, message: Message) -> None:
        self.log.info("drain_requested")
        self.stop()
        if message.reply:
            await self.ports.bus.publish(message.reply, b"")

    async def _on_resync(self, message: Message) -> None:
        self.log.info("resync_requested")
        if self._incarnation is not None:
            await self._incarnation.resync()
        if message.reply:
            await self.ports.bus.publish(message.reply, b"")

    async def _published_failure(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs `work`. If it fails, so does the actor: the failure is published first."""
        try:
            await work
        except Exception as error:
            if not self.status.failure_reason:
                reason = describe_failure(error)
                self.status.failure_reason = f"worker {self.name} failed: {reason}"
                await shutdown_after_failure(self.intake, self._lease, self._incarnation, reason)
            raise

    def abort_all(self) -> None:
        """Abort all requests in flight: their edges migrate them."""
        self.intake.abort_all()
        self.pooling.abort_all()
        self.encoding.abort_all()
        self.files.abort_all()

    async def drain(self) -> None:
        """See `Actor.drain`."""
        incarnation = self._incarnation
        if incarnation is not None:
            incarnation.publish_drain()
        self.log.info("draining", requests=len(self.inflight))
        try:
            async with asyncio.timeout(self.drain_s):
                await self.inflight.drained()
        except TimeoutError:
            self.log.warning("drain_timed_out", requests=len(self.inflight), after_s=self.drain_s)
            self.abort_all()
            await self.ports.clock.sleep(0.1)
        if incarnation is not None and incarnation is self._incarnation:
            await shutdown_after_drain(self.intake.frames, incarnation)

    async def close(self) -> None:
        """See `Actor.close`."""
        await self._unsubscribe()
        for transfer in (self._transfer, self.intake.media.transfer):
            if transfer is not None:
                await transfer.close()
        if self._lora_settings.files is not None:
            self._lora_settings.files.close()
        try:
            async with asyncio.timeout(STOP_DEAD_S_MAX if self.status.failure_reason else None):
                await self.engine.stop()
        except TimeoutError:
            self.log.error("engine_stop_timed_out", after_s=STOP_DEAD_S_MAX)
