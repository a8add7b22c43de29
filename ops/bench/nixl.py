"""`headwater bench nixl`: a tensor of 64 MiB from one process to another on this machine, over NIXL."""

import asyncio
import multiprocessing
import secrets
import statistics
import time
from collections.abc import Awaitable, Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from headwater.engines.transfer.nixl import NixlTransfer
from headwater.engines.transfer.port import HostMemory, TransferError
from headwater.ops.bench.report import Measure, Report, cpu_seconds
from headwater.schemas.clock import SystemClock
from headwater.schemas.media import ClaimReply, Offer, OfferClaim, OfferReleased

MIB = 1 << 20
NBYTES = 64 * MIB
SLAB = 2 * NBYTES
REPEATS = 30
IDLE_S = 2.0
LARGE = NBYTES / 1e9
"""GB of a tensor; GB/s are 10^9 bytes a second."""


class Unchecked(HostMemory):
    """The same memory without checksums, for comparison."""

    def put(self, offset: int, array: Any) -> int:
        """See `Memory.put`."""
        np.copyto(self.view(offset, array.nbytes), array)
        return 0

    def get(self, offset: int, offer: Offer) -> tuple[Any, int]:
        """See `Memory.get`."""
        return self.view(offset, offer.nbytes).copy(), offer.checksum

    def lend(self, offset: int, offer: Offer) -> tuple[Any, int]:
        """See `Memory.lend`."""
        return self.view(offset, offer.nbytes), offer.checksum


async def started(owner: str, checked: bool) -> NixlTransfer:
    """One side."""
    memory = (HostMemory if checked else Unchecked)(SLAB)
    transfer = NixlTransfer(owner, 1, memory, SystemClock(), partial(secrets.token_bytes, 16))
    return await transfer.start()


def owner(wire: Connection, checked: bool) -> None:
    """The other process: offers, answers and releases on request."""
    asyncio.run(_owner(wire, checked))


async def _owner(wire: Connection, checked: bool) -> None:
    try:
        transfer = await started("owner", checked)
    except TransferError as error:
        wire.send(error)
        return
    array = np.random.default_rng(0).integers(0, 256, NBYTES, dtype=np.uint8)
    wire.send(None)
    while (command := await asyncio.to_thread(wire.recv)) is not None:
        match command:
            case int(nbytes):
                began = time.perf_counter()
                offer = await transfer.offer(array[:nbytes], ttl_s=60.0)
                wire.send((offer, time.perf_counter() - began))
            case OfferClaim():
                wire.send(transfer.answer(command))
            case OfferReleased():
                transfer.released(command)
    await transfer.close()


class Wire:
    """The control messages, over a pipe."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe

    async def request(self, message: Any) -> Any:
        """Send one message and return its reply."""
        self.pipe.send(message)
        return await asyncio.to_thread(self.pipe.recv)

    async def claim(self, offer: Offer, claim: OfferClaim) -> ClaimReply:
        """See `Control.claim`."""
        reply: ClaimReply = await self.request(claim)
        return reply

    async def release(self, offer: Offer, released: OfferReleased) -> None:
        """See `Control.release`."""
        self.pipe.send(released)


class TransferRun:
    """Two processes that are not yet connected."""

    def __init__(self, reader: NixlTransfer, wire: Wire, pid: int) -> None:
        self.reader = reader
        self.wire = wire
        self.pid = pid

    async def once(self, nbytes: int, *, borrow: bool = False) -> tuple[float, float]:
        """Seconds to offer a tensor of this many bytes, and from its offer to the verified array here."""
        offer, offered_s = await self.wire.request(nbytes)
        began = time.perf_counter()
        if borrow:
            async with self.reader.borrow(offer, self.wire):
                return offered_s, time.perf_counter() - began
        array = await self.reader.read(offer, self.wire)
        read_s = time.perf_counter() - began
        assert array.nbytes == nbytes
        return offered_s, read_s

    async def many(self, nbytes: int, *, borrow: bool = False) -> tuple[float, float]:
        """Medians of both."""
        runs = [await self.once(nbytes, borrow=borrow) for _ in range(REPEATS)]
        return statistics.median(run[0] for run in runs), statistics.median(run[1] for run in runs)


async def between_two(
    checked: bool, work: Callable[[TransferRun], Awaitable[list[Measure]]]
) -> list[Measure]:
    """TransferRun with an owner in a process of its own. Raises `TransferUnavailable`."""
    context = multiprocessing.get_context("spawn")
    reader_end, owner_end = context.Pipe()
    process = context.Process(target=owner, args=(owner_end, checked), daemon=True)
    process.start()
    owner_end.close()
    reader = await started("reader", checked)
    try:
        failed = await asyncio.to_thread(reader_end.recv)
        if failed:
            raise failed
        assert process.pid is not None
        measures = await work(TransferRun(reader, Wire(reader_end), process.pid))
        reader_end.send(None)
        return measures
    finally:
        await reader.close()
        process.join(5.0)
        process.kill()


async def with_checksums(run: TransferRun) -> list[Measure]:
    """First and later reads, large and small ones, and the cost of an idle owner."""
    _, first_s = await run.once(NBYTES, borrow=True)
    offered_s, read_s = await run.many(NBYTES)
    _, borrowed_s = await run.many(NBYTES, borrow=True)
    _, mib_s = await run.many(MIB)
    began, cpu = time.perf_counter(), cpu_seconds(run.pid)
    await asyncio.sleep(IDLE_S)
    idle = (cpu_seconds(run.pid) - cpu) / (time.perf_counter() - began)
    return [
        Measure("first read, connecting, without a copy", LARGE / first_s, "GB/s"),
        Measure("read, without a copy", LARGE / borrowed_s, "GB/s", "at least 1"),
        Measure("read, to an array of its own", LARGE / read_s, "GB/s", "at least 1"),
        Measure("offer: copy and checksum", LARGE / offered_s, "GB/s"),
        Measure("offer and read without a copy", LARGE / (offered_s + borrowed_s), "GB/s", "at least 1"),
        Measure("first read, connecting, without a copy", first_s * 1000, "ms"),
        Measure("read of 1 MiB", mib_s * 1000, "ms"),
        Measure("CPU of an idle owner", idle * 100, "% of a core"),
    ]


async def without_checksums(run: TransferRun) -> list[Measure]:
    """The same without checksums: an overwritten buffer would not be detected."""
    _, first_s = await run.once(NBYTES, borrow=True)
    offered_s, read_s = await run.many(NBYTES)
    _, borrowed_s = await run.many(NBYTES, borrow=True)
    return [
        Measure("unchecked: first read, connecting, without a copy", LARGE / first_s, "GB/s"),
        Measure("unchecked: read, without a copy", LARGE / borrowed_s, "GB/s"),
        Measure("unchecked: read, to an array of its own", LARGE / read_s, "GB/s"),
        Measure("unchecked: offer and read without a copy", LARGE / (offered_s + borrowed_s), "GB/s"),
    ]


async def bench() -> Report:
    """64 MiB of random bytes in host memory. Raises `TransferUnavailable` without NIXL."""
    measures = await between_two(True, with_checksums) + await between_two(False, without_checksums)
    conditions = {"bytes": NBYTES, "repeats": REPEATS, "memory": "DRAM", "processes": "2 on one machine"}
    return Report("nixl", conditions, measures)
