"""A fleet of one release becomes one of another and goes back, process by process, under requests and streams of which none fails.

The other way round stands for an upgrade in the wrong order, and for its reversal: every mixture of the two is met.

python -m tests.faults.upgrades.rolling_upgrade
"""

import argparse
import asyncio
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path

import httpx

from headwater.ops.start.sockets import free_port
from tests.faults.answers import PACE, Answer, client_of, settle, start, under_way
from tests.faults.kills.rolling_restart import DRAIN_S, READY, SLOWEST_S_MAX, STALLED_S_MAX, WORKERS, Balancer
from tests.faults.report import Report, Violation, command
from tests.faults.upgrades.releases import BEFORE, Process, Release, build, run, running
from tests.support.processes.restarted import until_healthy, until_ready
from tests.support.servers.nats import NatsServer

KINDS = ("router", "edge", "engine")
"""The order of an upgrade."""


class Fleet:
    """The processes of a fleet by kind and name, and its edges' URLs."""

    def __init__(self, server: NatsServer, stack: AsyncExitStack, folder: Path) -> None:
        self._server = server
        self._stack = stack
        self._folder = folder
        self.processes: dict[str, list[Process]] = {kind: [] for kind in KINDS}
        self.urls: list[str] = []

    async def start(self, release: Release) -> None:
        """All of one release."""
        for number in range(2):
            for kind in KINDS:
                await self._start(release, kind, number)
        await self.until_whole()

    async def _start(self, release: Release, kind: str, number: int) -> None:
        flags = ["--nats", self._server.url]
        if kind == "edge":
            port = free_port(0)
            self.urls.append(f"http://127.0.0.1:{port}")
            flags += ["--port", str(port), "--drain-timeout", f"{DRAIN_S:.0f}"]
        elif kind == "engine":
            flags += ["--engine", "sim", "--workers", "1"]
        else:
            flags += ["--cache-dir", str(self._folder / "cache")]
        made = running(release, self._folder, kind, f"{kind}-{number}", *flags)
        self.processes[kind].append(await self._stack.enter_async_context(made))

    async def until_whole(self) -> None:
        """Every process is ready, and every edge routes to every worker."""
        await until_ready(self._server.url, READY, within_s=120)
        for url in self.urls:
            await until_healthy(url, workers=WORKERS)


async def rolling_upgrade(
    folder: Path, old: Release, new: Release, *, concurrency: int = 4, answer_s: float = 6.0
) -> Report:
    """From `old` to `new` in the order of an upgrade, and back in the opposite one; both read the log at the end."""
    began = time.monotonic()
    steps: list[tuple[str, str]] = []
    streams: list[Answer] = []
    async with AsyncExitStack() as stack:
        server = NatsServer(folder / "nats")
        await server.start()
        stack.callback(server.stop)
        fleet = Fleet(server, stack, folder)
        await fleet.start(old)
        clients = [await stack.enter_async_context(client_of(url)) for url in fleet.urls]
        balancer = Balancer(clients)
        ended = asyncio.Event()
        orders = ((new, KINDS), (old, KINDS[::-1]))
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(_ask_on(balancer, ended))
            for release, kinds in orders:
                for kind in kinds:
                    for process in fleet.processes[kind]:
                        streams += await _stream(clients[0], answer_s, len(streams))
                        at = time.monotonic()
                        await process.replace(release)
                        await fleet.until_whole()
                        steps.append((f"{kind} to {release.name}", f"{time.monotonic() - at:.1f} s"))
            ended.set()
        problems = await settle(streams, stalled_s=STALLED_S_MAX)
        read = {release.name: await _verify(release, server) for release in (old, new)}
    violations = [Violation("stream", len(problems), problems[0])] if problems else []
    failed = balancer.problems
    violations += [Violation("request", len(failed), "; ".join(failed[:3]))] if failed else []
    if balancer.slowest_s > SLOWEST_S_MAX:
        violations.append(Violation("slowest request", 1, f"{balancer.slowest_s:.2f} s"))
    violations += [
        Violation(f"log read by {name}", 1, text[-1500:]) for name, (code, text) in read.items() if code
    ]
    lines = [
        ("requests", f"{balancer.done}, {balancer.retries} connections refused or broken and tried again"),
        ("slowest", f"{balancer.slowest_s:.2f} s"),
        ("streams", f"{len(streams)} of {int(answer_s * PACE)} tokens"),
        *steps,
        *((f"replay --verify by {name}", text.strip().splitlines()[-1]) for name, (_, text) in read.items()),
        ("duration", f"{time.monotonic() - began:.0f} s"),
    ]
    return Report(f"rolling upgrade from {old.name} to {new.name} and back", lines, violations)


async def _stream(client: httpx.AsyncClient, answer_s: float, seed: int) -> list[Answer]:
    """Streams that begin before a process is replaced and end after it."""
    fresh = start(client, 1, int(answer_s * PACE), first_seed=seed)
    await under_way(fresh)
    return fresh


async def _ask_on(balancer: Balancer, ended: asyncio.Event) -> None:
    while not ended.is_set():
        await balancer.ask()
        await asyncio.sleep(0.05)


async def _verify(release: Release, server: NatsServer) -> tuple[int, str]:
    return await run(release, "replay", "--verify", "--nats", server.url)


def main() -> int:
    """From the commit before to the working tree, and the other way round."""
    argparse.ArgumentParser(description=__doc__).parse_args()

    async def both(folder: Path) -> Report:
        old, new = build(BEFORE, folder / "build"), Release("this build")
        found = []
        for number, (one, other) in enumerate(((old, new), (new, old))):
            place = folder / f"run{number}"
            place.mkdir()
            found.append(await rolling_upgrade(place, one, other))
        lines = [line for one in found for line in [(one.title, ""), *one.lines]]
        return Report("rolling upgrades", lines, [bad for one in found for bad in one.violations])

    return command(both)


if __name__ == "__main__":
    sys.exit(main())
