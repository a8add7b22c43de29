"""Three servers, every stream on all of them; whoever leads the pool log is killed again and again under load.

python -m tests.durability.leader_kills --minutes 10 --rate 2000 --period 10
"""

import argparse
import asyncio
import sys
import time
from array import array
from contextlib import AsyncExitStack
from pathlib import Path

from headwater.actors.runtime.actor import cancel_all
from headwater.events.jetstream import JetStreamLog, connect
from headwater.events.jetstream.streams import ensure_pool
from tests.durability.history import check
from tests.durability.workload import (
    NS,
    POOL,
    STREAM,
    Client,
    Follower,
    pause,
    percentile,
    read_content,
    settle,
)
from tests.faults.report import Report, Violation, command
from tests.support.ports.waiting import eventually
from tests.support.servers.nats_cluster import NatsCluster

WRITERS = 4
DOWN_S = 2.0
"""How long a killed server stays away: the others have to elect without it."""

PENDING_S_MAX = 15.0
"""So long after the last kill everything offered is stored."""

LATENCY_P99_S_MAX = 5.0
LATENCY_S_MAX = 12.0
"""An election takes 4 to 9 s; these are promises of the design about how long an append waits for one."""


async def leader_kills(
    folder: Path, *, kills: int, rate: float, period_s: float, progress: bool = False
) -> Report:
    """Kill the leader every `period_s` at `rate` events a second over all writers."""
    began = time.monotonic()
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(NatsCluster(folder))
        connections = []
        for number in range(WRITERS + 2):
            connections.append(await connect(cluster.url, f"client {number}"))
            stack.push_async_callback(connections[-1].close)
        admin = connections[0]
        await cluster.until_ready(admin)
        await ensure_pool(admin, NS, POOL, replicas=3)
        await cluster.until_current(admin, STREAM)
        logs = [JetStreamLog(connection, STREAM) for connection in connections[1:]]
        follower = Follower(logs[-1])
        clients = [Client(log, f"w{number}", epoch=1) for number, log in enumerate(logs[:-1])]
        ready_s = time.monotonic() - began
        reading = asyncio.create_task(follower.run())
        appending = [asyncio.create_task(client.run()) for client in clients]
        offering = [asyncio.create_task(client.offer_at(rate / WRITERS)) for client in clients]
        tasks = [reading, *appending, *offering]
        leaders = []
        last_kill_s = time.monotonic()
        try:
            for number in range(kills):
                await pause(last_kill_s + period_s - time.monotonic(), tasks)
                leader = await cluster.leader(admin, STREAM)
                leaders.append(leader)
                last_kill_s = time.monotonic()
                leader.kill()
                await pause(DOWN_S, tasks)
                await leader.restart()
                if progress:
                    stored = sum(client.acknowledged for client in clients)
                    print(f"{number + 1} kills, {stored:,} acknowledged", file=sys.stderr, flush=True)
            await cancel_all(offering)
            stuck = await settle(clients, last_kill_s + PENDING_S_MAX - time.monotonic())
            settled_s = time.monotonic() - last_kill_s
            await cluster.until_current(admin, STREAM)
            content = await read_content(logs[-1])
            await eventually(lambda: follower.content.last >= content.last)
        finally:
            await cancel_all(tasks)
    violations = stuck + check([client.life for client in clients], content)
    if (follower.content.events, follower.content.violations()) != (content.events, content.violations()):
        violations.append(Violation("unread", 1, "a reader that followed was given another log"))
    lines = [
        ("leaders killed", f"{kills}, each {DOWN_S:.0f} s away"),
        ("leaders in turn", " ".join(f"n{cluster.servers.index(leader)}" for leader in leaders)),
        ("events acknowledged", f"{sum(client.acknowledged for client in clients):,} at {rate:.0f}/s"),
        ("messages stored", f"{content.messages:,}"),
        ("batches stored twice", f"{content.repeated_batches}"),
        *_latencies(clients),
        ("nothing pending after last kill", f"{settled_s:.1f} s"),
        ("cluster ready after", f"{ready_s:.1f} s"),
        ("duration", f"{time.monotonic() - began:.0f} s"),
    ]
    return Report("leader kills: three servers, R3, SIGKILL of the leader", lines, violations)


def _latencies(clients: list[Client]) -> list[tuple[str, str]]:
    """Lines about how long appends took."""
    latencies = array("d")
    for client in clients:
        latencies.extend(client.latencies_s)
    p50, p99, longest = percentile(latencies, 0.5), percentile(latencies, 0.99), max(latencies)
    return [
        ("append p50", f"{p50 * 1e3:.1f} ms"),
        ("append p99", f"{p99:.2f} s{_beyond(p99, LATENCY_P99_S_MAX)}"),
        ("append max", f"{longest:.2f} s{_beyond(longest, LATENCY_S_MAX)}"),
    ]


def _beyond(seconds: float, most: float) -> str:
    """Times are reported and not judged: how fast an election is depends on the machine."""
    return f" (more than the {most:.0f} s aimed for)" if seconds > most else ""


def main() -> int:
    """The long form."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--rate", type=float, default=2_000.0, help="events a second, all writers together")
    parser.add_argument("--period", type=float, default=10.0, help="seconds from kill to kill")
    given = parser.parse_args()
    kills = max(1, int(given.minutes * 60 / given.period))
    return command(
        lambda folder: leader_kills(
            folder, kills=kills, rate=given.rate, period_s=given.period, progress=True
        )
    )


if __name__ == "__main__":
    sys.exit(main())
