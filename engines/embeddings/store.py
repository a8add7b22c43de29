"""The embeddings that a consumer was given, each as long as a request has it, and where needed a while longer.

An engine may load one more than once for one request, so it stays while one has it; and a request that its worker has cancelled may still be
in the engine's queue, so that it stays for `LINGER_S` then. One that a request was promised stays for `PROMISED_S`: it is on its way.
Others are removed when their room is needed, the least recently used first.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, Protocol

from headwater.engines.engine import EngineError, RequestRejected
from headwater.schemas.messages.media import PromptMedia

LINGER_S: Final = 60.0

PROMISED_S: Final = 10.0
"""From finding an embedding here to the request's start in the engine, in which a worker may claim KV and read other embeddings."""


class StoreFull(EngineError):
    """All embeddings of the store are in use."""


class Shelf(Protocol):
    """Where the tensors of a store are, by the images' ids."""

    def write(self, identifier: str, tensor: Any) -> None:
        """Add one; called in a thread."""
        ...

    def remove(self, identifier: str) -> None:
        """Remove one. It may be missing."""
        ...

    def close(self) -> None:
        """Remove all."""
        ...


class EmbeddingGone(RequestRejected):
    """A request took longer than `PROMISED_S` to start; another try fetches its images."""

    retryable = True


class _HeldEmbedding:
    __slots__ = ("fields", "nbytes", "until_s", "users")

    def __init__(self, nbytes: int, fields: bytes, until_s: float) -> None:
        self.nbytes = nbytes
        self.fields = fields
        self.until_s = until_s
        self.users = 0


class EmbeddingStore:
    """Up to `bytes_max` bytes on `shelf`. `now` is monotonic, in seconds. Used from one event loop only."""

    def __init__(self, shelf: Shelf, bytes_max: int, now: Callable[[], float]) -> None:
        self.nbytes = 0
        self._shelf = shelf
        self._bytes_max = bytes_max
        self._now = now
        self._held: OrderedDict[str, _HeldEmbedding] = OrderedDict()
        self._writing: dict[str, asyncio.Future[None]] = {}

    def __len__(self) -> int:
        """Embeddings held."""
        return len(self._held)

    def fields(self, item: PromptMedia) -> bytes | None:
        """What came with the embedding of an image; None if it is not here. Promises that it stays for a while."""
        held = self._held.get(item.id)
        if held is None:
            return None
        held.until_s = max(held.until_s, self._now() + PROMISED_S)
        self._held.move_to_end(item.id)
        return held.fields

    async def put(self, item: PromptMedia, tensor: Any, fields: bytes) -> None:
        """Add the embedding of an image, a torch tensor. Raises `StoreFull`, and `EngineError` if it cannot be written."""
        writing = self._writing.get(item.id)
        if writing is not None:
            await asyncio.wait({writing})
        if item.id in self._held:
            return
        nbytes = int(tensor.nbytes)
        self._make_room(nbytes)
        self.nbytes += nbytes
        # Not cancelled with a request: others may have its image.
        writing = asyncio.ensure_future(asyncio.to_thread(self._shelf.write, item.id, tensor))
        self._writing[item.id] = writing
        writing.add_done_callback(partial(self._note_written, item.id, nbytes, fields))
        try:
            await asyncio.shield(writing)
        except Exception as error:  # a full /dev/shm, for one, which safetensors reports in its own way
            raise EngineError(f"an image embedding of {nbytes} bytes cannot be written: {error}") from error

    def _note_written(self, id_: str, nbytes: int, fields: bytes, written: "asyncio.Future[None]") -> None:
        if self._writing.get(id_) is written:
            del self._writing[id_]
        if written.cancelled() or written.exception() is not None:
            self.nbytes -= nbytes
        else:
            self._held[id_] = _HeldEmbedding(nbytes, fields, self._now() + PROMISED_S)

    def _make_room(self, nbytes: int) -> None:
        now = self._now()
        for id_, held in list(self._held.items()):
            if self.nbytes + nbytes <= self._bytes_max:
                return
            if not held.users and held.until_s <= now:
                del self._held[id_]
                self.nbytes -= held.nbytes
                self._shelf.remove(id_)
        if self.nbytes + nbytes > self._bytes_max:
            raise StoreFull(
                f"{len(self._held)} image embeddings with {self.nbytes} bytes are in use; {self._bytes_max} bytes are the most"
            )

    def pin(self, items: Sequence[PromptMedia]) -> list[str]:
        """A request has these items; returns the ids of those that are here, to unpin when it has ended."""
        here = [item.id for item in items if item.id in self._held]
        for id_ in here:
            self._held[id_].users += 1
        return here

    def unpin(self, ids: Sequence[str], *, was_cancelled: bool) -> None:
        """The request has ended; if it was cancelled, the engine may not know yet."""
        for id_ in ids:
            held = self._held[id_]
            held.users -= 1
            if was_cancelled:
                held.until_s = max(held.until_s, self._now() + LINGER_S)

    def close(self) -> None:
        """Remove all embeddings."""
        self._shelf.close()
