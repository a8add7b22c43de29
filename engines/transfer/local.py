"""Transfers on one machine: in one process with injected faults for simulations and tests, and between processes that share memory.

Both have the leases and checksums of NIXL's. `LocalTransfer` has no threads and uses the given clock, so simulations are deterministic.

The slab of `SharedTransfer` is an anonymous file, which ends with its process: a reader opens it through /proc, and finds out by
its name whether the process with that number is still the one that made the offer. So nothing is left behind by a process that is
killed.
"""

import mmap
import os
from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np

from headwater.engines.transfer.port import HostMemory, Memory, PeerGone, ReadTimedOut, TransferFailed
from headwater.engines.transfer.slab import TensorTransfer, run_copy
from headwater.schemas.clock import Clock
from headwater.schemas.media import LocalPlace, Offer, Place, SharedPlace

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


class LocalTransfer(TensorTransfer):
    """See `TensorTransfer`. Host memory only; the fabric is its first argument."""

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


# Memory that processes of one machine share, for engines without NIXL.

PREFIX: Final = "headwater-"


class SharedMemory(HostMemory):
    """Host memory that other processes of this user can open. No two have one `name`. Its pages are populated when first used."""

    def __init__(self, nbytes: int, name: str) -> None:
        self.name = name
        self.fd = os.memfd_create(PREFIX + name, os.MFD_CLOEXEC)
        os.ftruncate(self.fd, nbytes)
        self._bytes = np.frombuffer(mmap.mmap(self.fd, nbytes), np.uint8)
        self.nbytes = nbytes
        self.address = self._bytes.ctypes.data

    def close(self) -> None:
        """Other processes cannot open it any more. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            # The number may be another file's from now on.
            self.fd = -1


class SharedTransfer(TensorTransfer):
    """A slab in `SharedMemory`, which other processes of this machine read."""

    @property
    def _shared(self) -> SharedMemory:
        assert isinstance(self._memory, SharedMemory)
        return self._memory

    def _place(self, offset: int) -> SharedPlace:
        return SharedPlace(self._shared.name, os.getpid(), self._shared.fd, offset)

    def _knows(self, place: Place) -> bool:
        if not isinstance(place, SharedPlace):
            raise TransferFailed("the offer is not in shared memory")
        return True

    async def _meet(self, place: Place, metadata: bytes) -> None:
        """There is nothing to register."""

    async def _fetch(self, offer: Offer, offset: int, within_s: float) -> None:
        assert isinstance(offer.place, SharedPlace)
        read = partial(_read, offer.place, self._memory.view(offset, offer.nbytes))
        await run_copy(offer.nbytes, read)

    async def _end(self) -> None:
        self._shared.close()


def _read(place: SharedPlace, into: Any) -> None:
    """Raises `PeerGone`, `TransferFailed`."""
    path = f"/proc/{place.pid}/fd/{place.fd}"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except PermissionError as error:
        raise TransferFailed(f"the memory of process {place.pid} is another user's") from error
    except OSError as error:
        raise PeerGone(f"process {place.pid} has ended, or is on another machine") from error
    try:
        if not os.readlink(f"/proc/self/fd/{fd}").startswith(f"/memfd:{PREFIX}{place.agent} "):
            raise PeerGone(f"process {place.pid} is not the one that made the offer")
        done = 0
        while done < into.nbytes:
            count = os.preadv(fd, [into[done:].data], place.offset + done)
            if not count:
                raise TransferFailed(f"{place.agent} ends before what its offer names")
            done += count
    finally:
        os.close(fd)
