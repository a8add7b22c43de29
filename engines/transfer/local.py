"""The in-process twin: the same leases and checksums, with faults where NIXL would have them.

Without threads and on the clock that it is given, so a simulation replays from its seed.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeVar

from headwater.engines.transfer.memory import Memory
from headwater.engines.transfer.port import PeerGone, ReadTimedOut, TransferFailed
from headwater.engines.transfer.slab_transfer import SlabTransfer
from headwater.schemas.clock import Clock
from headwater.schemas.transfer import LocalPlace, Offer, Place

T = TypeVar("T")


class Fault(NamedTuple):
    """What befalls one reading: it takes `takes_s`, finds the bytes `overwritten`, or sees its owner die."""

    takes_s: float = 0.0
    overwritten: bool = False
    owner_dies: bool = False


NONE: Final = Fault()

Faults = Callable[[str, str], Fault]
"""(owner, reader) of a reading that begins: what befalls it."""


class Fabric:
    """All slabs of one simulated network. A reading that outlasts its time still lands, as with NIXL."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.faults: Faults = lambda _owner, _reader: NONE
        self._slabs: dict[str, Memory] = {}
        self._late: list[tuple[float, LocalPlace, int, Memory, int]] = []

    def join(self, agent: str, memory: Memory) -> None:
        """A slab that others can read."""
        self._slabs[agent] = memory

    def leave(self, agent: str) -> None:
        """Its process is gone. Unknown agents are ignored."""
        self._slabs.pop(agent, None)

    def reaches(self, agent: str) -> bool:
        """Is it there?"""
        return agent in self._slabs

    async def fetch(
        self, place: LocalPlace, nbytes: int, into: Memory, offset: int, within_s: float, fault: Fault
    ) -> None:
        """Bring bytes from one slab into another. Raises `PeerGone`, `ReadTimedOut`."""
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
        """Let what was given up land, if its time has come: into whatever is there now."""
        now = self.clock.monotonic_s()
        due = [late for late in self._late if late[0] <= now]
        self._late = [late for late in self._late if late[0] > now]
        for _, place, nbytes, into, offset in due:
            if self.reaches(place.agent):
                self._land(place, nbytes, into, offset)

    def _land(self, place: LocalPlace, nbytes: int, into: Memory, offset: int) -> None:
        slab = self._slabs.get(place.agent)
        if slab is None:
            raise PeerGone(f"the process of {place.agent} is gone")
        if place.offset + nbytes > slab.nbytes:
            raise TransferFailed(f"{place.agent} has not registered what its offer names")
        into.view(offset, nbytes)[:] = slab.view(place.offset, nbytes)


class LocalTransfer(SlabTransfer):
    """See `Transfer`. Host memory only; arguments as `SlabTransfer`, after the fabric."""

    def __init__(
        self, fabric: Fabric, owner: str, epoch: int, memory: Memory, *args: Any, **options: Any
    ) -> None:
        super().__init__(owner, epoch, memory, *args, **options)
        self._fabric = fabric
        self._agent = f"{owner}.{epoch}"
        self._met: set[str] = set()
        fabric.join(self._agent, memory)

    def kill(self) -> None:
        """Fault: the process dies, and its memory with it. Nobody is told."""
        self._fabric.leave(self._agent)
        self._ledger.closing = True

    def _place(self, offset: int) -> LocalPlace:
        return LocalPlace(self._agent, offset)

    def _knows(self, place: Place) -> bool:
        if not isinstance(place, LocalPlace):
            raise TransferFailed("the offer lies in another process")
        return place.agent in self._met

    async def _meet(self, place: Place, metadata: bytes) -> None:
        assert isinstance(place, LocalPlace)
        if not self._fabric.reaches(place.agent):
            raise PeerGone(f"the process of {place.agent} is gone")
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
