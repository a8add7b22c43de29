"""The workers as an edge sees them: messages to them, their frames, their leases, and the media that they fetch."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from itertools import count
from typing import Any, Final, Protocol, TypeVar

import msgspec
import numpy as np
import structlog

from headwater.actors.http.errors import ApiError, overloaded
from headwater.actors.runtime.actor import Spawn
from headwater.actors.runtime.ports import Bus, BusError, Message, NoResponder, Ports
from headwater.actors.runtime.tables import LeaseTable
from headwater.engines.transfer.port import TransferError
from headwater.engines.transfer.slab import TensorTransfer
from headwater.schemas import subjects
from headwater.schemas.encode_requests import EncodeReply, EncodeRequest
from headwater.schemas.events import EncodeLegs
from headwater.schemas.inference import (
    STATE_WAIT_S,
    Cancel,
    EmbedReply,
    EmbedRequest,
    FilePieceQuery,
    FileRequest,
    FileStateQuery,
    FrameEntry,
    GenerateReply,
    GenerateRequest,
    Refused,
    StatusQuery,
    StatusReply,
    StreamsQuery,
    StreamsReply,
    TokenFrame,
    WaitingEdge,
)
from headwater.schemas.media import MediaPiece, MediaQuery, Offer, PromptMediaKind
from headwater.schemas.subjects import EngineVerb
from headwater.schemas.tables import Lease

PIECE_BYTES_MAX: Final = 4 << 20
"""The limit of one reply; a message may have twice as many."""

OFFER_S: Final = 5.0
"""How long an offer waits to be claimed. The worker that asked for it does so at once."""

_encode = msgspec.msgpack.Encoder().encode
_query = msgspec.msgpack.Decoder(MediaQuery)
_media_log = structlog.get_logger("headwater.edge.media")


class MediaHolder:
    """Decoded media by id, each as long as a request has it. `transfer` is None for an edge that makes no offers."""

    def __init__(self, bus: Bus) -> None:
        self.transfer: TensorTransfer | None = None
        self._bus = bus
        self._held: dict[str, tuple[memoryview, int]] = {}
        self._offering: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        """Items held."""
        return len(self._held)

    @contextmanager
    def hold(self, media: Sequence[tuple[str, memoryview]]) -> Iterator[None]:
        """Hold these (id, data) for a request."""
        for id_, data in media:
            held, users = self._held.get(id_, (data, 0))
            self._held[id_] = held, users + 1
        try:
            yield
        finally:
            for id_, _ in media:
                held, users = self._held.pop(id_)
                if users > 1:
                    self._held[id_] = held, users - 1

    async def on_query(self, message: Message) -> None:
        """Reply with a piece of an item, or with an offer of it."""
        query = _query.decode(message.data)
        held = self._held.get(query.id)
        if held is not None and query.as_offer:
            # Its copy takes a while: other queries do not wait for it.
            task = asyncio.create_task(self._reply_with_offer(message.reply, held[0]))
            self._offering.add(task)
            task.add_done_callback(self._offering.discard)
            return
        piece = MediaPiece(False)
        if held is not None and query.offset >= 0 and 0 < query.count <= PIECE_BYTES_MAX:
            piece = MediaPiece(True, bytes(held[0][query.offset : query.offset + query.count]))
        await self._bus.publish(message.reply, _encode(piece))

    async def close(self) -> None:
        """End the transfer: offers that were not read are void."""
        await asyncio.gather(*self._offering, return_exceptions=True)
        if self.transfer is not None:
            await self.transfer.close()

    async def _reply_with_offer(self, reply: str, data: memoryview) -> None:
        await self._bus.publish(reply, _encode(MediaPiece(True, offer=await self._offer(data))))

    async def _offer(self, data: memoryview) -> Offer | None:
        if self.transfer is None:
            return None
        try:
            return await self.transfer.offer(np.frombuffer(data, np.uint8), ttl_s=OFFER_S)
        except TransferError as error:
            # The worker fetches the item in pieces.
            _media_log.info("media_not_offered", bytes=data.nbytes, reason=str(error))
            return None


# The workers.

UNANSWERED_MAX: Final = 3
"""Messages in a row without a reply after which their receiver, a router or a worker, counts as lost."""

GENERATE_TIMEOUT_S: Final = 2.0
MEDIA_TIMEOUT_S: Final = 7.0
"""The time limit for a request with images, which the worker fetches before it replies, perhaps after it failed to read their embeddings."""

STATUS_TIMEOUT_S: Final = 1.0
EMBED_TIMEOUT_S: Final = 120.0
"""The time limit for one message of prompts. A lost worker is detected long before, by its lease."""

SILENCE_PERIOD_S: Final = 1.0
"""Seconds between two checks for streams without frames."""

CLOSE_S_MAX: Final = 1.0
HANDLES_PER_EPOCH: Final = 1 << 32

ReplyT = TypeVar("ReplyT")

_frame = msgspec.msgpack.Decoder(TokenFrame)
_streams = msgspec.msgpack.Decoder(StreamsQuery)
_generate: msgspec.msgpack.Decoder[GenerateReply] = msgspec.msgpack.Decoder(GenerateReply)
_status = msgspec.msgpack.Decoder(StatusReply)
_encoded: msgspec.msgpack.Decoder[EncodeReply] = msgspec.msgpack.Decoder(EncodeReply)
_embed: msgspec.msgpack.Decoder[EmbedReply] = msgspec.msgpack.Decoder(EmbedReply)

_log = structlog.get_logger("headwater.edge.fleet")


class FrameReceiver(Protocol):
    """Receives the frames of one stream."""

    @property
    def source(self) -> tuple[str, int] | None:
        """Worker and epoch that the frames come from, None while no worker streams."""
        ...

    @property
    def holder(self) -> tuple[str, int] | None:
        """Worker and epoch that compute the prompt while another one waits for it, None otherwise."""
        ...

    def receive(self, entry: FrameEntry, now_s: float) -> None:
        """Take the stream's part of a frame."""
        ...

    def lose_worker(self, reason: str) -> None:
        """The worker is lost."""
        ...

    def lose_holder(self, reason: str) -> None:
        """The worker that computes the prompt is lost."""
        ...

    def check_silence(self, now_s: float) -> None:
        """Called every `SILENCE_PERIOD_S` seconds: query the worker if it sent nothing for too long."""
        ...


