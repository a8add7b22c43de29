"""What the tests of the `TensorTransfer` contract share: an owner beside a reader, in one process or in two.

The owner of the NIXL case is a process of its own that does what it is told over a socket. It is a fork of one that has
imported NIXL, with which comes PyTorch: 2 s of processor time. Leases on either side run on clocks that a test moves by hand.
"""

import asyncio
import multiprocessing
import os
import pickle
import secrets
import signal
import socket
import struct
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from headwater.engines.transfer.local import LocalFabric, LocalTransfer, SharedMemory, SharedTransfer
from headwater.engines.transfer.nixl import NixlTransfer
from headwater.engines.transfer.port import HostMemory, PeerGone, Stats
from headwater.engines.transfer.slab import TensorTransfer
from headwater.ops.start.signals import die_with_parent
from headwater.schemas.media import (
    ClaimGranted,
    ClaimReply,
    LeaseId,
    NixlPlace,
    Offer,
    OfferClaim,
    OfferReleased,
)
from tests.support.ports.waiting import eventually
from tests.support.worlds.clock import SkippingClock

SLAB = 80 << 20
CLAIM_S, QUARANTINE_S = 5.0, 30.0
EPOCH = 3
LENGTH = struct.Struct("<I")

new_lease = partial(secrets.token_bytes, 16)

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["nixl._api", __name__])


def expected(seed: int, shape: tuple[int, ...], dtype: str) -> Any:
    """The tensor that an owner makes of a seed."""
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    data = np.random.default_rng(seed).bytes(nbytes)
    return np.frombuffer(data, np.uint8).view("uint8" if dtype == "bool" else dtype).reshape(shape)


class Host:
    """One side in its process: a transfer, its memory and its clock, and the harm that tests do to them."""

    def __init__(self, transfer: TensorTransfer, memory: HostMemory, clock: SkippingClock) -> None:
        self.transfer = transfer
        self.memory = memory
        self.clock = clock
        self._scribbling = threading.Event()
        self._scribbler: threading.Thread | None = None

    async def offer(self, seed: int, shape: tuple[int, ...], dtype: str, ttl_s: float) -> Offer:
        """Offer the tensor of a seed."""
        return await self.transfer.offer(expected(seed, shape, dtype), ttl_s=ttl_s)

    async def answer(self, claim: OfferClaim) -> ClaimReply:
        """As the port."""
        return self.transfer.answer(claim)

    async def released(self, message: OfferReleased) -> bool:
        """As the port."""
        return self.transfer.released(message)

    async def withdraw(self, lease: LeaseId) -> None:
        """As the port."""
        self.transfer.withdraw(lease)

    async def stats(self) -> Stats:
        """As the port."""
        return self.transfer.stats()

    async def advance(self, seconds: float) -> None:
        """Move the clock of the leases."""
        self.clock.now_s += seconds

    async def overwrite(self, offer: Offer) -> None:
        """Something else is written where the offer lies."""
        self._bytes(offer)[::4096] ^= 0xFF

    async def scribble(self, offer: Offer, on: bool) -> None:
        """Write there all the time, from another thread, until told to stop."""
        if not on:
            self._scribbling.clear()
            if self._scribbler is not None:
                # Its last write must not land in what is offered next.
                self._scribbler.join()
            return
        self._scribbling.set()
        there, writing = self._bytes(offer), threading.Event()

        def write() -> None:
            while self._scribbling.is_set():
                there[::64] += 1
                writing.set()

        self._scribbler = threading.Thread(target=write, daemon=True)
        self._scribbler.start()
        writing.wait()

    async def close(self) -> None:
        """As the port."""
        await self.transfer.close()

    async def kill(self) -> None:
        """Dies at once."""
        assert isinstance(self.transfer, LocalTransfer)
        self.transfer.kill()

    def _bytes(self, offer: Offer) -> Any:
        place = offer.place
        at = place.address - self.memory.address if isinstance(place, NixlPlace) else place.offset
        return self.memory.view(at, offer.nbytes)


