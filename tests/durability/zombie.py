"""Real engine workers that stand still past their lease, in the middle of writing, and then go on.

    python -m tests.durability.zombie --rounds 50

Another process of the same name takes over meanwhile. Whatever the old one then tries to append under its old
epoch has to be refused: in the log nothing of it may stand behind the first message of the new epoch.
"""

import argparse
import asyncio
import random
import signal
import sys
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

from headwater.actors.runtime.actor import cancel_all
from headwater.actors.runtime.lease import TTL_S
from headwater.events.jetstream import JetStreamLog, JetStreamTable, connect
from headwater.events.jetstream.streams import ensure_namespace
from headwater.schemas import subjects
from tests.durability.worker_pair import POOL, Wire, WorkerPair, ask_for_ever
from tests.durability.workload import NS, read_content
from tests.faults.report import Report, command
from tests.support.servers.nats import NatsServer

START_S = 120.0
NOTICE_S = 30.0
WRITING_MESSAGES = 5
"""A worker is stopped after it was seen to write so many messages of its epoch, at a random moment."""

JITTER_S = 0.5


async def zombies(
    folder: Path,
    *,
    waves: int,
    workers: int,
    leases: int = 3,
    seed: int = 1,
    until_late: bool = False,
    progress: bool = False,
) -> tuple[Report, int]:
    """`waves` times, or `until_late` until a zombie tried to write, stop `workers` workers at once, for so many leases and until each was taken over.

    Also returns how many tries of zombies were overheard: one that learns at once of its lost lease makes none.
    """
    dice = random.Random(seed)
    began = time.monotonic()
    async with AsyncExitStack() as stack:
        server = NatsServer(folder)
        await server.start()
        stack.callback(server.stop)
        client = await connect(server.url, "zombie test")
        stack.push_async_callback(client.close)
        await ensure_namespace(client, NS)
        table = JetStreamTable(client, subjects.lease_bucket(NS))
        wire = Wire()
        await wire.listen(client)
        pairs = []
        for number in range(workers):
            pairs.append(WorkerPair(f"w{number}"))
            stack.push_async_callback(pairs[-1].end)
            await pairs[-1].start(server.url, folder)
        asking = [asyncio.create_task(ask_for_ever(client, wire, pair.name, dice)) for pair in pairs]
        done = 0
        try:
            for wave in range(waves):
                async with asyncio.TaskGroup() as group:
                    for pair in pairs:
                        group.create_task(_one_round(pair, wire, table, dice, leases * TTL_S))
                done = wave + 1
                if progress:
                    print(f"wave {wave + 1}: {wire.late.total()} late tries", file=sys.stderr, flush=True)
                if until_late and wire.late.total():
                    break
        finally:
            await cancel_all(asking)
        content = await read_content(JetStreamLog(client, subjects.pool_stream(NS, POOL)))
    late = wire.late.total()
    lines = [
        ("zombies", f"{done * workers}: {done} waves of {workers}"),
        ("stood still", f"{leases} leases of {TTL_S} s each"),
        ("lives in the log", f"{len({(key.writer, key.epoch) for key in content.events})}"),
        ("messages stored", f"{content.messages:,}"),
        ("tries of a dead epoch", f"{late} ({_by_kind(wire)})"),
        ("duration", f"{time.monotonic() - began:.0f} s"),
    ]
    return Report("zombies: SIGSTOP past the lease, SIGCONT", lines, content.violations()), late


def _by_kind(wire: Wire) -> str:
    """How many tries of zombies were overheard, by the kind of their subject."""
    found = {
        kind: sum(count for subject, count in wire.late.items() if subjects.pool_kind(subject) == kind)
        for kind in subjects.POOL_KINDS
    }
    return f"kv {found['kv']}, load {found['load']}, fleet {found['fleet']}"


async def _one_round(
    pair: WorkerPair, wire: Wire, table: JetStreamTable, dice: random.Random, still_s: float
) -> None:
    """Stop the one that lives, let the other take over, wake the first, and wait until it knows."""

    def writing() -> bool:
        epoch = wire.joined.get(pair.name, 0)
        return wire.seen[pair.name, "kv", epoch] >= WRITING_MESSAGES

    await _until(f"{pair.name} writes", writing, pair, START_S)
    old, pid = wire.joined[pair.name], await pair.holder(table)
    losses = pair.losses(pid)
    await asyncio.sleep(dice.random() * JITTER_S)
    pair.signal(pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(still_s)
        await _until(f"{pair.name} was taken over", lambda: wire.joined[pair.name] > old, pair, NOTICE_S)
        await _until(f"{pair.name} writes again", writing, pair, NOTICE_S)
    finally:
        pair.signal(pid, signal.SIGCONT)
    await _until(f"the old {pair.name} knows", lambda: pair.losses(pid) > losses, pair, NOTICE_S)


async def _until(what: str, condition: Callable[[], bool], pair: WorkerPair, within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        if pair.died() or time.monotonic() > deadline:
            said = "\n".join(path.read_text()[-1500:] for path in pair.logs.values())
            raise AssertionError(f"never came true within {within_s:.0f} s: {what}\n{said}")
        await asyncio.sleep(0.02)


def main() -> int:
    """The long form."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50, help="zombies altogether")
    parser.add_argument("--workers", type=int, default=10, help="of which so many at a time")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()

    async def run(folder: Path) -> Report:
        waves = -(-given.rounds // given.workers)
        report, _ = await zombies(folder, waves=waves, workers=given.workers, seed=given.seed, progress=True)
        return report

    return command(run)


if __name__ == "__main__":
    sys.exit(main())
