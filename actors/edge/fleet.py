"""The edge's side of the fleet: asking for routes, sending requests, receiving frames, noticing deaths."""

import asyncio
from collections.abc import Callable, Coroutine
from itertools import count
from typing import Any, Protocol

import msgspec
import structlog

from headwater.actors import lease, metrics
from headwater.actors.bus_port import BusError, Message, NoResponder
from headwater.actors.edge.asking import Asking
from headwater.actors.edge.errors import ApiError, overloaded
from headwater.actors.edge.routing import Routing
from headwater.actors.edge.saga import Saga
from headwater.actors.world import World
from headwater.schemas import subjects
from headwater.schemas.card import Lease
from headwater.schemas.inference import (
    Cancel,
    GenerateReply,
    GenerateRequest,
    StatusQuery,
    StatusReply,
    TokenFrame,
)

GENERATE_TIMEOUT_S = 2.0
STATUS_TIMEOUT_S = 1.0
SILENCE_S_MAX = 2.0
"""Without a frame for this long, the edge asks the engine how the request is doing."""

UNANSWERED_MAX = 3
CLOSE_S_MAX = 1.0
HANDLES_A_LIFE = 1 << 32

_encode = msgspec.msgpack.Encoder().encode
_frame = msgspec.msgpack.Decoder(TokenFrame)
_generate: msgspec.msgpack.Decoder[GenerateReply] = msgspec.msgpack.Decoder(GenerateReply)
_status = msgspec.msgpack.Decoder(StatusReply)

_log = structlog.get_logger("headwater.edge.fleet")


class Call(Protocol):
    """One request of a client."""

    def abort(self, error: ApiError) -> None:
        """End it with an error now, whatever it waits for."""
        ...


