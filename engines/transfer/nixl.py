"""Tensors between processes and machines by NIXL. See `Transfer`."""

from collections.abc import Callable
from typing import Any, TypeVar

from headwater.engines.transfer.memory import Memory
from headwater.engines.transfer.nixl_thread import NixlThread
from headwater.engines.transfer.port import TransferFailed
from headwater.engines.transfer.slab_transfer import SlabTransfer, run_copy
from headwater.schemas.clock import Clock
from headwater.schemas.messages.transfer import NixlPlace, Offer, Place

T = TypeVar("T")


class NixlTransfer(SlabTransfer):
    """A slab that other processes read by NIXL. Arguments as `SlabTransfer`; call `start` first."""

    def __init__(
        self,
        owner: str,
        epoch: int,
        memory: Memory,
        clock: Clock,
        new_lease: Callable[[], bytes],
        **options: Any,
    ) -> None:
        super().__init__(owner, epoch, memory, clock, new_lease, **options)
        # Random, so that no two incarnations of a worker share an agent even if they had the same epoch.
        self._nixl = NixlThread(f"{owner}.{epoch}.{new_lease().hex()[:12]}", memory)

    async def start(self) -> "NixlTransfer":
        """Register the slab. Raises `TransferUnavailable`."""
        await self._nixl.start()
        self._metadata = self._nixl.metadata
        return self

    def _expect_reader(self, within_s: float) -> None:
        self._nixl.expect(within_s)

    def _place(self, offset: int) -> NixlPlace:
        memory = self._memory
        return NixlPlace(
            self._nixl.name, self._nixl.digest, memory.kind, memory.device, memory.address + offset
        )

    def _knows(self, place: Place) -> bool:
        if not isinstance(place, NixlPlace):
            raise TransferFailed("the offer is not a NIXL offer")
        return place.agent in self._nixl.met

    async def _meet(self, place: Place, metadata: bytes) -> None:
        assert isinstance(place, NixlPlace)
        await self._nixl.meet(place, metadata)

    async def _fetch(self, offer: Offer, offset: int, within_s: float) -> None:
        assert isinstance(offer.place, NixlPlace)
        await self._nixl.read(offer.place, offset, offer.nbytes, within_s)

    async def _copy(self, nbytes: int, work: Callable[[], T]) -> T:
        return await run_copy(nbytes, work)

    async def _end(self) -> None:
        await self._nixl.close()
