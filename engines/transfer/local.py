"""The in-process implementation: the same leases and checksums, with injected faults in place of NIXL's.

It has no threads and uses the given clock, so simulations are deterministic.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeVar

from headwater.engines.transfer.memory import Memory
from headwater.engines.transfer.port import PeerGone, ReadTimedOut, TransferFailed
from headwater.engines.transfer.slab_transfer import SlabTransfer
from headwater.schemas.clock import Clock
from headwater.schemas.messages.transfer import LocalPlace, Offer, Place

T = TypeVar("T")


class TransferFault(NamedTuple):
    """A fault of one read: it takes `takes_s`, finds the bytes `overwritten`, or its owner dies."""

    takes_s: float = 0.0
    overwritten: bool = False
    owner_dies: bool = False


NONE: Final = TransferFault()

Faults = Callable[[str, str], TransferFault]
"""The fault of a starting read, by (owner, reader)."""


class LocalFabric:
    """All slabs of one simulated network. A read that times out still writes its bytes later, as with NIXL."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.faults: Faults = lambda _owner, _reader: NONE
        self._slabs: dict[str, Memory] = {}
        self._late: list[tuple[float, LocalPlace, int, Memory, int]] = []

    def join(self, agent: str, memory: Memory) -> None:
        """A slab that others can read."""
        self._slabs[agent] = memory

    def leave(self, agent: str) -> None:
        """Remove an agent whose process ended. Unknown agents are ignored."""
        self._slabs.pop(agent, None)

    def reaches(self, agent: str) -> bool:
        """Does it exist?"""
        return agent in self._slabs

    async def fetch(
        self, place: LocalPlace, nbytes: int, into: Memory, offset: int, within_s: float, fault: TransferFault
    ) -> None:
        """Copy bytes from one slab into another. Raises `PeerGone`, `ReadTimedOut`."""
        self.settle()
        began_s = self.clock.monotonic_s()
        if fault.takes_s > within_s:
            self._late.append((began_s + fault.takes_s, place, nbytes, into, offset))
            await self.clock.sleep(within_s)
            raise ReadTimedOut(f"{place.agent} did not deliver within {within_s:.3g} s")
        await self.clock.sleep(fault.takes_s)
        if fault.owner_dies:
            self.leave(place.agent)
        self._land(place, nbytes, into, offset)
        if fault.overwritten:
            into.view(offset, nbytes)[nbytes // 2] ^= 0xFF

    def settle(self) -> None:
        """Write the bytes of abandoned reads that are due, whatever their buffers are used for now."""
        now = self.clock.monotonic_s()
        due = [late for late in self._late if late[0] <= now]
        self._late = [late for late in self._late if late[0] > now]
        for _, place, nbytes, into, offset in due:
            if self.reaches(place.agent):
                self._land(place, nbytes, into, offset)

    def _land(self, place: LocalPlace, nbytes: int, into: Memory, offset: int) -> None:
        slab = self._slabs.get(place.agent)
        if slab is None:
            raise PeerGone(f"the process of {place.agent} has ended")
        if place.offset + nbytes > slab.nbytes:
            raise TransferFailed(f"{place.agent} has not registered what its offer names")
        into.view(offset, nbytes)[:] = slab.view(place.offset, nbytes)


class LocalTransfer(SlabTransfer):
    """See `Transfer`. Host memory only; arguments as `SlabTransfer`, after the fabric."""

    def __init__(
        self, fabric: LocalFabric, owner: str, epoch: int, memory: Memory, *args: Any, **options: Any
    ) -> None:
        super().__init__(owner, epoch, memory, *args, **options)
        self._fabric = fabric
        self._agent = f"{owner}.{epoch}"
        self._met: set[str] = set()
        fabric.join(self._agent, memory)

    def kill(self) -> None:
        """Fault: the process dies with its memory, without notice."""
        self._fabric.leave(self._agent)
        self._ledger.closing = True

    def _place(self, offset: int) -> LocalPlace:
        return LocalPlace(self._agent, offset)

    def _knows(self, place: Place) -> bool:
        if not isinstance(place, LocalPlace):
            raise TransferFailed("the offer is in another process")
        return place.agent in self._met

    async def _meet(self, place: Place, metadata: bytes) -> None:
        assert isinstance(place, LocalPlace)
        if not self._fabric.reaches(place.agent):
            raise PeerGone(f"the process of {place.agent} has ended")
        self._met.add(place.agent)

    async def _fetch(self, offer: Offer, offset: int, within_s: float) -> None:
        assert isinstance(offer.place, LocalPlace)
        fault = self._fabric.faults(offer.owner, self.owner)
        await self._fabric.fetch(offer.place, offer.nbytes, self._memory, offset, within_s, fault)

    async def _copy(self, nbytes: int, work: Callable[[], T]) -> T:
        self._fabric.settle()
        return work()

    async def _end(self) -> None:
        self._fabric.leave(self._agent)
