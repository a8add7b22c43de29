"""The endpoint picker: `python -m tests.bench.picker [--rate 1000] [--seconds 10] [--rounds 3] [--no-hits] [--no-picks]`. Needs `make proxies`.

Picks: a client sends requests as Envoy does, at a fixed rate whatever the answers take, and then as many as it can. No request goes on to a worker: each
is withdrawn at once, as that of a client that left. Client, picker, router, NATS server and workers share the machine.

Hits: conversations of several turns through Envoy, two workers, each with an edge beside it; the share of the prompts' tokens that was cached, with
one picker and one router, with two of each, and with a router that chooses at random.
"""

import argparse
import asyncio
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final

import grpc
import msgspec

from headwater.actors.picker import messages as ext_proc
from headwater.ops.bench.report import Measure, Report, cpu_seconds, percentile, show
from headwater.ops.start.sockets import free_port
from tests.bench.ext_proc_client import Connection, framed
from tests.gateway.stage import Stage, stage
from tests.support.processes.fleet import FleetProcess, fleet
from tests.support.processes.restarted import KeptProcess, kept_picker, kept_router, until_ready

SYSTEMS: Final = 20
SYSTEM: Final = "You are the assistant of customer {0}, and answer in the words of {0}. " * 16
QUESTION: Final = "Question {0}: where does a river begin, and where does it end? "
CONNECTIONS: Final = 4
"""Envoy keeps one for each of its threads."""

STREAMS: Final = 32
OPEN_MAX: Final = 512
"""Requests at once. One that has to wait for that is late, which counts."""

WARM_S: Final = 2.0

CONVERSATIONS: Final = 120
BEGIN_S: Final = 10.0
TURNS: Final = 6
AT_ONCE: Final = 6
SEED: Final = 7


def messages(number: int) -> list[ext_proc.ProcessingRequest]:
    """One request as Envoy sends it: headers, then the whole body."""
    first = ext_proc.ProcessingRequest()
    first.protocol_config.request_body_mode = ext_proc.BUFFERED
    for key, value in (
        (":method", "POST"),
        (":path", "/v1/chat/completions"),
        ("content-type", "application/json"),
    ):
        first.request_headers.headers.headers.add(key=key, raw_value=value.encode())
    turns = [
        {"role": "system", "content": SYSTEM.format(number % SYSTEMS)},
        {"role": "user", "content": QUESTION.format(number)},
    ]
    document = {"model": "sim", "messages": turns, "max_tokens": 16}
    body = ext_proc.HttpBody(body=msgspec.json.encode(document), end_of_stream=True)
    return [first, ext_proc.ProcessingRequest(request_body=body)]


def request(number: int) -> tuple[bytes, bytes]:
    """The messages of a request as they are sent."""
    first, second = messages(number)
    return framed(first.SerializeToString()), framed(second.SerializeToString())


async def pick(connection: Connection, sent: tuple[bytes, bytes]) -> float:
    """When the endpoint of one request was known."""
    known, data = await connection.pick(*sent)
    answer = ext_proc.ProcessingResponse.FromString(data)
    endpoint = answer.dynamic_metadata.fields["envoy.lb"].struct_value.fields[
        "x-gateway-destination-endpoint"
    ]
    assert endpoint.string_value, answer
    return known


async def at_rate(
    connections: list[Connection], rate: float, requests: list[tuple[bytes, bytes]]
) -> tuple[list[float], float]:
    """Seconds from when each request was due until its endpoint was known; and requests per second until the last was answered."""
    free = asyncio.Semaphore(OPEN_MAX)
    began = time.perf_counter()

    async def one(number: int, due: float) -> float:
        try:
            return await pick(connections[number % len(connections)], requests[number]) - due
        finally:
            free.release()

    tasks: list[asyncio.Task[float]] = []
    for number in range(len(requests)):
        due = began + number / rate
        wait = due - time.perf_counter()
        if wait > 0:
            await asyncio.sleep(wait)
        await free.acquire()
        tasks.append(asyncio.create_task(one(number, due)))
    times = await asyncio.gather(*tasks)
    return times, len(times) / (time.perf_counter() - began)


async def at_most(
    connections: list[Connection], requests: list[tuple[bytes, bytes]], seconds: float
) -> float:
    """Requests per second of clients that begin the next at once."""
    until, done = time.perf_counter() + seconds, 0

    async def client(connection: Connection) -> None:
        nonlocal done
        while time.perf_counter() < until:
            await pick(connection, requests[done % len(requests)])
            done += 1

    await asyncio.gather(*(client(connections[number % len(connections)]) for number in range(STREAMS)))
    return done / seconds


async def picks(folder: Path, pickers: int, rate: float, seconds: float) -> list[Measure]:
    """What pickers and one router do."""
    async with _behind_no_gateway(folder, pickers) as (up, started, ports), AsyncExitStack() as stack:
        connections = []
        for port in ports * CONNECTIONS:
            connections.append(await Connection.open("127.0.0.1", port))
            stack.callback(connections[-1].close)
        await _began(ports)
        requests = [request(number) for number in range(int(rate * seconds))]
        await at_rate(connections, rate / 4, requests[: int(rate / 4 * WARM_S)])
        processes = {
            **{f"picker {number}": one.pid for number, one in enumerate(started)},
            "router": up.pids("router-0")[0],
            "NATS server": up.pids("nats-server")[0],
            "client": os.getpid(),
        }
        before = {name: cpu_seconds(pid) for name, pid in processes.items()}
        times, reached = await at_rate(connections, rate, requests)
        used = {name: cpu_seconds(pid) - before[name] for name, pid in processes.items()}
        most = await at_most(connections, requests, seconds)
    return [
        Measure(f"picks at {rate:g}/s offered", reached, "picks/s", f"{rate:g}"),
        Measure("pick p50", 1e3 * percentile(times, 0.50), "ms"),
        Measure("pick p99", 1e3 * percentile(times, 0.99), "ms", "10"),
        *(
            Measure(f"CPU of the {name} per 1,000 picks", 1e3 * spent / len(times), "s")
            for name, spent in used.items()
        ),
        Measure(f"picks of {STREAMS} clients", most, "picks/s"),
    ]


