"""Images of the requests in flight at an edge: workers fetch those that they do not have."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import msgspec

from headwater.actors.bus.port import Bus, Message
from headwater.schemas.messages.media import MediaPiece, MediaQuery

PIECE_BYTES_MAX: Final = 4 << 20
"""Of one reply; a message may have twice as many."""

_encode = msgspec.msgpack.Encoder().encode
_query = msgspec.msgpack.Decoder(MediaQuery)


class MediaHolder:
    """Decoded media by id, each as long as a request has it."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._held: dict[str, tuple[memoryview, int]] = {}

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
        """Reply with a piece of an item."""
        query = _query.decode(message.data)
        held = self._held.get(query.id)
        piece = MediaPiece(False)
        if held is not None and query.offset >= 0 and 0 < query.count <= PIECE_BYTES_MAX:
            piece = MediaPiece(True, bytes(held[0][query.offset : query.offset + query.count]))
        await self._bus.publish(message.reply, _encode(piece))
