"""Media of prompts at a worker: fetched from the edge that has the request, and kept for the next one that has them.

Large items are read over the worker's transfer where both sides have one, and not through NATS. If that fails they come in pieces.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

import msgspec
import structlog

from headwater.actors import metrics
from headwater.actors.runtime.lease import OwnerChannel
from headwater.actors.runtime.ports import Bus, BusError
from headwater.engines.transfer.port import TransferError, TransferFailed
from headwater.engines.transfer.slab import TensorTransfer
from headwater.schemas import subjects
from headwater.schemas.media import MediaPiece, MediaQuery, PromptMedia

PIECE_BYTES: Final = 512 << 10
"""A reply is one message, and NATS takes 1 MiB unless it is configured."""

PIECES_AT_ONCE: Final = 4
PIECE_TIMEOUT_S: Final = 2.0
LOAD_S_MAX: Final = 4.0
"""The longest time that all media of a request may take: less than the edge waits for the reply."""

CACHE_BYTES: Final = 256 << 20

OFFERED_BYTES_MIN: Final = PIECE_BYTES + 1
"""What one message holds is faster in one."""

_encode = msgspec.msgpack.Encoder().encode
_piece = msgspec.msgpack.Decoder(MediaPiece)

_log = structlog.get_logger("headwater.worker.media")


class MediaMissing(Exception):
    """An item of media cannot be fetched: its edge is gone, or does not answer."""


class MediaCache:
    """Decoded media by id, the least recently used dropped beyond `bytes_max`. An item that several requests have is fetched once.

    `transfer` is None for a worker that reads no offers.
    """

    def __init__(self, bus: Bus, ns: str, bytes_max: int = CACHE_BYTES) -> None:
        self.transfer: TensorTransfer | None = None
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
        cached = self._held.get(item.id)
        # Ids are hashes of the content; the size is compared because it comes with the message.
        if cached is not None and len(cached) == item.size:
            self._held.move_to_end(item.id)
            metrics.MEDIA_LOADS.labels("cache").inc()
            return cached
        loading = asyncio.ensure_future(self._fetch(edge, item))
        self._loading[item.id] = loading
        try:
            data = await loading
        finally:
            if self._loading.get(item.id) is loading:
                del self._loading[item.id]
        self._keep(item.id, data)
        return data

    def _keep(self, id_: str, data: bytes) -> None:
        if len(data) > self._bytes_max:
            return
        self._bytes += len(data) - len(self._held.pop(id_, b""))
        self._held[id_] = data
        while self._bytes > self._bytes_max:
            self._bytes -= len(self._held.popitem(last=False)[1])

    async def _fetch(self, edge: str, item: PromptMedia) -> bytes:
        try:
            data = None
            if self.transfer is not None and item.size >= OFFERED_BYTES_MIN:
                data = await self._read_offer(self.transfer, edge, item)
            source = "edge" if data is None else "offer"
            if data is None:
                data = await self._fetch_pieces(edge, item)
        except (BusError, msgspec.DecodeError) as error:
            raise MediaMissing(f"fetching {item.kind} {item.id} from edge {edge} failed: {error}") from error
        metrics.MEDIA_LOADS.labels(source).inc()
        metrics.MEDIA_FETCHED_BYTES.inc(len(data))
        _log.debug("media_fetched", media=item.id, bytes=item.size, source=source)
        return data

    async def _read_offer(self, transfer: TensorTransfer, edge: str, item: PromptMedia) -> bytes | None:
        """Ask the edge for an offer, and read it. None where it makes none, or the reading fails."""
        query = MediaQuery(item.id, 0, min(PIECE_BYTES, item.size), as_offer=True)
        try:
            offer = (await self._query(edge, item, query)).offer
            if offer is None:
                return None
            if (offer.dtype, offer.nbytes) != ("uint8", item.size):
                raise TransferFailed(f"{offer.nbytes} bytes as {offer.dtype} are on offer, not {item.size}")
            channel = OwnerChannel(self._bus, subjects.edge_offer(self._ns, edge))
            async with transfer.borrow(offer, channel) as values:
                data: bytes = await asyncio.to_thread(values.tobytes)
        except (BusError, TransferError) as error:
            metrics.MEDIA_LOADS.labels("offer_failed").inc()
            _log.warning("media_offer_not_read", media=item.id, reason=str(error))
            return None
        return data

    async def _fetch_pieces(self, edge: str, item: PromptMedia) -> bytes:
        places = asyncio.Semaphore(PIECES_AT_ONCE)

        async def fetch_piece(offset: int) -> bytes:
            query = MediaQuery(item.id, offset, min(PIECE_BYTES, item.size - offset))
            async with places:
                piece = await self._query(edge, item, query)
            if len(piece.data) != query.count:
                raise MediaMissing(f"edge {edge} no longer has {item.kind} {item.id}")
            return piece.data

        try:
            async with asyncio.TaskGroup() as group:
                pieces = [
                    group.create_task(fetch_piece(offset)) for offset in range(0, item.size, PIECE_BYTES)
                ]
        except* (BusError, msgspec.DecodeError, MediaMissing) as errors:
            raise errors.exceptions[0] from errors
        return b"".join([piece.result() for piece in pieces])

    async def _query(self, edge: str, item: PromptMedia, query: MediaQuery) -> MediaPiece:
        subject = subjects.edge_media(self._ns, edge)
        piece = _piece.decode(await self._bus.request(subject, _encode(query), timeout_s=PIECE_TIMEOUT_S))
        if not piece.known:
            raise MediaMissing(f"edge {edge} no longer has {item.kind} {item.id}")
        return piece
