"""Questions to workers whose answer takes as long as it takes: given up when the worker is lost."""

import asyncio
from typing import Any

import msgspec

from headwater.actors.bus_port import BusError
from headwater.actors.world import World
from headwater.schemas import subjects
from headwater.schemas.inference import EmbedReply, EmbedRequest

EMBED_TIMEOUT_S = 120.0
"""For one message of prompts. A worker that is lost is known of long before, by its lease."""

_encode = msgspec.msgpack.Encoder().encode
_embed: msgspec.msgpack.Decoder[EmbedReply] = msgspec.msgpack.Decoder(EmbedReply)


class WorkerLost(BusError):
    """The worker that was asked is gone: another one may answer."""


class Asking:
    """What one edge waits for. `lost` is told of workers that are gone."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._waiting: dict[asyncio.Future[str], tuple[str, int]] = {}

    def lost(self, worker: str, below_epoch: int, reason: str) -> None:
        """Lives of a worker before `below_epoch` answer no more."""
        for gone, (name, epoch) in self._waiting.items():
            if name == worker and epoch < below_epoch and not gone.done():
                gone.set_result(reason)

    def close(self, reason: str) -> None:
        """The edge ends: nothing is answered any more."""
        for gone in self._waiting:
            if not gone.done():
                gone.set_result(reason)

    async def embed(self, worker: str, epoch: int, request: EmbedRequest) -> EmbedReply:
        """Have a worker pool prompts. Raises `BusError`, also when it is lost meanwhile."""
        subject = subjects.engine(self._world.ns, worker, epoch, "embed")
        asked = asyncio.ensure_future(
            self._world.bus.request(subject, _encode(request), timeout_s=EMBED_TIMEOUT_S)
        )
        gone: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._waiting[gone] = (worker, epoch)
        try:
            either: set[asyncio.Future[Any]] = {asked, gone}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not asked.done():
                raise WorkerLost(f"worker {worker}: {gone.result()}")
            return _embed.decode(asked.result())
        except msgspec.DecodeError as error:
            raise BusError(f"worker {worker} answers unreadably: {error}") from error
        finally:
            del self._waiting[gone]
            if not asked.done():
                asked.cancel()
                await asyncio.gather(asked, return_exceptions=True)