class ClientCall(Protocol):
    """One request of a client."""

    def abort(self, error: ApiError) -> None:
        """End it with an error now, whatever it waits for."""
        ...


class WorkerLost(BusError):
    """The worker that was queried is lost: another one may answer."""


class WorkerRegistry:
    """Shared by all requests of one edge process."""

    def __init__(self, ports: Ports, edge: str, spawn: Spawn, encode_legs: EncodeLegs = "estimate") -> None:
        self.ports = ports
        self.edge = edge
        self.encode_legs = encode_legs
        self._spawn = spawn
        self.receivers: dict[int, FrameReceiver] = {}
        self.media = MediaHolder(ports.bus)
        self.closed = False
        self.calls: set[ClientCall] = set()
        """Requests that were accepted and have not ended."""
        self.stalled: set[str] = set()
        """Workers and routers whose lease says that the log does not take what they append."""
        self.edges: dict[str, int] = {}
        """Epochs of the edges whose lease is live, by name."""
        self.leases_known = asyncio.Event()
        """Set once the present leases are known."""
        self.epoch = 0
        """The epoch of this edge."""
        self.on_pools_changed: Callable[[], None] = lambda: None
        """Called when a worker appears or is gone."""
        self._handles = count(1)
        self._waits: set[int] = set()
        """Handles of requests that are answered as a whole."""
        self._late_cancels: list[tuple[str, int, str]] = []
        self._leases: dict[str, Lease] = {}
        self._routers: dict[str, str] = {}
        """Pools of the live routers, by name."""
        self._embedding: dict[asyncio.Future[str], tuple[str, int]] = {}

    def spawn(self, work: Any, name: str) -> asyncio.Task[None]:
        """Run a coroutine as a task of the actor. Raises `ApiError` 503 if the actor is shutting down."""
        try:
            return self._spawn(work, name)
        except RuntimeError as error:
            raise overloaded("This edge is restarting; retry.", 1.0) from error

    def begin(self, epoch: int) -> None:
        """Use handles that no earlier epoch of this edge used: workers may still send frames for those."""
        self.epoch = epoch
        self._handles = count(epoch * HANDLES_PER_EPOCH + 1)

    def adopt(self, receiver: FrameReceiver) -> int:
        """Deliver the frames of a new handle to `receiver`; returns the handle."""
        handle = next(self._handles)
        self.receivers[handle] = receiver
        return handle

    def forget(self, handle: int) -> None:
        """Drop frames for this handle from now on."""
        self.receivers.pop(handle, None)

    @contextmanager
    def waiting(self) -> Iterator[WaitingEdge]:
        """Within it, workers that ask are answered that this edge waits for the request with this `waiter`."""
        handle = next(self._handles)
        self._waits.add(handle)
        try:
            yield WaitingEdge(self.edge, self.epoch, handle)
        finally:
            self._waits.discard(handle)

    def workers(self, pool: str) -> int:
        """Number of workers of a pool that take requests, legs of them, or images."""
        return sum(1 for held in self._leases.values() if held.pool == pool and held.serves)

    def embedding_format(self, pool: str, worker: str, kinds: AbstractSet[PromptMediaKind]) -> str:
        """Return what embeddings this worker takes, if an encode worker of the pool computes such of these kinds of media; else ""."""
        reader = self._leases.get(worker)
        if reader is None or not reader.reads_embeddings:
            return ""
        formats = {held.embedding_format for held in self._leases.values() if held.encodes_in(pool, kinds)}
        return reader.embedding_format if reader.embedding_format in formats else ""

    def is_routable(self, pool: str) -> bool:
        """Would a request to this pool find a router, and workers for the whole of it?"""
        parts = {held.serves for held in self._leases.values() if held.pool == pool}
        return pool in self._routers.values() and ("whole" in parts or {"prefill", "decode"} <= parts)

    async def generate(self, worker: str, epoch: int, request: GenerateRequest) -> GenerateReply:
        """Send a request to a worker. Raises `BusError` if it does not reply."""
        timeout_s = MEDIA_TIMEOUT_S if request.media else GENERATE_TIMEOUT_S
        return _generate.decode(await self._request(worker, epoch, "generate", request, timeout_s))

    async def status(self, worker: str, epoch: int, query: StatusQuery) -> StatusReply:
        """Query a worker about a request. Raises `BusError` if it does not reply."""
        return _status.decode(await self._request(worker, epoch, "status", query, STATUS_TIMEOUT_S))

    async def embed(self, worker: str, epoch: int, request: EmbedRequest) -> EmbedReply:
        """Send a worker prompts to pool. Raises `BusError` if it does not reply, `WorkerLost` once it is lost."""
        return await self._request_unless_lost(worker, epoch, "embed", request, EMBED_TIMEOUT_S, _embed)

    async def encode(self, worker: str, epoch: int, request: EncodeRequest, wait_s: float) -> EncodeReply:
        """Send an encode worker an image. Raises `BusError` if it does not reply within `wait_s`, `WorkerLost` once it is lost."""
        return await self._request_unless_lost(worker, epoch, "encode", request, wait_s, _encoded)

    async def _request_unless_lost(
        self,
        worker: str,
        epoch: int,
        verb: EngineVerb,
        message: Any,
        timeout_s: float,
        decoder: "msgspec.msgpack.Decoder[ReplyT]",
    ) -> ReplyT:
        replied = asyncio.ensure_future(self._request(worker, epoch, verb, message, timeout_s))
        lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._embedding[lost] = (worker, epoch)
        try:
            either: set[asyncio.Future[Any]] = {replied, lost}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not replied.done():
                raise WorkerLost(f"worker {worker}: {lost.result()}")
            return decoder.decode(replied.result())
        except msgspec.DecodeError as error:
            raise BusError(f"worker {worker} sent an invalid reply: {error}") from error
        finally:
            del self._embedding[lost]
            if not replied.done():
                replied.cancel()
                await asyncio.gather(replied, return_exceptions=True)

    async def start_files(self, worker: str, epoch: int, request: FileRequest) -> Refused | None:
        """Send a worker a request for files; its refusal, or None. Raises `BusError` if it does not reply."""
        reply = await self._request(worker, epoch, "file", request, GENERATE_TIMEOUT_S)
        answer = _generate.decode(reply)
        return answer if isinstance(answer, Refused) else None

    async def file_reply(
        self, worker: str, epoch: int, query: FileStateQuery | FilePieceQuery, kind: type[ReplyT]
    ) -> ReplyT:
        """Query a worker about such a request. Raises `BusError` if it does not reply."""
        timeout_s = STATE_WAIT_S + GENERATE_TIMEOUT_S
        reply = await self._request(worker, epoch, "file", query, timeout_s)
        try:
            return msgspec.msgpack.decode(reply, type=kind)
        except msgspec.DecodeError as error:
            raise BusError(f"worker {worker} sent an invalid reply: {error}") from error

    async def _request(
        self, worker: str, epoch: int, verb: EngineVerb, message: Any, timeout_s: float
    ) -> bytes:
        subject = subjects.engine(self.ports.ns, worker, epoch, verb)
        return await self.ports.bus.request(subject, _encode(message), timeout_s=timeout_s)

    def cancel(self, worker: str, epoch: int, attempt: str, *, fetched: bool = False) -> None:
        """Cancel an attempt at its worker, or release its KV once that was `fetched`. Does not wait."""
        if not self.closed:
            try:
                self._spawn(self._cancel(worker, epoch, attempt, fetched=fetched), "cancel")
                return
            except RuntimeError:
                # The actor ends: `close` sends it.
                _log.debug("cancel_deferred", attempt=attempt)
        self._late_cancels.append((worker, epoch, attempt))

    async def _cancel(self, worker: str, epoch: int, attempt: str, *, fetched: bool = False) -> None:
        subject = subjects.engine(self.ports.ns, worker, epoch, "cancel")
        try:
            await self.ports.bus.publish(subject, _encode(Cancel((attempt,), fetched)))
        except BusError as error:
            _log.warning("cancel_not_sent", attempt=attempt, worker=worker, reason=str(error))

    async def close(self, reason: str) -> None:
        """End each request with an error and cancel it at its worker. Returns within `CLOSE_S_MAX` seconds."""
        self.closed = True
        for call in list(self.calls):
            call.abort(overloaded(reason))
        for lost in self._embedding:
            if not lost.done():
                lost.set_result(reason)
        try:
            async with asyncio.timeout(CLOSE_S_MAX):
                await asyncio.gather(*(self._cancel(*late_cancel) for late_cancel in self._late_cancels))
        except TimeoutError:
            _log.warning("cancels_not_sent", requests=len(self._late_cancels))

    async def on_frame(self, message: Message) -> None:
        """One engine step's tokens for this edge: each receiver writes to its client right here."""
        frame = _frame.decode(message.data)
        now_s = self.ports.clock.monotonic_s()
        receivers = self.receivers
        for entry in frame.entries:
            receiver = receivers.get(entry.handle)
            if receiver is not None:
                receiver.receive(entry, now_s)

    async def on_streams(self, message: Message) -> None:
        """A worker asks which of the requests that it has from this edge have ended here: it aborts those."""
        handles = _streams.decode(message.data).handles
        tables = self.receivers, self._waits
        ended = [handle for handle in handles if not any(handle in some for some in tables)]
        await self.ports.bus.publish(message.reply, _encode(StreamsReply(tuple(ended))))

    async def watch_leases(self) -> None:
        """Follow the lease table until cancelled.

        A later epoch ends everything that runs under an earlier one. A lease that ended is a reason to query the
        worker, not a proof of its death: it may only have lost its connection to the lease store.
        """
        async for changes in LeaseTable(self.ports.leases).watch():
            for kind, name, held in changes:
                if held is not None and held.stalled:
                    self.stalled.add(f"{kind} {name}")
                else:
                    self.stalled.discard(f"{kind} {name}")
                if kind == "worker":
                    self._on_lease(name, held)
                elif kind == "router" and held is not None:
                    self._routers[name] = held.pool
                elif kind == "router":
                    self._routers.pop(name, None)
                elif kind == "edge" and held is not None:
                    self.edges[name] = held.epoch
                elif kind == "edge":
                    self.edges.pop(name, None)
            self.leases_known.set()

    def _on_lease(self, name: str, held: Lease | None) -> None:
        if held is None or name not in self._leases or self._leases[name].pool != held.pool:
            self.on_pools_changed()
        if held is None:
            ended = self._leases.pop(name, None)
            if ended is not None:
                self.spawn(self._verify(name, ended.epoch), "verify")
        elif held.epoch:
            self._leases[name] = held
            self._lose(name, held.epoch, "it was restarted")

    async def _verify(self, worker: str, epoch: int) -> None:
        """Query a worker whose lease ended; if it does not respond, move its requests."""
        for _ in range(UNANSWERED_MAX):
            held = self._leases.get(worker)
            if held is not None and held.epoch == epoch:
                return
            try:
                await self.status(worker, epoch, StatusQuery("", 0))
                return
            except NoResponder:
                break
            except BusError as error:
                _log.info("worker_unanswered", worker=worker, epoch=epoch, reason=str(error))
        self._lose(worker, epoch + 1, "its lease ended")

    def _lose(self, worker: str, below_epoch: int, reason: str) -> None:
        for lost, (name, epoch) in self._embedding.items():
            if name == worker and epoch < below_epoch and not lost.done():
                lost.set_result(reason)
        for receiver in list(self.receivers.values()):
            source, holder = receiver.source, receiver.holder
            if source is not None and source[0] == worker and source[1] < below_epoch:
                receiver.lose_worker(f"worker {worker}: {reason}")
            elif holder is not None and holder[0] == worker and holder[1] < below_epoch:
                receiver.lose_holder(f"worker {worker}, which computes the prompt: {reason}")

    async def watch_silence(self) -> None:
        """Have every stream check for silence: a frame may be lost, or the worker dead. Until cancelled."""
        while True:
            await self.ports.clock.sleep(SILENCE_PERIOD_S)
            now_s = self.ports.clock.monotonic_s()
            for receiver in list(self.receivers.values()):
                receiver.check_silence(now_s)
