"""Embeddings between simulated workers: slabs that end with their processes, and reads that the network's faults hit."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import Final, Protocol

from headwater.engines.transfer.local import LocalFabric, LocalTransfer, TransferFault
from headwater.engines.transfer.memory import HostMemory
from headwater.engines.transfer.port import TensorTransfer
from headwater.schemas.clock import Clock
from headwater.schemas.messages.transfer import LEASE_BYTES

SLAB_BYTES: Final = 64 << 10
"""Of each worker: room for a few embeddings, so that it is full at times."""

SETTLED_S: Final = 120.0
"""After this time no lease, claim or quarantine is left."""

NEVER_S: Final = 1e9


class HostProcess(Clock, Protocol):
    """The process that a slab is in: see `headwater.ops.sim.process.Process`."""

    alive: bool
    connected: bool

    def on_kill(self, callback: Callable[[], None]) -> None:
        """Call `callback` when the process is killed."""
        ...


Disturbed = Callable[[], TransferFault]
"""The fault of a read between two processes that are connected."""


class SimTransfers:
    """The slabs of all processes of a fleet."""

    def __init__(self, clock: Clock, disturbed: Disturbed) -> None:
        self._fabric = LocalFabric(clock)
        self._fabric.faults = self._fault
        self._disturbed = disturbed
        self._processes: dict[str, HostProcess] = {}
        self._slabs: list[tuple[HostProcess, LocalTransfer]] = []
        self._numbers = count(1)

    async def open(self, name: str, process: HostProcess) -> TensorTransfer:
        """A worker's slab. It ends with the process."""
        number = next(self._numbers)
        leases = count(number << 64)
        transfer = LocalTransfer(
            self._fabric,
            name,
            number,
            HostMemory(SLAB_BYTES),
            process,
            partial(_next_lease, leases),
        )
        process.on_kill(transfer.kill)
        self._processes[name] = process
        self._slabs.append((process, transfer))
        return transfer

    def _fault(self, owner: str, reader: str) -> TransferFault:
        """Of a read that begins now."""
        if not all(self._processes[name].connected for name in (owner, reader)):
            return TransferFault(takes_s=NEVER_S)
        return self._disturbed()

    def leaks(self) -> Iterator[str]:
        """Bytes that are still in use, `SETTLED_S` after the end of a run, in slabs of processes that were not killed."""
        for process, transfer in self._slabs:
            stats = transfer.stats()
            if process.alive and stats.free != stats.capacity:
                yield f"embeddings at {transfer.owner} are still pinned: {stats}"


def _next_lease(numbers: "count[int]") -> bytes:
    return next(numbers).to_bytes(LEASE_BYTES, "big")
