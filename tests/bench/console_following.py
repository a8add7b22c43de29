"""What a page that follows a fleet costs it: `python -m tests.bench.console_following [--rate R] [--seconds S] [--turns N] [--clients N]`.

Starts a fleet of simulated engines with a console and sends streamed requests on schedule, without waiting for answers. In every second
turn a page follows the log: it keeps the stream of positions open and asks for the fleet and the rates of the newest one as often as the
real page does. Prints the gaps between tokens and the times to the first one with and without the page, their ratio, and the CPU of the console.
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import random
import statistics
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor, ProcessPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple

import httpx

from headwater.ops.bench.report import machine
from headwater.ops.launch.up import temporary_fleet

VIEWS: Final = {"fleet?": 0.9, "series?window_s=300&columns=200&": 3.0}
"""Views of a page that is live, and how many seconds after an answer it asks for the next one at the earliest."""

TICKS: Final = 100
"""Clock ticks per second in /proc."""

PREFIXES: Final = 40


class Turn(NamedTuple):
    """Gaps between tokens and times to the first one in ms, the console's share of a core, and requests that failed."""

    gaps: list[float]
    firsts: list[float]
    console: float
    failed: int


class Load:
    """Streamed completions at a rate; each prompt begins like some of the others."""

    def __init__(self, url: str, rate: float, tokens: int, seed: int = 1) -> None:
        self._client = httpx.AsyncClient(base_url=url, timeout=60, limits=httpx.Limits(max_connections=None))
        self._rate = rate
        self._tokens = tokens
        self._draw = random.Random(seed)
        words = [f"w{number}" for number in range(3_000)]
        self._prefixes = [" ".join(self._draw.choices(words, k=200)) for _ in range(PREFIXES)]

    async def run(self, seconds: float) -> tuple[list[float], list[float], int]:
        """Gaps and first tokens in ms, and how many requests failed."""
        gaps: list[float] = []
        firsts: list[float] = []
        began, tasks = time.perf_counter(), []
        for number in range(int(self._rate * seconds)):
            await asyncio.sleep(max(0.0, began + number / self._rate - time.perf_counter()))
            tasks.append(asyncio.create_task(self._one(gaps, firsts)))
        results = await asyncio.gather(*tasks)
        return gaps, firsts, results.count(False)

    async def _one(self, gaps: list[float], firsts: list[float]) -> bool:
        prompt = f"{self._draw.choice(self._prefixes)} q{self._draw.random()}"
        body = {
            "model": "sim",
            "prompt": prompt,
            "max_tokens": self._tokens,
            "ignore_eos": True,
            "stream": True,
        }
        sent, last = time.perf_counter(), 0.0
        async with self._client.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                now = time.perf_counter()
                if last:
                    gaps.append(1_000 * (now - last))
                else:
                    firsts.append(1_000 * (now - sent))
                last = now
        return answer.status_code == 200


def run_load(
    url: str, rate: float, tokens: int, seconds: float, seed: int
) -> tuple[list[float], list[float], int]:
    """See `Load.run`, in a process of its own."""
    return asyncio.run(Load(url, rate, tokens, seed).run(seconds))


async def run_loads(
    pool: Executor, clients: int, url: str, rate: float, tokens: int, seconds: float
) -> tuple[list[float], list[float], int]:
    """`Load.run` at the rate divided among processes: one alone sends a few hundred requests/s."""
    loop = asyncio.get_running_loop()
    parts = await asyncio.gather(
        *(
            loop.run_in_executor(pool, run_load, url, rate / clients, tokens, seconds, seed)
            for seed in range(clients)
        )
    )
    return (
        [gap for part in parts for gap in part[0]],
        [one for part in parts for one in part[1]],
        sum(part[2] for part in parts),
    )


@contextlib.asynccontextmanager
async def page(url: str) -> AsyncIterator[None]:
    """A page that follows the newest position."""
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        newest = 0

        async def follow() -> None:
            nonlocal newest
            async with client.stream("GET", "/api/live") as answer:
                async for line in answer.aiter_lines():
                    if line.startswith("data: "):
                        newest = json.loads(line[6:])["last"]

        async def show(view: str, period_s: float) -> None:
            while True:
                if newest:
                    (await client.get(f"/api/{view}at={newest}")).raise_for_status()
                await asyncio.sleep(period_s)

        tasks = [asyncio.create_task(follow()), *(asyncio.create_task(show(*view)) for view in VIEWS.items())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            done = await asyncio.gather(*tasks, return_exceptions=True)
            for error in done:
                if not isinstance(error, asyncio.CancelledError):
                    raise RuntimeError(f"the page could not follow: {error!r}")


def cpu_s(pid: int) -> float:
    """CPU seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def console_pid(port: str) -> int:
    """The console of this fleet, by its command line."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if b"console" in words and port.encode() in words:
                return int(path.parent.name)
    raise RuntimeError("the console's process was not found")


async def measure(given: argparse.Namespace) -> None:
    """Run and print."""
    print(
        f"{machine()}; {given.workers} simulated workers with default step times, {given.edges} edges, {given.rate:g} requests/s of "
        f"{given.tokens} tokens from {given.clients} processes"
    )
    with ProcessPoolExecutor(given.clients, mp_context=multiprocessing.get_context("spawn")) as pool:
        report(await _turns(pool, given))


async def _turns(pool: Executor, given: argparse.Namespace) -> dict[bool, list[Turn]]:
    """The turns without and with a page."""
    settings = {"fleet.workers": given.workers, "processes.edges": given.edges, "console.port": 18001}
    found: dict[bool, list[Turn]] = {False: [], True: []}
    async with temporary_fleet(settings) as fleet:
        pid = console_pid(fleet.console_url.rpartition(":")[2])

        async def load() -> tuple[list[float], list[float], int]:
            return await run_loads(pool, given.clients, fleet.url, given.rate, given.tokens, given.seconds)

        await load()
        for number in range(2 * given.turns):
            followed = bool(number % 2)
            async with page(fleet.console_url) if followed else contextlib.nullcontext():
                spent, began = cpu_s(pid), time.perf_counter()
                gaps, firsts, failed = await load()
                share = (cpu_s(pid) - spent) / (time.perf_counter() - began)
            found[followed].append(Turn(gaps, firsts, share, failed))
            # A history is followed for a while after its page has gone.
            await asyncio.sleep(35 if followed and number + 1 < 2 * given.turns else 0)
    return found


def report(found: dict[bool, list[Turn]]) -> None:
    """Percentiles with and without a page, and their ratios."""
    times: dict[str, Callable[[Turn], list[float]]] = {
        "gap between tokens": lambda turn: turn.gaps,
        "time to the first token": lambda turn: turn.firsts,
    }
    for name, pick in times.items():
        for percent in (50, 99):
            without, following = (
                statistics.median(statistics.quantiles(pick(turn), n=100)[percent - 1] for turn in found[way])
                for way in (False, True)
            )
            print(
                f"{name}, p{percent}: {without:.2f} ms without, {following:.2f} ms with a page, ratio {following / without:.3f}"
            )
    for way, text in ((False, "no page is open"), (True, "a page follows")):
        share = statistics.median(turn.console for turn in found[way])
        failed = sum(turn.failed for turn in found[way])
        print(f"console's CPU while {text}: {100 * share:.2f} % of a core; {failed} requests failed")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=100.0)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--clients", type=int, default=1, help="processes that send the requests")
    parser.add_argument("--edges", type=int, default=1, help="edges, which share the port")
    asyncio.run(measure(parser.parse_args()))
