"""One incarnation of a worker: its lease, the three writers that publish its status, KV events and load, its beginning and its end.

An incarnation joins the pool in one atomic append: the worker has joined, these are its cached blocks, these are its
requests. The same three are published again whenever a reader requests it (`resync`), because it lost some of the
earlier events.

A router may choose a worker as soon as its `WorkerJoined` event is in the log, before the worker has the confirmation.
Requests that arrive in between wait at the gate, in order. If the append then fails, they are refused, and their
edges try another worker.

A failed worker sends everything at once, so that no part waits for another: its requests end with an error (the edges
migrate them), its lease is released (so that no reader waits for it to lapse), and the log gets the reason. If NATS is
unreachable none of this arrives: then the lease lapses, a router publishes that, and the edges query in vain.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import msgspec
import structlog

from headwater.actors.runtime.actor import Spawn
from headwater.actors.runtime.lease import LeaseHandle
from headwater.actors.runtime.ports import Bus, Handler, Message, Ports
from headwater.actors.worker.health import EngineHealth
from headwater.actors.worker.inflight import Inflight, Progress, WorkerStatus
from headwater.actors.worker.requests import RequestIntake
from headwater.actors.worker.token_frames import FrameSender
from headwater.engines.engine import Engine, EngineInfo, KvEvent
from headwater.events.ports import Log
from headwater.events.writer import Writer, stored
from headwater.schemas import subjects
from headwater.schemas.control import ControlReply, ControlRequest
from headwater.schemas.events import (
    LORA_ON_DEMAND,
    BlocksCleared,
    BlocksStored,
    Event,
    LoadReported,
    RequestsHeld,
    WorkerChanged,
    WorkerControlled,
    WorkerDraining,
    WorkerJoined,
    WorkerLeft,
)
from headwater.schemas.inference import Refused

PENDING_MAX = 100
"""Commands kept while the worker has no incarnation, or the log takes none; past that the oldest is dropped."""

_audit_log = structlog.get_logger("headwater.control")


PublishCommand = Callable[[ControlRequest, ControlReply], bool]
"""Queues an executed command for the pool log; False if the queue is full."""


class CommandAudit:
    """Executed commands that the pool log has not confirmed, in order.

    An incarnation that ends before the log confirms them leaves them to the next one, so each command is logged at
    least once.
    """

    def __init__(self) -> None:
        self._pending: deque[tuple[ControlRequest, ControlReply]] = deque()
        self._published = 0
        """How many of them the present incarnation has queued for the log, from the oldest on."""
        self._publish_command: PublishCommand | None = None

    def begin_incarnation(self, publish: PublishCommand) -> None:
        """Publish everything that is pending, and what is recorded from now on."""
        self._publish_command, self._published = publish, 0
        self._publish()

    def end_incarnation(self) -> None:
        """Keep what is recorded from now on for the next incarnation."""
        self._publish_command = None

    def record(self, request: ControlRequest, reply: ControlReply) -> None:
        """A command was executed or refused."""
        if len(self._pending) - self._published >= PENDING_MAX:
            dropped, _ = self._pending[self._published]
            del self._pending[self._published]
            _audit_log.warning("audit_record_dropped", command=dropped.command, by=dropped.by)
        self._pending.append((request, reply))
        self._publish()

    def confirm(self) -> None:
        """The log has stored the oldest one that was published."""
        if self._published:
            self._pending.popleft()
            self._published -= 1

    def _publish(self) -> None:
        if self._publish_command is None:
            return
        while self._published < len(self._pending):
            if not self._publish_command(*self._pending[self._published]):
                return
            self._published += 1


LOAD_PERIOD_S = 1.0
"""The load is published at least this often."""

LOAD_INTERVAL_S = 0.005
"""Pause between two load reports while requests change."""

NO_PROGRESS = Progress()

OnStored = Callable[[int, Sequence[Event]], None]

_log = structlog.get_logger("headwater.worker")


class Incarnation:
    """One incarnation of a worker. Publishes the facts that `status`, `inflight`, `audit` and the engine own; it keeps none."""

    def __init__(
        self,
        ports: Ports,
        held: LeaseHandle,
        log: Log,
        engine: Engine,
        info: EngineInfo,
        inflight: Inflight,
        status: WorkerStatus,
        audit: CommandAudit,
    ) -> None:
        self.lease = held
        self._clock = ports.clock
        self._log = log
        self._name = held.name
        self._engine = engine
        self._info = info
        self._inflight = inflight
        self._status = status
        self._audit = audit
        self._announcing = 0
        """KV events of the last announcement that are not stored yet."""
        self._kv_lost = False
        self._status_changed = asyncio.Event()
        self._status_changed.set()
        self._published: WorkerChanged | None = None
        """The status published last."""

        def writer(kind: subjects.PoolKind, fence: str = "", on_stored: OnStored | None = None) -> Writer:
            subject = subjects.pool_subject(ports.ns, held.pool, kind, held.name)
            return Writer(log, subject, held.name, held.epoch, ports.clock, fence=fence, on_stored=on_stored)

        self.fleet = writer("fleet", on_stored=self._on_fleet_stored)
        # KV events and load are streamed; the fleet subject, which each incarnation writes first, fences them.
        self.kv = writer("kv", self.fleet.subject, self._on_kv_stored)
        self.load = writer("load", self.fleet.subject)

    @property
    def epoch(self) -> int:
        """The epoch of this incarnation."""
        return self.lease.epoch

    @property
    def log_position(self) -> int:
        """The newest position at which the log has an event of this incarnation."""
        return max(writer.position for writer in (self.fleet, self.kv, self.load))

    async def join(self) -> int:
        """Join the pool in one append; returns its log position. Raises `WriterFenced`."""
        entries = [
            *await self.fleet.first_entries(self._joined(), self._current_status()),
            *await self.kv.first_entries(BlocksCleared(), *self._cached_blocks()),
            *await self.load.first_entries(RequestsHeld(tuple(self._inflight.reported)), self.load_report()),
        ]
        return await stored(lambda: self._log.append(*entries), self._clock, self.fleet.subject)

    def loops(self, health: EngineHealth) -> list[Coroutine[Any, Any, None]]:
        """Return what runs while the incarnation lasts; each raises `WriterFenced` once a later one has joined."""
        writers = [writer.run() for writer in (self.kv, self.load, self.fleet)]
        return [*writers, self._publish_load(health), self._publish_kv_events(), self._publish_served_part()]

    async def _publish_served_part(self) -> None:
        """Publish in the lease what is served, for edges: they list a model only while a request to it would be served."""
        while True:
            await self._status_changed.wait()
            self._status_changed.clear()
            part = self._status.served_part(self._engine.capabilities)
            if part != self.lease.reported.serves:
                self.lease.reported = msgspec.structs.replace(self.lease.reported, serves=part)
                await self.lease.publish()

    async def _publish_kv_events(self) -> None:
        async for events in self._engine.kv_events():
            self._inflight.note_kv_events(events)
            self.offer_kv_events(events)

    async def _publish_load(self, health: EngineHealth) -> None:
        """Soon after a change, and each `LOAD_PERIOD_S`."""
        changed = self._inflight.changed
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOAD_PERIOD_S):
                    await changed.wait()
            if health.probing and not changed.is_set():
                # The engine runs nothing but a health probe.
                continue
            changed.clear()
            self.load.offer(self.load_report(self._inflight.take_progress()))
            await self._clock.sleep(LOAD_INTERVAL_S)

    def load_report(self, progress: Progress = NO_PROGRESS) -> LoadReported:
        """The engine's present load, and the requests that changed."""
        return LoadReported(*self._engine.load(), **progress._asdict())

    def offer_kv_events(self, events: list[KvEvent]) -> None:
        """Publish KV events. If the writer's queue is full they are dropped, and the cache is announced once it is empty."""
        for event in events:
            self._offer_kv_event(event)

    def _offer_kv_event(self, event: Event) -> None:
        if not self.kv.offer(event):
            self._kv_lost = True
            self._inflight.kv_dropped += 1

    async def resync(self) -> None:
        """Publish everything again. A repeated call has no effect until the announcement is stored."""
        if self._announcing:
            return
        self.fleet.offer(self._joined())
        self.publish_status()
        await self.fleet.flush()
        self.announce()

    def announce(self) -> None:
        """Publish all cached blocks and all requests from scratch, whatever readers knew before."""
        events: list[Event] = [BlocksCleared(), *self._cached_blocks()]
        for event in events:
            self._offer_kv_event(event)
        self._announcing = self.kv.pending
        # Progress first: a request that had ended, reported after the list, would count as one yet to be decided.
        self.load.offer(self.load_report(self._inflight.take_progress()))
        self.load.offer(RequestsHeld(tuple(self._inflight.reported)))

    def _cached_blocks(self) -> list[BlocksStored]:
        """The engine's cached blocks; none while it sleeps, even if it still lists some."""
        blocks = self._engine.held_blocks()
        return [] if self._status.state == "sleeping" else blocks

    def _on_kv_stored(self, _: int, events: Sequence[Event]) -> None:
        self._announcing = max(0, self._announcing - len(events))
        # Here and not with the next events of the engine: an idle one has none.
        if self._kv_lost and not self.kv.pending:
            self._kv_lost = False
            _log.warning("kv_reannounced", worker=self._name, refused=self.kv.refused)
            self.announce()

    def publish_status(self) -> None:
        """Publish the present status. Does not wait."""
        self.fleet.offer(self._current_status())
        self._status_changed.set()

    def publish_missed_status(self) -> None:
        """Publish the status if it changed while the incarnation was joining."""
        before = self._published
        if self._current_status() != before:
            self.publish_status()

    def publish_command(self, request: ControlRequest, reply: ControlReply) -> bool:
        """See `PublishCommand`."""
        arguments = msgspec.json.encode(request.arguments)
        return self.fleet.offer(
            WorkerControlled(
                self._name, self.epoch, request.command, arguments, request.by, reply.status, reply.detail
            )
        )

    def _on_fleet_stored(self, _: int, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, WorkerControlled):
                self._audit.confirm()

    def publish_drain(self) -> None:
        """Publish that the worker accepts no more requests."""
        self.fleet.offer(WorkerDraining(self._name, self.epoch))
        self._status_changed.set()

    async def leave(self) -> None:
        """Publish that the worker has left, flush all writers and release the lease."""
        self.fleet.offer(WorkerLeft(self._name, self.epoch, "stopped"))
        for writer in (self.kv, self.load, self.fleet):
            await writer.flush()
        await self.lease.release()

    async def publish_failure(self, reason: str) -> None:
        """Publish that the worker has left because of `reason`. Does not release the lease."""
        self.fleet.offer(WorkerLeft(self._name, self.epoch, reason))
        await self.fleet.flush()

    def _joined(self) -> WorkerJoined:
        info, status = self._info, self._status
        capabilities: list[str] = sorted(self._engine.capabilities)
        if info.lora_slots and status.lora_on_demand:
            capabilities.append(LORA_ON_DEMAND)
        return WorkerJoined(
            worker=self._name,
            epoch=self.epoch,
            model=info.model,
            engine=self._engine.name,
            role=status.role,
            block_size=info.block_size,
            total_blocks=info.total_blocks,
            max_running=info.max_running,
            pairs_with=status.embedding_format if status.role == "encode" else info.pairs_with,
            capabilities=tuple(capabilities),
            lora_slots=info.lora_slots,
            instance=status.instance,
            tier=status.tier,
            taints=status.taints,
            tokenizer=status.tokenizer,
            media_processor=status.media_processor,
            revision=status.revision,
        )

    def _current_status(self) -> WorkerChanged:
        status = self._status
        self._published = WorkerChanged(
            self._name, self.epoch, status.state, status.role, status.loras, status.taints
        )
        return self._published


