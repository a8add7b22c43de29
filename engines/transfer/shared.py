"""Tensors between processes of one machine, in memory that they share. For engines without NIXL; see `TensorTransfer`.

The slab is an anonymous file, which ends with its process: a reader opens it through /proc, and finds out by its name whether the process
with that number is still the one that made the offer. So nothing is left behind by a process that is killed.
"""

import mmap
import os
from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeVar

import numpy as np

from headwater.engines.transfer.memory import HostMemory
from headwater.engines.transfer.port import PeerGone, TransferFailed
from headwater.engines.transfer.slab_transfer import SlabTransfer, run_copy
from headwater.schemas.clock import Clock
from headwater.schemas.messages.transfer import Offer, Place, SharedPlace

T = TypeVar("T")

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


class SharedTransfer(SlabTransfer):
    """A slab that other processes of this machine read. Arguments as `SlabTransfer`."""

    def __init__(
        self,
        owner: str,
        epoch: int,
        memory: SharedMemory,
        clock: Clock,
        new_lease: Callable[[], bytes],
        **options: Any,
    ) -> None:
        super().__init__(owner, epoch, memory, clock, new_lease, **options)
        self._shared = memory

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

    async def _copy(self, nbytes: int, work: Callable[[], T]) -> T:
        return await run_copy(nbytes, work)

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
