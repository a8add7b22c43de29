"""The three NATS servers of a fleet are replaced one by one by others with an empty store, under requests and streams of which none fails.

python -m tests.faults.upgrades.servers_replaced
"""

import argparse
import asyncio
import shutil
import sys
import time
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from headwater.events.jetstream import connect
from headwater.events.jetstream.streams import stream_names
from tests.faults.answers import PACE, client_of, settle, start, under_way
from tests.faults.kills.rolling_restart import SLOWEST_S_MAX, STALLED_S_MAX, Balancer
from tests.faults.report import Report, Violation, command
from tests.support.processes.fleet import fleet
from tests.support.servers.nats_cluster import NatsCluster

GAP_S_MAX = 3.0
"""Tokens do not go through a stream: only the connections to the server that ends are made anew."""


async def servers_replaced(
    folder: Path, *, emptied: bool, concurrency: int = 4, answer_s: float = 8.0
) -> Report:
    """Each server once: an orderly stop, and a start on its store, or on none where it is `emptied`; the next one once all replicas are current."""
    began, steps, streams = time.monotonic(), [], []
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(NatsCluster(folder))
        admin = await connect(cluster.url, "test")
        stack.push_async_callback(admin.close)
        await cluster.until_ready(admin)
        place = folder / "fleet"
        place.mkdir()
        wanted = ("--engine", "sim", "--workers", "2", "--nats", cluster.url, "--replicas", "3")
        up = await stack.enter_async_context(fleet(place, *wanted, ready_s=90))
        client = await stack.enter_async_context(client_of(up.url))
        balancer, ended = Balancer([client]), asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(_ask_on(balancer, ended))
            for number, server in enumerate(cluster.servers):
                fresh = start(client, 2, int(answer_s * PACE), first_seed=10 * number)
                await under_way(fresh)
                streams += fresh
                at = time.monotonic()
                await asyncio.to_thread(server.stop)
                if emptied:
                    shutil.rmtree(server.folder / "jetstream")
                await server.restart()
                for stream in await stream_names(admin, ""):
                    await cluster.until_current(admin, stream)
                steps.append((f"server {number} replaced", f"{time.monotonic() - at:.1f} s"))
            ended.set()
        problems = await settle(streams, stalled_s=STALLED_S_MAX)
    violations = [Violation("stream", len(problems), problems[0])] if problems else []
    failed = balancer.problems
    violations += [Violation("request", len(failed), "; ".join(failed[:3]))] if failed else []
    if balancer.slowest_s > SLOWEST_S_MAX:
        violations.append(Violation("slowest request", 1, f"{balancer.slowest_s:.2f} s"))
    gap_s = max(answer.gap_s for answer in streams)
    if gap_s > GAP_S_MAX:
        violations.append(Violation("token gap", 1, f"{gap_s:.2f} s"))
    lines = [
        ("requests", f"{balancer.done}, {balancer.retries} tried again"),
        ("slowest", f"{balancer.slowest_s:.2f} s"),
        ("streams", f"{len(streams)} of {int(answer_s * PACE)} tokens, longest gap {gap_s:.2f} s"),
        *steps,
        ("duration", f"{time.monotonic() - began:.0f} s"),
    ]
    store = "with empty stores" if emptied else "on their stores"
    return Report(f"three NATS servers replaced one by one, {store}", lines, violations)


async def _ask_on(balancer: Balancer, ended: asyncio.Event) -> None:
    while not ended.is_set():
        await balancer.ask()
        await asyncio.sleep(0.05)


def main() -> int:
    """Both ways."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    return max(command(partial(servers_replaced, emptied=emptied)) for emptied in (False, True))


if __name__ == "__main__":
    sys.exit(main())
