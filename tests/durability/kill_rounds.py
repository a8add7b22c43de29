"""One server with a file store, killed and started again at random moments under writers at full speed.

python -m tests.durability.kill_rounds --rounds 200 --events 1000000
"""

import argparse
import asyncio
import random
import sys
import time
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from headwater.actors.runtime.actor import cancel_all
from headwater.events.jetstream import JetStreamLog, connect
from headwater.events.jetstream.streams import ensure_pool
from tests.durability.history import check
from tests.durability.workload import NS, POOL, STREAM, Client, Follower, read_content, settle, until
from tests.faults.report import Report, Violation, command
from tests.support.ports.waiting import eventually
from tests.support.servers.nats import NatsServer

WRITERS = 4
SETTLE_S = 60.0
JITTER_S = 0.02
"""A kill comes up to so long after its number of events, so that it meets every state of an append."""


async def kill_rounds(
    folder: Path, *, rounds: int, events: int, seed: int = 1, progress: bool = False
) -> Report:
    """Kill `rounds` times, about evenly over `events` acknowledged events; then hold the log to its word."""
    dice = random.Random(seed)
    began = time.monotonic()
    async with AsyncExitStack() as stack:
        server = NatsServer(folder)
        await server.start()
        stack.callback(server.stop)
        logs = []
        for number in range(WRITERS + 1):
            client = await connect(server.url, f"client {number}")
            stack.push_async_callback(client.close)
            if not number:
                await ensure_pool(client, NS, POOL)
            logs.append(JetStreamLog(client, STREAM))
        follower = Follower(logs[-1])
        clients = [Client(log, f"w{number}", epoch=1) for number, log in enumerate(logs[:-1])]
        reading = asyncio.create_task(follower.run())
        appending = [asyncio.create_task(client.run()) for client in clients]
        offering = [asyncio.create_task(client.offer_as_acknowledged(dice)) for client in clients]
        tasks = [reading, *appending, *offering]
        try:
            for number in range(rounds):
                # On the mean half a step short of the next mark: the last kill is inside the run.
                mark = int((number + dice.random()) * events / rounds)
                await until(partial(_reached, clients, mark), tasks)
                await asyncio.sleep(dice.random() * JITTER_S)
                server.kill()
                await server.restart()
                if progress and number % 10 == 9:
                    print(
                        f"{number + 1} kills, {_acknowledged(clients):,} acknowledged",
                        file=sys.stderr,
                        flush=True,
                    )
            await until(partial(_reached, clients, events), tasks)
            await cancel_all(offering)
            stuck = await settle(clients, SETTLE_S)
            content = await read_content(logs[-1])
            await eventually(lambda: follower.content.last >= content.last, within_s=SETTLE_S)
        finally:
            await cancel_all(tasks)
    violations = stuck + check([client.life for client in clients], content)
    if (follower.content.events, follower.content.violations()) != (content.events, content.violations()):
        violations.append(Violation("unread", 1, "a reader that followed was given another log"))
    took = time.monotonic() - began
    lines = [
        ("kills", f"{rounds}"),
        ("events acknowledged", f"{_acknowledged(clients):,}"),
        ("messages stored", f"{content.messages:,}"),
        ("batches stored twice", f"{content.repeated_batches}"),
        ("writers", f"{WRITERS}"),
        ("longest append", f"{max(max(client.latencies_s) for client in clients):.2f} s"),
        ("duration", f"{took:.0f} s"),
    ]
    return Report("kill rounds: one server, SIGKILL and restart", lines, violations)


def _acknowledged(clients: list[Client]) -> int:
    return sum(client.acknowledged for client in clients)


def _reached(clients: list[Client], events: int) -> bool:
    return _acknowledged(clients) >= events


def main() -> int:
    """The long form."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    return command(
        lambda folder: kill_rounds(
            folder, rounds=given.rounds, events=given.events, seed=given.seed, progress=True
        )
    )


if __name__ == "__main__":
    sys.exit(main())
