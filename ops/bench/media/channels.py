"""`python -m headwater.ops.bench.media.channels`: decoded media from an edge's process to a worker's, by each way that a fleet has.

Through NATS in pieces of 1 MiB, four at a time; over NIXL; in shared memory. Each process runs the code of its actor (`MediaHolder`,
`MediaCache`), with a real server between them.
"""

import argparse
import asyncio
import multiprocessing
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import structlog

from headwater.actors.bus.core_nats import NatsBus
from headwater.actors.edge.clients.media import MediaHolder
from headwater.actors.runtime.offers import OfferAnswers
from headwater.actors.worker.serving.media import MediaCache
from headwater.engines.transfer.opening import media_transfer
from headwater.events.jetstream.connection import connect
from headwater.ops.bench.media.event_loop import LoopProbe
from headwater.ops.bench.report import machine
from headwater.ops.bench.servers import servers
from headwater.ops.process.text_table import table
from headwater.schemas import subjects
from headwater.schemas.messages.media import MediaTransport, PromptMedia

SIZES: Final = {
    "image 504 x 504": (504, 504, 3),
    "image 2048 x 2048": (2048, 2048, 3),
    "video 16 x 1008 x 1008": (16, 1008, 1008, 3),
}
WAYS: Final[dict[MediaTransport, str]] = {"none": "NATS", "nixl": "NIXL", "shared": "shared memory"}
REPEATS: Final = 15
NS: Final = "bench"
SLAB_MIB: Final = 128
"""Room for the largest item twice."""


class LoadRow(NamedTuple):
    """One size by one way: seconds of each load, and CPU ms of the edge's longest turn."""

    way: str
    what: str
    nbytes: int
    seconds: list[float]
    turn_ms: float


def edge(wire: Connection, url: str, way: MediaTransport) -> None:
    """The edge's process: holds every item until the pipe says stop, and reports its event loop's longest turn on request."""
    asyncio.run(_edge(wire, url, way))


async def _edge(wire: Connection, url: str, way: MediaTransport) -> None:
    bus = NatsBus(await connect(url, "bench-edge"))
    holder, answers = MediaHolder(bus), OfferAnswers(bus)
    opened = media_transfer("edge", SLAB_MIB, way)
    if opened is not None:
        holder.transfer = answers.transfer = await opened()
    await bus.subscribe(subjects.edge_media(NS, "edge"), holder.on_query)
    await bus.subscribe(subjects.edge_offer(NS, "edge"), answers.on_offer)
    items = [(name, np.random.default_rng(0).bytes(int(np.prod(shape)))) for name, shape in SIZES.items()]
    with holder.hold([(name, memoryview(data)) for name, data in items]):
        wire.send(None)
        while (command := await asyncio.to_thread(wire.recv)) is not None:
            assert command == "measure"
            async with LoopProbe() as probe:
                wire.send(None)
                await asyncio.to_thread(wire.recv)
            wire.send(probe.most_cpu_ms())
    await holder.close()
    await bus.close()


async def measure(url: str, way: MediaTransport) -> list[LoadRow]:
    """Load each size `REPEATS` times, as a worker that has none of them."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=edge, args=(theirs, url, way), daemon=True)
    process.start()
    await asyncio.to_thread(ours.recv)
    bus = NatsBus(await connect(url, "bench-worker"))
    opened = media_transfer("worker", SLAB_MIB, way)
    transfer = await opened() if opened is not None else None
    rows = []
    for name, shape in SIZES.items():
        item, seconds = PromptMedia("image", name, 0, 1, shape), []
        ours.send("measure")
        await asyncio.to_thread(ours.recv)
        for _ in range(1 + REPEATS):
            cache = MediaCache(bus, NS, bytes_max=0)
            cache.transfer = transfer
            began = time.perf_counter()
            [loaded] = await cache.load("edge", [item])
            seconds.append(time.perf_counter() - began)
            assert len(loaded.data) == item.size
        ours.send(None)
        rows.append(LoadRow(WAYS[way], name, item.size, seconds[1:], await asyncio.to_thread(ours.recv)))
    ours.send(None)
    await asyncio.to_thread(process.join)
    if transfer is not None:
        await transfer.close()
    await bus.close()
    return rows


async def run(ways: list[MediaTransport]) -> list[LoadRow]:
    """All ways, one after the other, with one server."""
    with tempfile.TemporaryDirectory() as folder:
        async with servers(Path(folder), 1) as url:
            return [row for way in ways for row in await measure(url, way)]


def main() -> None:
    """Print a table."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger("warning"))
    rows = asyncio.run(run(list(WAYS)))
    print(f"decoded media from an edge's process to a worker's, medians of {REPEATS}; machine {machine()}")
    heads = ("way", "what", "MB", "ms", "GB/s", "edge's longest turn, CPU ms")
    lines = []
    for row in rows:
        median = statistics.median(row.seconds)
        lines.append(
            (
                row.way,
                row.what,
                f"{row.nbytes / 1e6:.1f}",
                f"{median * 1000:.1f}",
                f"{row.nbytes / median / 1e9:.2f}",
                f"{row.turn_ms:.1f}",
            )
        )
    print(table(heads, lines))


if __name__ == "__main__":
    main()
