"""`headwater bench edge`: HTTP requests and tokens through the whole system, with zero engine time.

With `--against COMMIT`, each round runs both commits, one after the other, so that other load on the machine affects both alike.
The other commit runs with the packages of this environment. It needs a Git checkout.
"""

import asyncio
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import msgspec

from headwater.actors.edge.admit.control import key_text
from headwater.actors.runtime.tables import ApiKeyTable
from headwater.engines.sim import ZERO
from headwater.ops.bench.report import Measure, Report, chat_body, cpu_seconds, percentile
from headwater.ops.config.setting import ConfigError
from headwater.ops.launch.up import temporary_fleet
from headwater.ops.nats.connect import ports_of
from headwater.ops.operator.keys import WantedKey, new_key
from headwater.ops.start.machine import Machine

END = b"0\r\n\r\n"


class Done(NamedTuple):
    """One finished request: seconds to its first and last byte, and the bytes received."""

    first_s: float
    total_s: float
    body: bytes


class BenchConnection:
    """One keep-alive connection, one request at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: str = "") -> None:
        self._reader = reader
        self._writer = writer
        self._key = f"authorization: Bearer {key}\r\n" if key else ""

    @classmethod
    async def open(cls, host: str, port: int, key: str = "") -> "BenchConnection":
        """Connect. Each request carries the API key."""
        return cls(*await asyncio.open_connection(host, port, limit=1 << 20), key)

    async def post(self, path: str, body: bytes) -> Done:
        """Send a request and read the whole response. Raises RuntimeError for any status except 200."""
        began = time.perf_counter()
        head = f"POST {path} HTTP/1.1\r\nhost: bench\r\ncontent-length: {len(body)}\r\n{self._key}\r\n"
        self._writer.write(head.encode() + body)
        headers = await self._reader.readuntil(b"\r\n\r\n")
        first_s = time.perf_counter() - began
        lower = headers.lower()
        if b" 200 " not in headers.split(b"\r\n", 1)[0]:
            raise RuntimeError(headers.decode())
        if b"content-length: " in lower:
            length = int(lower.split(b"content-length: ", 1)[1].split(b"\r\n", 1)[0])
            data = await self._reader.readexactly(length)
        else:
            data = b""
            while not data.endswith(END):
                piece = await self._reader.read(1 << 18)
                if not piece:
                    raise RuntimeError("the stream was truncated")
                data += piece
        return Done(first_s, time.perf_counter() - began, data)

    def close(self) -> None:
        """Close."""
        self._writer.close()


WORKERS = 1
CONNECTIONS = 32
REQUESTS = 6_000
STREAMS = 64
STREAM_TOKENS = 512
ROUNDS = 4
KEY_S = 10.0
"""A new key works within a second."""


async def bench_with_keys() -> Report:
    """The same with API keys: each request is authenticated, and its prompt salted for its tenant."""
    return await bench(keys=True)


async def bench(*, keys: bool = False, settings: Mapping[str, Any] = MappingProxyType({})) -> Report:
    """One-token requests over 32 connections, then 64 streams of 512 tokens each, four times over. `settings` are further ones, by key."""
    bench_settings = {
        "sim.step_time": ZERO,
        "fleet.workers": WORKERS,
        "auth.mode": "keys" if keys else "none",
    }
    async with temporary_fleet(bench_settings | dict(settings)) as fleet:
        host, _, port = fleet.url.removeprefix("http://").rpartition(":")
        key = await _create_key(fleet, host, int(port)) if keys else ""
        pid = fleet.pid("edge-0")
        connections = [await BenchConnection.open(host, int(port), key) for _ in range(CONNECTIONS)]
        await _requests(connections, 200)
        began, cpu = time.perf_counter(), cpu_seconds(pid)
        delays = await _requests(connections, REQUESTS)
        wall_s, cpu_s = time.perf_counter() - began, cpu_seconds(pid) - cpu
        # Opened now: an edge closes connections that send no request in time.
        connections += [
            await BenchConnection.open(host, int(port), key) for _ in range(STREAMS - CONNECTIONS)
        ]
        began, cpu = time.perf_counter(), cpu_seconds(pid)
        tokens = 0
        for _ in range(ROUNDS):
            tokens += await _streams(connections)
        stream_wall_s, stream_cpu_s = time.perf_counter() - began, cpu_seconds(pid) - cpu
        for connection in connections:
            connection.close()
    return Report(
        "edge",
        {
            "edge processes": 1,
            "sim workers": WORKERS,
            "API keys": "one, without limits" if keys else "off",
            "unary": f"{REQUESTS} requests of 1 token, {CONNECTIONS} connections",
            "streams": f"{ROUNDS} x {STREAMS} of {STREAM_TOKENS} tokens",
            "client, server, router and engine share": "this machine",
        },
        [
            Measure("requests", REQUESTS / wall_s, "requests/s"),
            Measure("request p50", percentile(delays, 0.5) * 1000, "ms"),
            Measure("request p99", percentile(delays, 0.99) * 1000, "ms"),
            Measure("edge CPU per 1,000 requests", cpu_s / REQUESTS * 1000, "s"),
            Measure("tokens", tokens / stream_wall_s, "tokens/s"),
            Measure("edge CPU per million tokens", stream_cpu_s / tokens * 1e6, "s"),
        ],
    )


async def _create_key(fleet: Machine, host: str, port: int) -> str:
    """A key of one tenant, once the edge accepts it."""
    key, secret = new_key(WantedKey("bench"), int(time.time()))
    text = key_text(key.id, secret)
    async with ports_of(fleet.nats, "operator", "bench") as ports:
        await ApiKeyTable(ports.api_keys).create(key)
    async with asyncio.timeout(KEY_S):
        while not await _is_accepted(text, host, port):
            await asyncio.sleep(0.05)
    return text


async def _is_accepted(key: str, host: str, port: int) -> bool:
    connection = await BenchConnection.open(host, port, key)
    try:
        await connection.post("/v1/chat/completions", chat_body("hello", 1))
    except RuntimeError:
        return False
    finally:
        connection.close()
    return True


async def _requests(connections: list[BenchConnection], count: int) -> list[float]:
    body = chat_body("Please describe the source of the river to me. " * 8, 1)
    remaining = iter(range(count))
    delays: list[float] = []

    async def work(connection: BenchConnection) -> None:
        for _ in remaining:
            done = await connection.post("/v1/chat/completions", body)
            delays.append(done.total_s)

    await asyncio.gather(*(work(connection) for connection in connections))
    return delays


async def _streams(connections: list[BenchConnection]) -> int:
    bodies = [
        chat_body(
            f"Stream number {number}.", STREAM_TOKENS, stream=True, stream_options={"include_usage": True}
        )
        for number in range(len(connections))
    ]
    answers = await asyncio.gather(
        *(c.post("/v1/chat/completions", body) for c, body in zip(connections, bodies, strict=True))
    )
    tokens = 0
    for answer in answers:
        tail = answer.body.rpartition(b'"completion_tokens":')[2]
        tokens += int(tail.split(b",", 1)[0])
    return tokens


# `--against COMMIT`: the same benchmark with the code of another commit, in turns on this machine.

ROOT: Final = Path(__file__).resolve().parents[2]
"""The checkout."""

AGAINST_ROUNDS: Final = 3


def bench_against(words: Sequence[str], commit: str) -> Report:
    """Run `headwater bench` with these words, and the same of `commit`. Raises `ConfigError` for a commit that is not there."""
    with tempfile.TemporaryDirectory(prefix="headwater-against-") as folder:
        other = Path(folder)
        _extract(commit, other)
        rounds = [(_run(words, ROOT), _run(words, other)) for _ in range(AGAINST_ROUNDS)]
    measures: list[Measure] = []
    for measure in rounds[0][0].measures:
        current = statistics.median(_value(report, measure.name) for report, _ in rounds)
        baseline = statistics.median(_value(report, measure.name) for _, report in rounds)
        measures += (
            Measure(measure.name, current, measure.unit),
            Measure(f"  at {commit}", baseline, measure.unit),
            Measure("  ratio", current / baseline if baseline else 0.0, "times"),
        )
    conditions = {**rounds[0][0].conditions, "rounds, in turns": AGAINST_ROUNDS, "against": commit}
    return Report(f"{rounds[0][0].benchmark}, against {commit}", conditions, measures)


def _extract(commit: str, folder: Path) -> None:
    try:
        archive = subprocess.run(
            ["git", "-C", str(ROOT), "archive", commit], check=True, capture_output=True
        ).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", b"") or str(error).encode()
        raise ConfigError(f"--against {commit}: {reason.decode().strip()}") from error
    with tarfile.open(fileobj=BytesIO(archive)) as files:
        files.extractall(folder, filter="data")


def _run(words: Sequence[str], tree: Path) -> Report:
    """The report of one run, with the code of a source tree."""
    environ = {**os.environ, "PYTHONPATH": str(tree / "src")}
    command = [sys.executable, "-m", "headwater.ops.cli", "bench", *words, "--json"]
    done = subprocess.run(command, cwd=tree, env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(f"--against: bench of {tree} ended with {done.returncode}: {done.stderr[-500:]}")
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=Report)


def _value(report: Report, name: str) -> float:
    return next((measure.value for measure in report.measures if measure.name == name), 0.0)