def written_subjects(ns: str, pool: str, worker: str) -> list[str]:
    """The subjects of the pool log that an incarnation appends to."""
    kinds: tuple[subjects.PoolKind, ...] = ("fleet", "kv", "load")
    return [subjects.pool_subject(ns, pool, kind, worker) for kind in kinds]


WAITING_MAX = 256
WAIT_S_MAX = 1.5
"""Less than an edge waits for a worker's reply: a refusal in time is better than an answer after the timeout."""

_encode = msgspec.msgpack.Encoder().encode


class ReadyGate:
    """Holds messages until it is opened. Those that wait longer than `WAIT_S_MAX`, or are too many, are refused."""

    def __init__(self, bus: Bus, worker: str, spawn: Spawn) -> None:
        self._bus = bus
        self._worker = worker
        self._spawn = spawn
        self._waiting = 0
        self._opened = asyncio.Event()

    @property
    def waiting(self) -> int:
        """Messages held now."""
        return self._waiting

    def open(self) -> None:
        """Pass all messages, those that wait first."""
        self._opened.set()

    def close(self) -> None:
        """Hold messages from now on."""
        self._opened.clear()

    def guard(self, handler: Handler) -> Handler:
        """The handler, called only while the gate is open."""

        async def handle(message: Message) -> None:
            if self._opened.is_set() and not self._waiting:
                await handler(message)
            elif self._waiting >= WAITING_MAX:
                await self._refuse(message, f"{WAITING_MAX} requests are waiting for it to become ready")
            else:
                # In a task: a subscription delivers one message at a time.
                self._waiting += 1
                self._spawn(self._wait(message, handler), "ready gate")

        return handle

    async def _wait(self, message: Message, handler: Handler) -> None:
        try:
            async with asyncio.timeout(WAIT_S_MAX):
                await self._opened.wait()
        except TimeoutError:
            await self._refuse(message, "it is not ready yet")
        else:
            # An event wakes its waiters in order, so messages are handled in order of arrival.
            await handler(message)
        finally:
            self._waiting -= 1

    async def _refuse(self, message: Message, reason: str) -> None:
        if message.reply:
            refused = Refused(f"worker {self._worker}: {reason}", True)
            await self._bus.publish(message.reply, _encode(refused))


