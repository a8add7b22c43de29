"""`headwater bench route --workers N,…`: what a decision costs as the fleet grows; and a fleet of many simulated workers over NATS.

The decisions are measured in one process, on one core, without NATS. Every worker has served prompts (so its step times are
known), holds some of the 100 prompts in part, and has requests running. Before each decision its last decision and a load report
are folded, as in a fleet: the arrays' rows of those workers are written again.

`python -m headwater.ops.bench.route URL NAMESPACE COUNT` adds COUNT workers to the fleet on that server, until it is ended.
"""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from headwater.actors.runtime.actor import Actor
from headwater.actors.runtime.ports import Ports
from headwater.actors.runtime.tables import CardTable
from headwater.actors.worker.actor import WorkerActor
from headwater.actors.worker.model_card import Served
from headwater.actors.worker.settings import WorkerProfile
from headwater.engines import logs
from headwater.engines.model_files import byte_model_files
from headwater.engines.sim import ZERO
from headwater.engines.sim.engine import SimEngine, SimSettings
from headwater.events.ports import Record
from headwater.ops.bench.report import Measure, Report, cpu_seconds, percentile
from headwater.ops.config.processes import MetricsSettings
from headwater.ops.config.sections import NatsSettings
from headwater.ops.launch.up import temporary_fleet
from headwater.ops.nats.server import open_ports
from headwater.ops.start import signals
from headwater.ops.start.actor import Host, run_one
from headwater.ops.start.signals import die_with_parent
from headwater.router.context import DecisionContext
from headwater.router.decide import decide, prompt_of
from headwater.router.state import RouterState
from headwater.schemas import hashing, subjects
from headwater.schemas.clock import SystemClock
from headwater.schemas.encoding import SCHEMA_VERSION, Batch, encode_batch
from headwater.schemas.events import BlocksStored, Event, LoadReported, WorkerJoined
from headwater.schemas.routing import Decision, RouteQuery, Weights

BLOCKS: Final = 64
BLOCK_SIZE: Final = 16
PROMPTS: Final = 100
DECISIONS: Final = 2_000
WARM_UP: Final = 200
RUNNING: Final = 4
"""Requests that a worker keeps; the oldest ends when another arrives."""

TARGETS_MS: Final = {8: 0.1, 64: 0.15, 256: 0.25, 1_024: 0.8}
EVENT_BYTES_MAX: Final = 2_048
START_NS: Final = 1_800_000_000_000_000_000
STEP_NS: Final = 2_000_000


class DecisionTimes(NamedTuple):
    """The decisions in one fleet size: seconds of each, and the most bytes that one took in the log."""

    workers: int
    seconds: list[float]
    event_bytes: int


class BenchFleet:
    """A pool of `workers` simulated by their events alone."""

    def __init__(self, workers: int, prompts: list[hashing.U64]) -> None:
        self.state = RouterState()
        self.now_ns = START_NS
        self.names = [f"worker-{number}" for number in range(workers)]
        self._open: dict[str, list[str]] = {name: [] for name in self.names}
        draw = np.random.default_rng(workers)
        for name in self.names:
            self.fold(name, WorkerJoined(name, 1, "m", "sim", "both", BLOCK_SIZE, 40_000, 256))
            held = prompts[int(draw.integers(len(prompts)))][: int(draw.integers(1, BLOCKS))]
            self.fold(name, BlocksStored(0, hashing.pack_hashes(held)))
            lengths = draw.integers(100, 8_000, 20).tolist()
            self.fold(name, self._report((), tuple((tokens, tokens * 50) for tokens in lengths)))

    def fold(self, writer: str, event: Event) -> None:
        """Append one event to the pool's log and fold it."""
        batch: Batch[Any] = Batch(SCHEMA_VERSION, writer, 1, 0, self.now_ns, (event,))
        self.state.apply(Record(self.state.position + 1, "", self.now_ns, batch))

    def advance(self, decision: Decision) -> None:
        """Fold the decision and its worker's report."""
        self.now_ns += STEP_NS
        self.fold("router", decision)
        requests = self._open[decision.worker]
        requests.append(decision.request)
        ended = (requests.pop(0),) if len(requests) > RUNNING else ()
        report = self._report(ended, ((decision.prompt_tokens, 50_000),), (decision.request,))
        self.fold(decision.worker, report)

    def _report(
        self,
        finished: tuple[str, ...],
        prefills: tuple[tuple[int, int], ...],
        accepted: tuple[str, ...] = (),
    ) -> LoadReported:
        return LoadReported(
            RUNNING, 0, 9_000, 40_000, accepted, accepted, finished, prefills=prefills, step_us=9_000
        )


def measure(workers: int, decisions: int = DECISIONS) -> DecisionTimes:
    """Time decisions one by one: finding the prompt's blocks, scoring every worker, choosing, and the record."""
    draw = np.random.default_rng(0)
    tokens = draw.integers(0, 256, (PROMPTS, BLOCKS * BLOCK_SIZE), dtype=np.uint32)
    prompts = [hashing.sequence_hashes(row, BLOCK_SIZE) for row in tokens]
    packed = [hashing.pack_hashes(prompt) for prompt in prompts]
    fleet = BenchFleet(workers, prompts)
    state, weights = fleet.state, Weights()
    seconds: list[float] = []
    most = 0
    for number in range(1, WARM_UP + decisions + 1):
        query = RouteQuery(
            f"bench-{number}", BLOCKS * BLOCK_SIZE + 5, 16, packed[int(draw.integers(PROMPTS))]
        )
        context = DecisionContext(number, state.position, number - 1, fleet.now_ns, weights, False)
        began = time.perf_counter()
        reply = decide(state.index, state.loads, state.cold, prompt_of(query), query, context)
        took = time.perf_counter() - began
        assert isinstance(reply, Decision)
        if number > WARM_UP:
            seconds.append(took)
            batch: Batch[Any] = Batch(SCHEMA_VERSION, "router-0", 1, number, fleet.now_ns, (reply,))
            most = max(most, len(encode_batch(batch)))
        fleet.advance(reply)
    return DecisionTimes(workers, seconds, most)


