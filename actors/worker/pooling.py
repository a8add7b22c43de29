"""Pooling requests: prompts to turn into vectors, computed in addition to the requests that generate."""

from typing import Final

import msgspec

from headwater.actors.bus import Bus
from headwater.actors.runtime.actor import Spawn
from headwater.actors.worker.inflight import Inflight, WorkerStatus
from headwater.actors.worker.media import MediaCache
from headwater.actors.worker.reply_server import ReplyServer
from headwater.engines.engine import Engine
from headwater.schemas.messages.inference import Embedded, EmbedReply, EmbedRequest, Refused

REPLY_BYTES_MAX: Final = 768 * 1024
"""A reply is one message, and a NATS server accepts 1 MiB by default."""

_request = msgspec.msgpack.Decoder(EmbedRequest)


class PoolingRequests(ReplyServer[EmbedRequest]):
    """The pooling requests of one worker."""

    kind = "embed"

    def __init__(
        self,
        bus: Bus,
        engine: Engine,
        spawn: Spawn,
        status: WorkerStatus,
        inflight: Inflight,
        media: MediaCache,
    ) -> None:
        super().__init__(_request, bus, spawn, status, inflight)
        self._engine = engine
        self._media = media

    def accept(self, request: EmbedRequest) -> None:
        """See `ReplyServer.accept`."""
        self._inflight.accept_embedding(request.request)

    def finish(self, request: str) -> None:
        """See `ReplyServer.finish`."""
        self._inflight.finish_embedding(request)

    async def compute(self, request: EmbedRequest) -> EmbedReply:
        """See `ReplyServer.compute`."""
        if request.waiter is not None and any(request.media):
            items = [await self._media.load(request.waiter.edge, media) for media in request.media]
            request = msgspec.structs.replace(request, media=tuple(items))
        return _checked(request, await self._engine.embed(request))


def _checked(request: EmbedRequest, vectors: tuple[bytes, ...]) -> EmbedReply:
    """Return the vectors, if there is one per prompt and they fit into one message."""
    if len(vectors) != len(request.prompts):
        return Refused(f"the engine gave {len(vectors)} vectors for {len(request.prompts)} prompts", True)
    size = sum(len(vector) for vector in vectors)
    if size > REPLY_BYTES_MAX:
        return Refused(f"the vectors have {size} bytes, a message at most {REPLY_BYTES_MAX}", False)
    return Embedded(vectors)