# The end: what a worker sends to edges, the lease table and the pool log, within a bounded time.

FAILURE_NOTICE_S_MAX = 1.5
LEAVE_S_MAX = 2.0


async def shutdown_after_failure(
    intake: RequestIntake, held: LeaseHandle | None, incarnation: Incarnation | None, reason: str
) -> None:
    """Publish that this worker has failed. Returns within `FAILURE_NOTICE_S_MAX` and never raises."""
    requests = intake.fail_all(reason)
    _log.error("worker_failed", reason=reason, requests=requests)
    notices: dict[str, Awaitable[None]] = {"frames": intake.frames.flush()}
    if held is not None:
        notices["lease"] = held.release()
    if incarnation is not None:
        notices["log"] = incarnation.publish_failure(reason)
    await asyncio.gather(*(_send_notice(name, notice) for name, notice in notices.items()))


async def shutdown_after_drain(frames: FrameSender, incarnation: Incarnation) -> None:
    """Leave the pool: frames are flushed, the log is written, the lease is released. Takes about `LEAVE_S_MAX` at most."""
    try:
        async with asyncio.timeout(LEAVE_S_MAX):
            await frames.flush()
            await incarnation.leave()
    except TimeoutError:
        _log.warning("shutdown_notice_failed", what="log", after_s=LEAVE_S_MAX)
        await incarnation.lease.release()


async def _send_notice(name: str, notice: Awaitable[None]) -> None:
    try:
        async with asyncio.timeout(FAILURE_NOTICE_S_MAX):
            await notice
    except TimeoutError:
        _log.warning("shutdown_notice_failed", what=name, after_s=FAILURE_NOTICE_S_MAX)
    except Exception as error:
        _log.warning("shutdown_notice_failed", what=name, reason=f"{type(error).__name__}: {error}")


def describe_failure(error: BaseException) -> str:
    """An error in one line; of an exception group, those inside."""
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(describe_failure(inner) for inner in error.exceptions)
    return f"{type(error).__name__}: {error}"