class Fleet:
    """Shared by all requests of one edge process."""

    def __init__(
        self, world: World, edge: str, spawn: Callable[[Coroutine[Any, Any, None], str], object]
    ) -> None:
        self.world = world
        self.edge = edge
        self._spawn = spawn
        self.asking = Asking(world)
        self.routing = Routing(world, spawn)
        self.sagas: dict[int, Saga] = {}
        self.closed = False
        self.calls: set[Call] = set()
        """Requests that are owed an end."""
        self.stalled: set[str] = set()
        """Workers and routers that say that the log does not take what they append."""
        self._handles = count(1)
        self._late_cancels: list[tuple[str, int, str]] = []
        self._workers: dict[str, Lease] = {}

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> object:
        """Run `work` as the actor's. Raises `ApiError` 503 where the actor ends, and is about to say so."""
        try:
            return self._spawn(work, name)
        except RuntimeError as error:
            raise overloaded("This edge starts again.", 1.0) from error

    def begin(self, epoch: int) -> None:
        """Give handles that no earlier life of this edge gave: workers may still send what that one asked for."""
        self._handles = count(epoch * HANDLES_A_LIFE + 1)

    def adopt(self, saga: Saga) -> int:
        """Give a saga a handle under which frames find it."""
        handle = next(self._handles)
        self.sagas[handle] = saga
        return handle

    def forget(self, handle: int) -> None:
        """Frames for this handle are dropped from now on."""
        self.sagas.pop(handle, None)

    def workers(self, pool: str) -> int:
        """Workers of a pool whose lease is live."""
        return sum(1 for held in self._workers.values() if held.pool == pool)

    async def generate(self, worker: str, epoch: int, request: GenerateRequest) -> GenerateReply:
        """Hand a request to a worker. Raises `BusError` when it does not answer."""
        subject = subjects.engine(self.world.ns, worker, epoch, "generate")
        data = await self.world.bus.request(subject, _encode(request), timeout_s=GENERATE_TIMEOUT_S)
        return _generate.decode(data)

    def cancel(self, worker: str, epoch: int, request: str) -> None:
        """Tell a worker that nobody waits for a request any more. Does not wait."""
        if not self.closed:
            try:
                self._spawn(self._cancel(worker, epoch, request), "cancel")
                return
            except RuntimeError:
                # The actor ends: `close` sends it.
                _log.debug("cancel_is_late", request=request)
        self._late_cancels.append((worker, epoch, request))

    async def _cancel(self, worker: str, epoch: int, request: str) -> None:
        subject = subjects.engine(self.world.ns, worker, epoch, "cancel")
        try:
            await self.world.bus.publish(subject, _encode(Cancel((request,))))
        except BusError as error:
            _log.warning("cancel_not_sent", request=request, worker=worker, reason=str(error))

    async def close(self, reason: str) -> None:
        """The actor ends: end each request with an error, and tell its worker. Returns within `CLOSE_S_MAX`."""
        self.closed = True
        for call in list(self.calls):
            call.abort(overloaded(reason))
        self.asking.close(reason)
        try:
            async with asyncio.timeout(CLOSE_S_MAX):
                await asyncio.gather(*(self._cancel(*one) for one in self._late_cancels))
        except TimeoutError:
            _log.warning("cancels_not_sent", requests=len(self._late_cancels))

    async def on_frame(self, message: Message) -> None:
        """One engine step's tokens for this edge: each saga writes to its client right here."""
        frame = _frame.decode(message.data)
        metrics.FRAMES.inc()
        now = self.world.clock.monotonic_s()
        sagas = self.sagas
        for entry in frame.entries:
            saga = sagas.get(entry.handle)
            if saga is not None:
                saga.on_entry(entry, now)

    async def watch_leases(self) -> None:
        """Follow the lease table for ever.

        A later epoch ends everything that an earlier one has. A lease that ended is a reason to ask the worker, and
        no proof: it may only have been unable to reach the lease store.
        """
        async for entries in self.world.leases.watch():
            for entry in entries:
                kind, _, name = entry.key.partition(".")
                held = lease.decode_lease(entry)
                if held is not None and held.stalled:
                    self.stalled.add(f"{kind} {name}")
                else:
                    self.stalled.discard(f"{kind} {name}")
                if kind == "worker":
                    self._on_lease(name, held)

    def _on_lease(self, name: str, held: Lease | None) -> None:
        if held is None:
            ended = self._workers.pop(name, None)
            if ended is not None:
                self.spawn(self._verify(name, ended.epoch), "verify")
        elif held.epoch:
            self._workers[name] = held
            self._lost(name, held.epoch, "it was started again")

    async def _verify(self, worker: str, epoch: int) -> None:
        """Ask a worker whose lease ended whether it is there; if not, move its requests."""
        subject = subjects.engine(self.world.ns, worker, epoch, "status")
        query = _encode(StatusQuery("", 0))
        for _ in range(UNANSWERED_MAX):
            held = self._workers.get(worker)
            if held is not None and held.epoch == epoch:
                return
            try:
                await self.world.bus.request(subject, query, timeout_s=STATUS_TIMEOUT_S)
                return
            except NoResponder:
                break
            except BusError as error:
                _log.info("worker_unanswered", worker=worker, epoch=epoch, reason=str(error))
        self._lost(worker, epoch + 1, "its lease ended")

    def _lost(self, worker: str, below_epoch: int, reason: str) -> None:
        self.asking.lost(worker, below_epoch, reason)
        for saga in list(self.sagas.values()):
            if saga.worker == worker and saga.epoch < below_epoch:
                saga.lost(f"worker {worker}: {reason}")

    async def watch_silence(self) -> None:
        """Ask after requests that had no frame for a while: a frame may be lost, or the worker dead."""
        while True:
            await self.world.clock.sleep(SILENCE_S_MAX / 2)
            now = self.world.clock.monotonic_s()
            for saga in list(self.sagas.values()):
                if saga.overdue(now):
                    saga.lost(f"worker {saga.worker}: its prefill takes too long", "timed out")
                elif saga.streaming and not saga.asking and now - saga.heard_s > SILENCE_S_MAX:
                    saga.asking = True
                    self.spawn(self.ask(saga), "status")

    async def ask(self, saga: Saga) -> None:
        """One status query for a saga, and what follows from the answer."""
        handle, worker = saga.handle, saga.worker
        subject = subjects.engine(self.world.ns, worker, saga.epoch, "status")
        query = StatusQuery(saga.attempt, saga.received)
        reply: StatusReply | None = None
        gone = ""
        try:
            data = await self.world.bus.request(subject, _encode(query), timeout_s=STATUS_TIMEOUT_S)
            reply = _status.decode(data)
        except NoResponder:
            gone = "nobody answers for it"
        except BusError as error:
            _log.info("status_unanswered", request=saga.request, worker=worker, reason=str(error))
        saga.asking = False
        if saga.handle != handle or not saga.streaming:
            return
        if reply is None and not gone:
            saga.unanswered += 1
            gone = "it stopped answering" if saga.unanswered >= UNANSWERED_MAX else ""
        elif reply is not None and not reply.known:
            gone = "it does not know the request"
        if gone:
            saga.lost(f"worker {worker}: {gone}")
        elif reply is not None and reply.entry is not None:
            saga.unanswered = 0
            saga.on_entry(reply.entry, self.world.clock.monotonic_s())