class RemoteHost:
    """A `Host` in a process of its own: the same methods. A dead one raises `PeerGone`, as a bus would tell."""

    def __init__(
        self, process: BaseProcess, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._lock = asyncio.Lock()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        async def call(*args: Any) -> Any:
            # Who no longer waits for an answer must not leave it to the next.
            return await asyncio.shield(self._call(name, args))

        return call

    async def kill(self) -> None:
        """Kill -9, and wait until it is dead."""
        self.signal(signal.SIGKILL)
        await self.wait()

    async def wait(self) -> None:
        """Wait until it is dead."""
        await asyncio.to_thread(self._process.join)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    async def end(self) -> None:
        """Kill it unless it is dead, and close the connection."""
        if self._process.is_alive():
            await self.kill()
        self._process.close()
        self._writer.close()

    async def _call(self, name: str, args: tuple[Any, ...]) -> Any:
        try:
            async with self._lock:
                result = await _sent(self._reader, self._writer, (name, args))
        except (OSError, RuntimeError, asyncio.IncompleteReadError) as error:  # uvloop's is a RuntimeError
            raise PeerGone("the owner's process does not answer") from error
        if isinstance(result, Exception):
            raise result
        return result


class Wire:
    """The control messages of a reader, straight to the owner. `granted` runs between a grant and the reading.

    `read_within_ms`, where set, is the time that the reader is told instead of the owner's.
    """

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        self.read_within_ms: int | None = None
        self.claims: list[OfferClaim] = []
        self.outcomes: list[str] = []
        self.granted: Callable[[], Any] | None = None

    async def claim(self, offer: Offer, claim: OfferClaim) -> ClaimReply:
        """See `Control.claim`."""
        self.claims.append(claim)
        reply: ClaimReply = await self.owner.answer(claim)
        if isinstance(reply, ClaimGranted) and self.read_within_ms is not None:
            reply = msgspec.structs.replace(reply, read_within_ms=self.read_within_ms)
        if self.granted is not None:
            await self.granted()
        return reply

    async def release(self, offer: Offer, released: OfferReleased) -> None:
        """See `Control.release`."""
        self.outcomes.append(released.outcome)
        await self.owner.released(released)


class Case:
    """An owner and a reader that have not met yet. `is_nixl`: the owner is a process of its own."""

    def __init__(
        self, owner: Any, reader: Host, fabric: LocalFabric | None = None, *, is_nixl: bool = False
    ) -> None:
        self.owner = owner
        self.reader = reader
        self.wire = Wire(owner)
        self.fabric = fabric
        self.is_nixl = is_nixl

    async def read(self, offer: Offer, attempt: int = 1) -> Any:
        """Read, within a time that no reading in these tests needs."""
        async with asyncio.timeout(20):
            return await self.reader.transfer.read(offer, self.wire, attempt=attempt)

    async def advance(self, seconds: float, *, owner_lives: bool = True) -> None:
        """On both sides (which are on one clock where they are in one process)."""
        self.reader.clock.now_s += seconds
        if self.is_nixl and owner_lives:
            await self.owner.advance(seconds)

    async def nothing_is_lost(self, *, owner_lives: bool = True) -> None:
        """After everything that can be waited for, all bytes are free on both sides."""
        await self.advance(CLAIM_S + QUARANTINE_S + 1000.0, owner_lives=owner_lives)
        sides = [self.reader.transfer.stats(), *([await self.owner.stats()] if owner_lives else [])]
        for stats in sides:
            assert stats.free == stats.capacity, stats


class MakeCase(Protocol):
    """Makes a case with an owner of its own: slab bytes, and seconds from a claim to the quarantine."""

    def __call__(self, slab: int = SLAB, claim_s: float = CLAIM_S) -> AbstractAsyncContextManager[Case]:
        """A fresh one."""
        ...


@asynccontextmanager
async def local_case(slab: int = SLAB, claim_s: float = CLAIM_S) -> AsyncIterator[Case]:
    """Both in this process, on one clock."""
    clock = SkippingClock()
    fabric = LocalFabric(clock)
    hosts = []
    for name in ("owner", "reader"):
        memory = HostMemory(slab)
        times = {"claim_s": claim_s, "quarantine_s": QUARANTINE_S}
        hosts.append(
            Host(LocalTransfer(fabric, name, EPOCH, memory, clock, new_lease, **times), memory, clock)
        )
    yield Case(hosts[0], hosts[1], fabric)
    for host in hosts:
        await host.close()


@asynccontextmanager
async def shared_memory_case(slab: int = SLAB, claim_s: float = CLAIM_S) -> AsyncIterator[Case]:
    """Both in this process, which opens its own memory as another would."""
    clock = SkippingClock()
    hosts = []
    for name in ("owner", "reader"):
        memory = SharedMemory(slab, f"{name}.{secrets.token_hex(6)}")
        times = {"claim_s": claim_s, "quarantine_s": QUARANTINE_S}
        hosts.append(Host(SharedTransfer(name, EPOCH, memory, clock, new_lease, **times), memory, clock))
    yield Case(hosts[0], hosts[1])
    for host in hosts:
        await host.close()


@asynccontextmanager
async def nixl_case(slab: int = SLAB, claim_s: float = CLAIM_S) -> AsyncIterator[Case]:
    """The owner in a process of its own."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = _processes.Process(target=_own, args=(theirs, slab, claim_s), daemon=True)
        await asyncio.to_thread(process.start)
    owner = RemoteHost(process, *await asyncio.open_connection(sock=ours))
    before = listening()
    reader = await nixl_host("reader", slab, claim_s)
    assert listening() > before
    try:
        yield Case(owner, reader, is_nixl=True)
    finally:
        await reader.close()
        # Whatever the test still holds, its errors' tracebacks among it, the agent has ended, and on its own thread.
        await eventually(lambda: listening() <= before)
        await owner.end()


def listening() -> set[str]:
    """The TCP sockets on which this process listens, which here are those of NIXL's agents."""
    tables = [Path(f"/proc/self/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    listeners = {fields[9] for table in tables for fields in map(str.split, table) if fields[3] == "0A"}
    opened = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of this listing
            opened.add(os.readlink(f"/proc/self/fd/{number}").removeprefix("socket:[").removesuffix("]"))
    return listeners & opened


async def nixl_host(name: str, slab: int, claim_s: float) -> Host:
    """A side on NIXL, in this process."""
    memory, clock = HostMemory(slab), SkippingClock()
    times = {"claim_s": claim_s, "quarantine_s": QUARANTINE_S}
    transfer = NixlTransfer(name, EPOCH, memory, clock, new_lease, **times)
    return Host(await transfer.start(), memory, clock)


async def _sent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, value: Any) -> Any:
    """Send a value and return the one that answers it."""
    _write(writer, value)
    await writer.drain()
    return await _read(reader)


def _write(writer: asyncio.StreamWriter, value: Any) -> None:
    data = pickle.dumps(value)
    writer.write(LENGTH.pack(len(data)) + data)


async def _read(reader: asyncio.StreamReader) -> Any:
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    return pickle.loads(await reader.readexactly(length))


def _own(connection: socket.socket, slab: int, claim_s: float) -> None:
    """The owner's process."""
    die_with_parent()
    asyncio.run(_serve(connection, slab, claim_s))


async def _serve(connection: socket.socket, slab: int, claim_s: float) -> None:
    """Do what is told until the connection ends."""
    host = await nixl_host("owner", slab, claim_s)
    reader, writer = await asyncio.open_connection(sock=connection)
    while True:
        try:
            name, args = await _read(reader)
        except asyncio.IncompleteReadError:
            return
        try:
            result = await getattr(host, name)(*args)
        except Exception as error:
            result = error
        _write(writer, result)
        await writer.drain()