@asynccontextmanager
async def _behind_no_gateway(
    folder: Path, pickers: int
) -> AsyncIterator[tuple[FleetProcess, list[KeptProcess], list[int]]]:
    """A fleet of two workers with pickers, and the ports of these."""
    edge, *ports = (free_port(0) for _ in range(1 + pickers))
    beside = ("--port", str(edge), "--endpoint", f"127.0.0.1:{edge}")
    async with (
        fleet(folder, "--engine", "sim", "--workers", "2", *beside) as up,
        AsyncExitStack() as stack,
    ):
        started = [
            await stack.enter_async_context(
                kept_picker(folder, up.nats, f"picker-{number}", "--picker-port", str(port))
            )
            for number, port in enumerate(ports)
        ]
        await until_ready(up.nats, {"picker": pickers})
        await up.until("the router has both", lambda found: any(one.get("workers") == 2 for one in found))
        yield up, started, ports


async def _began(ports: Sequence[int]) -> None:
    """Have the pickers see a response, as of any gateway: from then on they withdraw what has none."""
    for port in ports:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = ext_proc.stub(channel)()
            await call.write(ext_proc.ProcessingRequest(response_headers=ext_proc.HttpHeaders()))
            await call.read()
            await call.done_writing()
            assert await call.code() is grpc.StatusCode.OK


async def hit_share(folder: Path, replicas: int, *flags: str) -> float:
    """The share of the tokens of all prompts that was cached. `flags` are for the fleet."""
    async with _replicated(folder, replicas, *flags) as made:
        free = asyncio.Semaphore(AT_ONCE)
        drawn = random.Random(SEED)
        starts = [drawn.uniform(0, BEGIN_S) for _ in range(CONVERSATIONS)]
        found: list[tuple[int, int]] = []

        async def converse(number: int) -> None:
            await asyncio.sleep(starts[number])
            turns = [{"role": "system", "content": SYSTEM.format(number % SYSTEMS)}]
            async with made.envoy.client() as client:
                for turn in range(TURNS):
                    turns.append({"role": "user", "content": QUESTION.format(f"{number}.{turn}") * 4})
                    body = {"model": "sim", "messages": turns, "max_tokens": 24, "ignore_eos": True}
                    async with free:
                        answer = await client.post("/v1/chat/completions", json=body)
                    assert answer.status_code == 200, answer.text
                    document = answer.json()
                    usage = document["usage"]
                    found.append((usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]))
                    turns.append(
                        {"role": "assistant", "content": document["choices"][0]["message"]["content"]}
                    )

        await asyncio.gather(*(converse(number) for number in range(CONVERSATIONS)))
    return sum(cached for _, cached in found) / sum(prompt for prompt, _ in found)


@asynccontextmanager
async def _replicated(folder: Path, replicas: int, *flags: str) -> AsyncIterator[Stage]:
    async with stage(folder, *flags, pickers=replicas) as made, AsyncExitStack() as stack:
        for number in range(1, replicas):
            await stack.enter_async_context(kept_router(folder, made.up.nats, f"router-{number}"))
        await until_ready(made.up.nats, {"router": replicas})
        yield made


async def measure(given: argparse.Namespace) -> Report:
    """All of it."""
    measures: list[Measure] = []
    load = [os.getloadavg()[0]]
    if not given.no_picks:
        with tempfile.TemporaryDirectory() as folder:
            measures += await picks(Path(folder), given.pickers, given.rate, given.seconds)
    load.append(os.getloadavg()[0])
    if not given.no_hits:
        shares: dict[int, list[float]] = {1: [], 2: []}
        for _ in range(given.rounds):
            for replicas, found in shares.items():
                with tempfile.TemporaryDirectory() as folder:
                    found.append(await hit_share(Path(folder), replicas))
        with tempfile.TemporaryDirectory() as folder:
            at_random = await hit_share(Path(folder), 1, "--policy", "random")
        one, two = (statistics.mean(found) for found in shares.values())
        measures += [
            Measure("hit share, one picker and router", one, "of tokens"),
            Measure("hit share, two of each", two, "of tokens"),
            Measure("two to one", two / one, "times", "0.99"),
            Measure("hit share, one of each, workers at random", at_random, "of tokens"),
            Measure("widest between two rounds of one", max(shares[1]) - min(shares[1]), "of tokens"),
        ]
        load.append(os.getloadavg()[0])
    conditions = {
        "prompts": f"{len(messages(0)[1].request_body.body)} bytes, {SYSTEMS} system prompts",
        "pickers": given.pickers,
        "connections": f"{CONNECTIONS} to each",
        "rounds": given.rounds,
        "conversations": f"{CONVERSATIONS} of {TURNS} turns, {AT_ONCE} at once, seed {SEED}",
        "load average": " ".join(f"{one:.1f}" for one in load),
    }
    return Report("picker", conditions, measures)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=1_000.0)
    parser.add_argument("--pickers", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-hits", action="store_true")
    parser.add_argument("--no-picks", action="store_true")
    show(asyncio.run(measure(parser.parse_args())), as_json=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
