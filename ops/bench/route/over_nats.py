"""`headwater bench route`: round trip of a route query over NATS to the router."""

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import numpy as np

from headwater.actors.runtime.ports import Ports
from headwater.actors.runtime.tables import CardTable
from headwater.ops.bench.fleet import running
from headwater.ops.bench.report import Measure, Report, cpu_seconds, percentile
from headwater.ops.bench.route.worker_host import NAME
from headwater.ops.nats.open_ports import open_ports
from headwater.schemas import hashing, subjects
from headwater.schemas.events.fleet import WorkerJoined
from headwater.schemas.events.route import RouteQuery

RATE = 500
SECONDS = 4
BLOCKS = 64
WORKERS = 2
NAMESPACE = "default"
JOINED_S = 120.0
"""How long further workers may take to join."""


async def bench(workers: int = WORKERS) -> Report:
    """500 queries of 64 blocks per second for four seconds, sent on schedule independently of replies (open loop).

    Of the `workers`, those beyond two share one process. No worker accepts these decisions, so they accumulate unlike in a real
    fleet, which limits the duration.
    """
    async with (
        running(min(workers, WORKERS)) as fleet,
        open_ports(fleet.nats.url, NAMESPACE, "bench") as ports,
        hosted(fleet.nats.url, ports, max(0, workers - WORKERS)),
    ):
        subject = subjects.route_query(NAMESPACE, (await CardTable(ports.cards).pools())[0])
        encode = msgspec.msgpack.Encoder().encode
        tokens = np.random.default_rng(0).integers(0, 256, (100, BLOCKS * 16), dtype=np.uint32)
        hashes = [hashing.pack_hashes(hashing.sequence_hashes(row, 16)) for row in tokens]
        loop = asyncio.get_running_loop()
        delays: list[float] = []

        async def ask(number: int) -> None:
            query = RouteQuery(f"bench-{number}", BLOCKS * 16, 16, hashes[number % len(hashes)])
            began = time.perf_counter()
            await ports.bus.request(subject, encode(query), timeout_s=5.0)
            delays.append(time.perf_counter() - began)

        for number in range(200):
            await ask(number)
        delays.clear()
        pid = fleet.pid("router")
        cpu = cpu_seconds(pid)
        began = loop.time()
        tasks = []
        for number in range(RATE * SECONDS):
            await asyncio.sleep(max(0.0, began + number / RATE - loop.time()))
            tasks.append(asyncio.ensure_future(ask(number)))
        await asyncio.gather(*tasks)
        cpu_s = cpu_seconds(pid) - cpu
    return Report(
        "route",
        {"rate": f"{RATE}/s for {SECONDS} s", "blocks a query": BLOCKS, "workers": workers},
        [
            Measure("latency p50", percentile(delays, 0.5) * 1000, "ms"),
            Measure("latency p99", percentile(delays, 0.99) * 1000, "ms"),
            Measure("router CPU per 1,000 queries", cpu_s / len(delays) * 1000, "s"),
        ],
    )


@asynccontextmanager
async def hosted(url: str, ports: Ports, count: int) -> AsyncIterator[None]:
    """So many further workers in a process of their own, all of which have joined."""
    if not count:
        yield
        return
    arguments = ("-m", "headwater.ops.bench.route.worker_host", url, NAMESPACE, str(count))
    process = await asyncio.create_subprocess_exec(sys.executable, *arguments)
    try:
        ended = asyncio.create_task(process.wait())
        joining = asyncio.create_task(_until_joined(ports, count))
        async with asyncio.timeout(JOINED_S):
            await asyncio.wait({ended, joining}, return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            joining.cancel()
            raise RuntimeError(
                f"the process of further workers ended with {ended.result()} before they had joined"
            )
        yield
    finally:
        # Draining hundreds of workers takes minutes, and their server ends with them.
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _until_joined(ports: Ports, count: int) -> None:
    """Wait until so many hosted workers have joined the only pool."""
    pool = (await CardTable(ports.cards).pools())[0]
    log = await ports.pool_log(pool)
    seen: set[str] = set()
    async for piece in log.read(0, follow=True):
        for record in piece.records:
            seen.update(
                event.worker
                for event in record.batch.events
                if isinstance(event, WorkerJoined) and event.worker.startswith(NAME)
            )
        if len(seen) == count:
            return
