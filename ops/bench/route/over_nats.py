"""`headwater bench route`: round trip of a route query over NATS to the router."""

import asyncio
import time

import msgspec
import numpy as np

from headwater.actors.runtime.tables import CardTable
from headwater.ops.bench.fleet import running
from headwater.ops.bench.report import Measure, Report, cpu_seconds, percentile
from headwater.ops.nats.open_ports import open_ports
from headwater.schemas import hashing, subjects
from headwater.schemas.events.route import RouteQuery

RATE = 500
SECONDS = 4
BLOCKS = 64
WORKERS = 2


async def bench() -> Report:
    """500 queries of 64 blocks per second for four seconds, sent on schedule independently of replies (open loop).

    No worker accepts these decisions, so they accumulate unlike in a real fleet, which limits the duration.
    """
    async with running(WORKERS) as fleet, open_ports(fleet.nats.url, "default", "bench") as ports:
        subject = subjects.route_query("default", (await CardTable(ports.cards).pools())[0])
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
        {"rate": f"{RATE}/s for {SECONDS} s", "blocks a query": BLOCKS, "workers": WORKERS},
        [
            Measure("latency p50", percentile(delays, 0.5) * 1000, "ms"),
            Measure("latency p99", percentile(delays, 0.99) * 1000, "ms"),
            Measure("router CPU per 1,000 queries", cpu_s / len(delays) * 1000, "s"),
        ],
    )
