"""Tensor transfer between actors: registered memory, leases on it, checksums of what was read, and the opening of a process's slab.

NIXL moves the bytes with few guarantees: a read ends `DONE` although its buffer was overwritten during it, or is no longer
registered, and an abandoned read can still write its bytes. So this package makes transfers safe: a lease has one reader, a
buffer whose read did not end observably is quarantined, and a reader returns only data with the checksum of the offer.

A slab is read over NIXL, or in memory that processes of one machine share.
"""

import secrets
from functools import partial
from importlib.util import find_spec
from typing import Literal

from headwater.engines.transfer.local import SharedMemory, SharedTransfer
from headwater.engines.transfer.port import TransferUnavailable
from headwater.engines.transfer.slab import OpenTransfer, TensorTransfer
from headwater.schemas.clock import SystemClock
from headwater.schemas.media import LEASE_BYTES, MediaTransport

Transport = Literal["nixl", "shared"]


async def open_transfer(name: str, mib: int, transport: Transport) -> TensorTransfer:
    """A slab of `mib` MiB for the process of the actor `name`. Raises `TransferUnavailable`."""
    # Leases end with this process: its epoch here is random, the subject of a worker's claim has the worker's.
    epoch, clock, new_lease = secrets.randbits(31), SystemClock(), partial(secrets.token_bytes, LEASE_BYTES)
    if transport == "shared":
        memory = SharedMemory(mib << 20, f"{name}.{secrets.token_hex(6)}")
        return SharedTransfer(name, epoch, memory, clock, new_lease)
    from headwater.engines.transfer.nixl import NixlTransfer
    from headwater.engines.transfer.port import HostMemory

    return await NixlTransfer(name, epoch, HostMemory(mib << 20), clock, new_lease).start()


def media_transfer(name: str, mib: int, transport: MediaTransport) -> OpenTransfer | None:
    """Opens the slab for decoded media of the actor `name`; None where they go through NATS. Raises `TransferUnavailable`."""
    if transport == "none":
        return None
    if transport == "nixl" and find_spec("nixl") is None:
        raise TransferUnavailable("NIXL is not installed: pip install headwater[nixl]")
    return partial(open_transfer, name, mib, transport)