def bench(sizes: Sequence[int]) -> Report:
    """Decisions of fleets of these sizes."""
    conditions = {
        "prompt": f"{BLOCKS} blocks of {BLOCK_SIZE} tokens",
        "decisions": f"{DECISIONS:,} each, one at a time, each after a decision and a report were folded",
        "cores": 1,
    }
    return Report("route", conditions, [figure for workers in sizes for figure in measures(measure(workers))])


def measures(times: DecisionTimes) -> list[Measure]:
    """The figures of one fleet size, with the project's goals."""
    name, limit = f"{times.workers} workers", TARGETS_MS.get(times.workers)
    mean_ms = sum(times.seconds) / len(times.seconds) * 1_000
    return [
        Measure(f"{name}: decision, mean", mean_ms, "ms", f"at most {limit:g}" if limit else ""),
        Measure(f"{name}: decision, p50", percentile(times.seconds, 0.5) * 1_000, "ms"),
        Measure(f"{name}: decision, p99", percentile(times.seconds, 0.99) * 1_000, "ms"),
        Measure(
            f"{name}: message in the log, largest", times.event_bytes, "bytes", f"at most {EVENT_BYTES_MAX:,}"
        ),
    ]


# Simulated workers in one process, each with its own lease, connections and reports.

NAME = "hosted-"
"""Workers are named so, with a number."""

AT_ONCE = 16
"""Workers that join at the same time: joining takes CPU, and a lease that is not renewed in time ends."""


async def host_workers(nats: NatsSettings, settings: SimSettings, count: int, stop: asyncio.Event) -> int:
    """Run `count` workers until stopped; returns the worst exit status."""
    served = Served(settings.model, byte_model_files(settings.model))
    joining = asyncio.Semaphore(AT_ONCE)

    async def host_one(name: str) -> int:
        async with joining:
            joined = asyncio.Event()

            async def make(ports: Ports) -> Actor:
                engine = SimEngine(settings, SystemClock())
                joined.set()
                return WorkerActor(ports, name, engine, served, profile=WorkerProfile(instance=name))

            running = asyncio.create_task(
                run_one(Host(nats, MetricsSettings()), "worker", name, make, stop, restarts=False)
            )
            waiting = asyncio.create_task(joined.wait())
            await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
        return await running

    return max(await asyncio.gather(*(host_one(f"{NAME}{number}") for number in range(count))))


def main(url: str, namespace: str, count: int) -> int:
    """Run `count` workers of the simulated model until SIGTERM."""
    die_with_parent()
    logs.configure("error")
    nats = NatsSettings(url, namespace=namespace)
    settings = SimSettings(step_time=ZERO)
    return signals.run(lambda stop: host_workers(nats, settings, count, stop))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))


# The round trip of a route query over NATS to the router.

RATE = 500
SECONDS = 4
BLOCKS_OVER_NATS = 64
WORKERS = 2
NAMESPACE = "default"
JOINED_S = 120.0
"""How long further workers may take to join."""


async def bench_over_nats(workers: int = WORKERS) -> Report:
    """500 queries of 64 blocks per second for four seconds, sent on schedule independently of replies (open loop).

    Of the `workers`, those beyond two share one process. No worker accepts these decisions, so they accumulate unlike in a real
    fleet, which limits the duration.
    """
    async with (
        temporary_fleet({"sim.step_time": ZERO, "fleet.workers": min(workers, WORKERS)}) as fleet,
        open_ports(fleet.nats.url, NAMESPACE, "bench") as ports,
        hosted(fleet.nats.url, ports, max(0, workers - WORKERS)),
    ):
        subject = subjects.route_query(NAMESPACE, (await CardTable(ports.cards).pools())[0])
        encode = msgspec.msgpack.Encoder().encode
        tokens = np.random.default_rng(0).integers(0, 256, (100, BLOCKS_OVER_NATS * 16), dtype=np.uint32)
        hashes = [hashing.pack_hashes(hashing.sequence_hashes(row, 16)) for row in tokens]
        loop = asyncio.get_running_loop()
        delays: list[float] = []

        async def ask(number: int) -> None:
            query = RouteQuery(f"bench-{number}", BLOCKS_OVER_NATS * 16, 16, hashes[number % len(hashes)])
            began = time.perf_counter()
            await ports.bus.request(subject, encode(query), timeout_s=5.0)
            delays.append(time.perf_counter() - began)

        for number in range(200):
            await ask(number)
        delays.clear()
        pid = fleet.pid("router-0")
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
        {"rate": f"{RATE}/s for {SECONDS} s", "blocks a query": BLOCKS_OVER_NATS, "workers": workers},
        [
            Measure("latency p50", percentile(delays, 0.5) * 1000, "ms"),
            Measure("latency p99", percentile(delays, 0.99) * 1000, "ms"),
            Measure("router CPU per 1,000 queries", cpu_s / len(delays) * 1000, "s"),
        ],
    )


@asynccontextmanager
async def hosted(url: str, ports: Ports, count: int) -> AsyncIterator[None]:
    """Run `count` further workers in a process of their own; all of them have joined when this is entered."""
    if not count:
        yield
        return
    arguments = ("-m", "headwater.ops.bench.route", url, NAMESPACE, str(count))
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
    """Wait until this many hosted workers have joined the only pool."""
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
