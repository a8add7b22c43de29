"""Every process is restarted in turn under continuous requests, and none of these fails.

python -m tests.faults.kills.rolling_restart --requests 10000
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from itertools import count
from pathlib import Path
from typing import NamedTuple

import httpx

from tests.faults.answers import PACE, Answer, client_of, expected, request_body, settle, start, under_way
from tests.faults.report import Report, Violation, command
from tests.support.processes.restarted import (
    KeptProcess,
    kept_edge,
    kept_router,
    kept_worker,
    until_healthy,
    until_ready,
)
from tests.support.servers.nats import NatsServer

EDGES, ROUTERS, WORKERS = 2, 2, 2
READY = {"edge": EDGES, "router": ROUTERS, "worker": WORKERS}
TOKENS = 16
TRIES_MAX = 200
RETRY_S = 0.1
SLOWEST_S_MAX = 10.0
"""A request finds another place at once, whoever drains; only nats-server's restart may hold it for some seconds."""

STALLED_S_MAX = 20.0
"""A stream without a token for so long is given up."""

DRAIN_S = 30.0
"""Longer than any answer of the test lasts."""


class Balancer:
    """A client in front of the edges: takes the next one where a connection is refused or broken before any byte."""

    def __init__(self, clients: list[httpx.AsyncClient]) -> None:
        self._clients = clients
        self._numbers = count()
        self.retries = 0
        self.done = 0
        self.slowest_s = 0.0
        self.problems: list[str] = []

    async def ask(self) -> None:
        """One request; what is wrong with it is kept."""
        number = next(self._numbers)
        began = time.monotonic()
        for attempt in range(TRIES_MAX):
            client = self._clients[(number + attempt) % len(self._clients)]
            try:
                answer = await client.post("/v1/completions", json=request_body(number % 97, TOKENS))
                break
            except (httpx.ConnectError, httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError):
                # The answer comes in one piece, so no byte of it was seen.
                self.retries += 1
                if attempt >= len(self._clients):
                    await asyncio.sleep(RETRY_S)
        else:
            self.problems.append(f"request {number}: no edge took the connection in {TRIES_MAX} tries")
            return
        took_s = time.monotonic() - began
        self.done += 1
        self.slowest_s = max(self.slowest_s, took_s)
        if answer.status_code != 200:
            at = client.base_url
            self.problems.append(
                f"request {number} at {at}: {answer.status_code} in {took_s:.1f} s: {answer.text[:300]}"
            )
        elif answer.json()["choices"][0]["text"] != expected(number % 97, TOKENS):
            self.problems.append(f"request {number}: another answer: {answer.text[:300]}")


class Plan(NamedTuple):
    """What is restarted, by name, and how."""

    name: str
    restart: Callable[[], Awaitable[None]]


async def rolling_restart(
    folder: Path, *, requests: int, answer_s: float, concurrency: int = 8, pause_s: float = 0.0
) -> Report:
    """Restart everything beside streams of `answer_s` and at least so many requests.

    `pause_s`: how long each of `concurrency` clients rests after an answer.
    """
    began = time.monotonic()
    async with AsyncExitStack() as stack:
        server = NatsServer(folder / "nats")
        await server.start()
        stack.callback(server.stop)
        enter = stack.enter_async_context
        workers = [await enter(kept_worker(folder, server.url, f"w{n}")) for n in range(WORKERS)]
        routers = [await enter(kept_router(folder, server.url, f"r{n}")) for n in range(ROUTERS)]
        drain = ("--drain-timeout", f"{DRAIN_S:.0f}")
        edges = [await enter(kept_edge(folder, server.url, f"e{n}", *drain)) for n in range(EDGES)]
        await until_ready(server.url, READY, within_s=90)
        clients = [await enter(client_of(url)) for _, url in edges]
        for _, url in edges:
            await until_healthy(url, workers=WORKERS)
        balancer = Balancer(clients)
        plans = [Plan(worker.name, _worker(server, worker)) for worker in workers]
        plans += [Plan(router.name, _process(server, router)) for router in routers]
        plans += [Plan(edge.name, _process(server, edge, url)) for edge, url in edges]
        plans.append(Plan("nats-server", _server(server, [url for _, url in edges])))
        rolled = asyncio.Event()
        streams: list[Answer] = []
        steps: list[tuple[str, str]] = []
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(_ask_on(balancer, rolled, requests, pause_s))
            for plan in plans:
                # Each restart meets streams that began before it and end after it.
                fresh = start(clients[0], 2, int(answer_s * PACE), first_seed=len(streams))
                await under_way(fresh)
                streams += fresh
                started = time.monotonic()
                await plan.restart()
                steps.append((f"{plan.name} again", f"{time.monotonic() - started:.1f} s"))
            rolled.set()
        problems = await settle(streams, stalled_s=STALLED_S_MAX)
    failed = balancer.problems
    violations = [Violation("stream", 1, problem) for problem in problems]
    violations += [Violation("request", len(failed), "; ".join(failed[:3]))] if failed else []
    if balancer.slowest_s > SLOWEST_S_MAX:
        violations.append(Violation("slowest request", 1, f"{balancer.slowest_s:.2f} s"))
    lines = [
        ("requests", f"{balancer.done}, {balancer.retries} connections refused or broken and tried again"),
        ("slowest", f"{balancer.slowest_s:.2f} s"),
        ("streams", f"{len(streams)} of {int(answer_s * PACE)} tokens"),
        *steps,
        ("duration", f"{time.monotonic() - began:.0f} s"),
    ]
    return Report("rolling restart of every process", lines, violations)


async def _ask_on(balancer: Balancer, rolled: asyncio.Event, requests: int, pause_s: float) -> None:
    while not rolled.is_set() or balancer.done + len(balancer.problems) < requests:
        await balancer.ask()
        await asyncio.sleep(pause_s)


def _process(server: NatsServer, process: KeptProcess, url: str = "") -> Callable[[], Awaitable[None]]:
    """SIGTERM, and the next life is ready."""

    async def restart() -> None:
        await process.restart()
        await until_ready(server.url, READY, within_s=90)
        if url:
            await until_healthy(url, workers=WORKERS)

    return restart


def _worker(server: NatsServer, worker: KeptProcess) -> Callable[[], Awaitable[None]]:
    """`ctl drain`, then SIGTERM."""

    async def restart() -> None:
        await worker.run_beside("ctl", worker.name, "drain", "--nats", server.url)
        await _process(server, worker)()

    return restart


def _server(server: NatsServer, urls: list[str]) -> Callable[[], Awaitable[None]]:
    """An orderly stop and a start on the same store."""

    async def restart() -> None:
        await asyncio.to_thread(server.stop)
        await server.restart()
        await until_ready(server.url, READY, within_s=90)
        for url in urls:
            await until_healthy(url, workers=WORKERS)

    return restart


def main() -> int:
    """The long form."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000, help="at least so many")
    parser.add_argument(
        "--answer-seconds", type=float, default=20.0, help="length of the streams beside them"
    )
    given = parser.parse_args()
    return command(
        lambda folder: rolling_restart(folder, requests=given.requests, answer_s=given.answer_seconds)
    )


if __name__ == "__main__":
    sys.exit(main())
