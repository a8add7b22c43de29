"""Media of the requests in flight at an edge: workers fetch those that they do not have, in pieces or as an offer of all bytes."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import msgspec
import numpy as np
import structlog

from headwater.actors.bus.port import Bus, Message
from headwater.engines.transfer.port import TensorTransfer, TransferError
from headwater.schemas.messages.media import MediaPiece, MediaQuery
from headwater.schemas.messages.transfer import Offer

PIECE_BYTES_MAX: Final = 4 << 20
"""Of one reply; a message may have twice as many."""

OFFER_S: Final = 5.0
"""How long an offer waits to be claimed. The worker that asked for it does so at once."""

_encode = msgspec.msgpack.Encoder().encode
_query = msgspec.msgpack.Decoder(MediaQuery)
_log = structlog.get_logger("headwater.edge.media")


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
            _log.info("media_not_offered", bytes=data.nbytes, reason=str(error))
            return None
