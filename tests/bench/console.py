"""How fast a console shows a long log: `python -m tests.bench.console URL NAMESPACE [--pool P]`, on a log such as `tests.bench.large_log` writes.

Prints the time to read the history, its memory, and for steps of the slider to random and to neighbouring positions the times of the
views that a page asks for. Each step is measured alone, in this process, against the server at URL.
"""

import argparse
import asyncio
import random
import resource
import sys
import time
from collections.abc import Awaitable, Callable

from headwater.engines.process import collect_rarely, freeze_heap
from headwater.ops.bench.report import machine
from headwater.ops.console import prefixes, rates, records, requests, views
from headwater.ops.console.query import Query
from headwater.ops.history.history import History
from headwater.ops.nats.server import open_ports

STEPS = 60


async def measure(name: str, positions: list[int], show: Callable[[int], Awaitable[object]]) -> None:
    """The times of one view at each of some positions."""
    times = []
    for position in positions:
        began = time.perf_counter()
        await show(position)
        times.append(1_000 * (time.perf_counter() - began))
    times.sort()
    print(
        f"{name:<44} p50 {times[len(times) // 2]:7.1f} ms   p95 {times[int(0.95 * len(times))]:7.1f} ms   max {times[-1]:7.1f} ms"
    )


async def main(url: str, ns: str, pool: str, whole: int) -> int:
    """Measure and print."""
    print(machine())
    # As in the process.
    freeze_heap()
    collect_rarely()
    async with open_ports(url, ns, "bench-console") as ports:
        history = History(ports, pool, await ports.pool_log(pool))
        began, cpu = time.perf_counter(), time.process_time()
        await history.open()
        await history.follow()
        taken, spent = time.perf_counter() - began, time.process_time() - cpu
        rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(
            f"log: {history.last.position:,} messages, {len(history.fleet.loads.workers)} workers, "
            f"{len(history.requests.rows):,} requests kept; history read in {taken:.1f} s ({spent:.1f} s of CPU), "
            f"{len(history.fleet.rungs)} kept states of {history.fleet.bytes / 1e6:.0f} MB, {rss:.0f} MiB of memory"
        )
        draw = random.Random(1)
        first, last = history.indexed_from, history.last.position
        anywhere = [draw.randrange(first, last) for _ in range(STEPS)]
        start = draw.randrange(first, last - STEPS)

        def at(position: int, **more: object) -> Query:
            return Query({"at": str(position), **{name: str(value) for name, value in more.items()}})

        await measure("fleet, any position", anywhere, lambda p: views.fleet_view(history, at(p)))
        neighbours = list(range(start, start + STEPS))
        await measure("fleet, the next position", neighbours, lambda p: views.fleet_view(history, at(p)))
        await measure("lanes, any position", anywhere, lambda p: views.lanes_view(history, at(p)))
        await measure(
            "rates, any position", anywhere, lambda p: rates.series_view(history, at(p), tenants=True)
        )
        await measure("requests, any position", anywhere, lambda p: requests.requests_view(history, at(p)))
        await measure(
            "events, any position", anywhere, lambda p: records.events_view(history, at(p), contents=False)
        )
        rows = [history.requests.rows[draw.randrange(len(history.requests.rows))] for _ in range(STEPS)]
        by_number = dict(enumerate(rows))
        await measure(
            "one request",
            list(by_number),
            lambda n: requests.request_view(history, Query({"id": by_number[n].id}), contents=False),
        )
        if whole:
            await measure(
                "prefix tree, any position", anywhere[:whole], lambda p: prefixes.tree_view(history, at(p))
            )
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("namespace")
    parser.add_argument("--pool", default="p")
    parser.add_argument("--whole", type=int, default=5, help="steps of views that need KV events")
    given = parser.parse_args()
    sys.exit(asyncio.run(main(given.url, given.namespace, given.pool, given.whole)))
