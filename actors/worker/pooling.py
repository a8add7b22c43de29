"""Pooling requests: prompts to turn into vectors, computed in addition to the requests that generate.

The engine computes for as long as it takes, so each request runs in a task of its own and is answered when it is done.
An edge cancels one like any other request.
"""

import asyncio
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec
import structlog

from headwater.actors.bus import Bus, BusError, Message
from headwater.actors.runtime.actor import Spawn
from headwater.actors.worker.handoffs import RequestsByEdge, by_edge
from headwater.actors.worker.inflight import Inflight, WorkerStatus
from headwater.actors.worker.media import MediaCache, MediaMissing
from headwater.actors.worker.requests import ABORTED, refusal_of
from headwater.engines.engine import Engine
from headwater.schemas.messages.inference import (
    Cancel,
    Embedded,
    EmbedReply,
    EmbedRequest,
    Refused,
    WaitingEdge,
)

ACTIVE_MAX: Final = 256
"""Requests at once; one more is refused, and its edge tries another worker."""

REPLY_BYTES_MAX: Final = 768 * 1024
"""A reply is one message, and a NATS server accepts 1 MiB by default."""

_encode = msgspec.msgpack.Encoder().encode
_embed = msgspec.msgpack.Decoder(EmbedRequest)
_cancel = msgspec.msgpack.Decoder(Cancel)
_log = structlog.get_logger("headwater.embedding")


class _Pooling(NamedTuple):
    task: asyncio.Task[None]
    message: Message
    waiter: WaitingEdge | None


class Embeddings:
    """The pooling requests of one worker, counted in `inflight`."""

    def __init__(
        self,
        bus: Bus,
        engine: Engine,
        spawn: Spawn,
        status: WorkerStatus,
        inflight: Inflight,
        media: MediaCache,
    ) -> None:
        self._bus = bus
        self._engine = engine
        self._spawn = spawn
        self._status = status
        self._inflight = inflight
        self._media = media
        self._running: dict[str, _Pooling] = {}

    async def on_embed(self, message: Message) -> None:
        """Accept a request, or refuse it. The reply is sent when the engine has computed it."""
        try:
            request = _embed.decode(message.data)
        except msgspec.DecodeError as error:
            return await self._reply(message, Refused(f"unreadable request: {error}", False))
        if self._inflight.knows(request.request):
            # A copy: there is one answer.
            return None
        refusal = self._status.refusal()
        if not refusal and len(self._running) >= ACTIVE_MAX:
            refusal = f"it computes {ACTIVE_MAX} requests already"
        if refusal:
            return await self._reply(message, self._status.refuse(refusal))
        task = self._spawn(self._compute(message, request), "embed")
        self._running[request.request] = _Pooling(task, message, request.waiter)
        self._inflight.accept_embedding(request.request)
        # Not at the end of `_compute`: a task may be cancelled before it starts.
        task.add_done_callback(lambda _: self._end(request.request))
        return None

    async def on_cancel(self, message: Message) -> None:
        """Cancel requests that no client waits for any more."""
        self.abort(_cancel.decode(message.data).requests)

    def requests_by_edge(self) -> RequestsByEdge:
        """See `EdgeRequests`."""
        return by_edge((request, running.waiter) for request, running in self._running.items())

    def abort(self, requests: Sequence[str]) -> None:
        """See `EdgeRequests`."""
        for request in requests:
            if request in self._running:
                self._running[request].task.cancel()

    def abort_all(self) -> None:
        """Abort all requests and reply so: their edges try another worker."""
        for running in list(self._running.values()):
            running.task.cancel()
            # A worker that only sleeps keeps its lease: without this reply the edge would wait for its timeout.
            self._spawn(self._reply_aborted(running.message), "embed aborted")

    async def _reply_aborted(self, message: Message) -> None:
        try:
            await self._reply(message, ABORTED)
        except BusError as error:
            _log.warning("embedding_publish_failed", reason=str(error))

    async def _compute(self, message: Message, request: EmbedRequest) -> None:
        reply: EmbedReply
        try:
            if request.waiter is not None and any(request.media):
                items = [await self._media.load(request.waiter.edge, media) for media in request.media]
                request = msgspec.structs.replace(request, media=tuple(items))
            vectors = await self._engine.embed(request)
            reply = _checked(request, vectors)
        except MediaMissing as error:
            reply = Refused(str(error), True)
        except Exception as error:
            reply = refusal_of(error, request.request, self._status)
        try:
            await self._reply(message, reply)
        except BusError as error:
            _log.warning("embedding_publish_failed", request=request.request, reason=str(error))

    def _end(self, request: str) -> None:
        del self._running[request]
        self._inflight.finish_embedding(request)

    async def _reply(self, message: Message, reply: EmbedReply) -> None:
        await self._bus.publish(message.reply, _encode(reply))


def _checked(request: EmbedRequest, vectors: tuple[bytes, ...]) -> EmbedReply:
    """The vectors, if there is one per prompt and they fit into one message."""
    if len(vectors) != len(request.prompts):
        return Refused(f"the engine gave {len(vectors)} vectors for {len(request.prompts)} prompts", True)
    size = sum(len(vector) for vector in vectors)
    if size > REPLY_BYTES_MAX:
        return Refused(f"the vectors have {size} bytes, a message at most {REPLY_BYTES_MAX}", False)
    return Embedded(vectors)
