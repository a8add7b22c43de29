"""Media of prompts at a worker: fetched from the edge that has the request, and kept for the next one that has them."""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

import msgspec
import structlog

from headwater.actors import metrics
from headwater.actors.bus.port import Bus, BusError
from headwater.schemas import subjects
from headwater.schemas.messages.media import MediaPiece, MediaQuery, PromptMedia

PIECE_BYTES: Final = 1 << 20
PIECES_AT_ONCE: Final = 4
PIECE_TIMEOUT_S: Final = 2.0
LOAD_S_MAX: Final = 4.0
"""That all media of a request may take: less than the edge waits for the reply."""

CACHE_BYTES: Final = 256 << 20

_encode = msgspec.msgpack.Encoder().encode
_piece = msgspec.msgpack.Decoder(MediaPiece)

_log = structlog.get_logger("headwater.worker.media")


class MediaMissing(Exception):
    """An item of media cannot be fetched: its edge is gone, or does not answer."""


class MediaCache:
    """Decoded media by id, the least recently used dropped beyond `bytes_max`. An item that several requests have is fetched once."""

    def __init__(self, bus: Bus, ns: str, bytes_max: int = CACHE_BYTES) -> None:
        self._bus = bus
        self._ns = ns
        self._bytes_max = bytes_max
        self._held: OrderedDict[str, bytes] = OrderedDict()
        self._bytes = 0
        self._loading: dict[str, asyncio.Future[bytes]] = {}

    async def load(
        self, edge: str, media: Sequence[PromptMedia], within_s: float = LOAD_S_MAX
    ) -> tuple[PromptMedia, ...]:
        """The items with their data. Raises `MediaMissing`."""
        try:
            async with asyncio.timeout(within_s):
                return tuple(
                    [msgspec.structs.replace(item, data=await self._data(edge, item)) for item in media]
                )
        except TimeoutError as error:
            raise MediaMissing(f"edge {edge} did not send its media within {within_s:g} s") from error

    async def _data(self, edge: str, item: PromptMedia) -> bytes:
        loading = self._loading.get(item.id)
        if loading is not None:
            # Another request fetches it. Should that fail, this one tries its own edge.
            await asyncio.wait({loading})
        found = self._held.get(item.id)
        # Ids are hashes of the content; the size is compared because it comes with the message.
        if found is not None and len(found) == item.size:
            self._held.move_to_end(item.id)
            metrics.MEDIA_LOADS.labels("cache").inc()
            return found
        loading = asyncio.ensure_future(self._fetch(edge, item))
        self._loading[item.id] = loading
        try:
            data = await loading
        finally:
            if self._loading.get(item.id) is loading:
                del self._loading[item.id]
        self._keep(item.id, data)
        metrics.MEDIA_LOADS.labels("edge").inc()
        metrics.MEDIA_FETCHED_BYTES.inc(len(data))
        return data

    def _keep(self, id_: str, data: bytes) -> None:
        if len(data) > self._bytes_max:
            return
        self._bytes += len(data) - len(self._held.pop(id_, b""))
        self._held[id_] = data
        while self._bytes > self._bytes_max:
            self._bytes -= len(self._held.popitem(last=False)[1])

    async def _fetch(self, edge: str, item: PromptMedia) -> bytes:
        places = asyncio.Semaphore(PIECES_AT_ONCE)
        subject = subjects.edge_media(self._ns, edge)

        async def fetch_piece(offset: int) -> bytes:
            query = MediaQuery(item.id, offset, min(PIECE_BYTES, item.size - offset))
            async with places:
                reply = await self._bus.request(subject, _encode(query), timeout_s=PIECE_TIMEOUT_S)
            piece = _piece.decode(reply)
            if not piece.known or len(piece.data) != query.count:
                raise MediaMissing(f"edge {edge} no longer has {item.kind} {item.id}")
            return piece.data

        try:
            async with asyncio.TaskGroup() as group:
                pieces = [
                    group.create_task(fetch_piece(offset)) for offset in range(0, item.size, PIECE_BYTES)
                ]
        except* (BusError, msgspec.DecodeError, MediaMissing) as errors:
            cause = errors.exceptions[0]
            raise MediaMissing(f"fetching {item.kind} {item.id} from edge {edge} failed: {cause}") from cause
        _log.debug("media_fetched", media=item.id, bytes=item.size)
        return b"".join([piece.result() for piece in pieces])
