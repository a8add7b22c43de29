"""A fleet across hosts as its guide sets it up: NATS, an edge and a router on each, and workers whose legs are on different ones.

Two pools: one of simulated workers, and with `vllm` one of vLLM on CPU whose KV moves by NIXL over TCP.
"""

import asyncio
import contextlib
import subprocess
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final, Literal, NamedTuple

import httpx
import msgspec

from headwater.ops.nats.server import binary
from headwater.schemas.names import NATS_PORT
from tests.faults.answers import client_of
from tests.faults.kills.victims import Victim
from tests.support.engines import tiny_model
from tests.support.network.hosts import Host, Network
from tests.support.processes.restarted import KeptProcess, until_healthy

EDGE_PORT: Final = 8000
KEY: Final = ("--tenant", "test", "--allow", "policy,worker")
POLICIES: Final = ("--client-policies", "kv,direct")
"""Tests ask workers by their names."""

READY_S: Final = 120.0
RESTART_S: Final = 0.5
POLL_S: Final = 0.2

SIM_POOL: Final = "sim-b16"

MODEL: Final = "tiny"
_SERVED: Final = ("--served-model-name", MODEL, "--max-model-len", "1024")
VLLM: Final = ("--engine", "vllm", "--workers", "1", *_SERVED, "--native=--kv-cache-memory-bytes=67108864")
SGLANG: Final = ("--engine", "sglang", *_SERVED)
ANSWER: Final = 'Publish Violation - Subject "_INBOX_'

TWO_RANKS: Final = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
"""Without it SGLang refuses two ranks on a machine with one NUMA node."""

OVER_TCP: Final = {"UCX_TLS": "tcp"}
"""These hosts share a kernel, and UCX would find its ways to copy between their processes."""


class KeptServer:
    """A nats-server on a host, started again whenever it ends, as by an init system."""

    def __init__(self, host: Host, config: Path) -> None:
        self.host = host
        self.log = config.with_suffix(".log")
        self._config = config
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where clients connect."""
        return f"nats://{self.host.address}:{NATS_PORT}"

    @property
    def pid(self) -> int:
        """Process id; 0 while it does not run."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else 0

    async def keep(self) -> None:
        """Run it until cancelled."""
        try:
            while True:
                if not self.pid:
                    # Here and not in another thread: the kernel ends it with the thread that started it.
                    with self.log.open("ab") as output:
                        self._process = self.host.popen(binary(), "-c", str(self._config), output=output)
                await asyncio.sleep(RESTART_S)
        finally:
            if self._process is not None:
                self._process.kill()
                self._process.wait()


class Spread(NamedTuple):
    """The fleet. `access` are the flags of a command against it; `key` is a client's."""

    folder: Path
    network: Network
    servers: list[KeptServer]
    processes: list[KeptProcess]
    access: tuple[str, ...]
    key: str

    @property
    def edges(self) -> dict[str, str]:
        """URL of each edge, by its name."""
        return {f"edge-{host.number}": f"http://{host.address}:{EDGE_PORT}" for host in self.network.hosts}

    @property
    def urls(self) -> str:
        """All servers, separated by commas."""
        return ",".join(server.url for server in self.servers)

    def victims(self) -> list[Victim]:
        """Every process that may be killed."""
        return [
            *(Victim(f"nats-{n}", lambda server=server: server.pid) for n, server in enumerate(self.servers)),  # type: ignore[misc]
            *(Victim(one.name, lambda one=one: one.pid) for one in self.processes),  # type: ignore[misc]
        ]

    def client(self, edge: str) -> httpx.AsyncClient:
        """A client of an edge."""
        client = client_of(self.edges[edge])
        client.headers["authorization"] = f"Bearer {self.key}"
        return client

    async def until_healthy(self, workers: int, within_s: float = READY_S) -> None:
        """Wait until every edge serves so many workers."""
        await asyncio.gather(
            *(until_healthy(url, workers=workers, within_s=within_s) for url in self.edges.values())
        )

    async def replayed(self, pool: str, until: int | None = None) -> list[dict[str, object]]:
        """What `replay --verify` says on each host, of its own server."""

        async def one(server: KeptServer) -> dict[str, object]:
            words = ("--pool", pool, "--nats", server.url, *self.access[2:])
            more = ("--until", str(until)) if until else ()
            code, output = await server.host.finish("replay", "--verify", "--json", *words, *more)
            line = output.strip().splitlines()[-1]
            assert code in (0, 1), f"{server.host.name}: {output}"
            found: dict[str, object] = msgspec.json.decode(line)
            return found

        # One after the other: each computes.
        return [await one(server) for server in self.servers]

    def keep(
        self, host: Host, name: str, kind: str, *flags: str, imported: Literal["", "vllm", "sglang"] = ""
    ) -> KeptProcess:
        """A `headwater KIND` on a host. `imported`: fork it from a process that has imported this engine."""
        named = () if kind == "pools" else ("--name", name)
        replicas = ("--replicas", str(len(self.servers)))
        words = [kind, *named, *self.access, *replicas, "--log-format", "json", *flags]
        process = KeptProcess(
            name,
            self.folder / f"{name}.log",
            words,
            vllm=imported == "vllm",
            sglang=imported == "sglang",
            host=host,
            environ=OVER_TCP | TWO_RANKS,
        )
        process.start()
        self.processes.append(process)
        return process

    def route(self, host: Host, name: str, pool: str) -> None:
        """A router that splits every prompt, with its own copy of the newest snapshot."""
        cache = ("--cache-dir", str(self.folder / f"cache-{name}"))
        split = ("--disaggregate", "always", "--local-prefill-tokens", "31")
        self.keep(host, name, "router", "--pool", pool, *cache, *split)

    async def engine_pool(self) -> str:
        """Wait for the pool of the real engine's workers; its name."""
        replicas = ("--replicas", str(len(self.servers)))
        async with asyncio.timeout(READY_S):
            while True:
                names = (await _done(self.network.hosts[0], "pools", *self.access, *replicas)).split()
                pools = [name.partition("_POOL_")[2] for name in names if "_POOL_" in name]
                if found := [pool for pool in pools if pool != SIM_POOL]:
                    return found[0]
                await asyncio.sleep(POLL_S)

    async def stop(self) -> None:
        """End all processes in an orderly way, at once."""
        await asyncio.gather(*(process.stop() for process in self.processes))

    def denied(self) -> list[str]:
        """What the servers denied to anyone, except for answers: the right to give one is lost with the connection that the question came on."""
        lines = [line for server in self.servers for line in server.log.read_text().splitlines()]
        return [line for line in lines if "Violation" in line and ANSWER not in line]


@asynccontextmanager
async def spread(
    folder: Path,
    network: Network,
    *,
    servers: int = 3,
    vllm: bool = False,
    workers: int = 4,
    edge: tuple[str, ...] = (),
) -> AsyncIterator[Spread]:
    """Start it; inside, every edge serves every worker. `workers` are those with the simulated engine, half of them for each leg, and `edge` are
    further flags of the edges.
    """
    hosts = network.hosts
    async with AsyncExitStack() as stack:
        kept, keys = await _servers(stack, folder, hosts[:servers])
        access = ("--nats", ",".join(server.url for server in kept), "--nats-keys-dir", str(keys))
        await _done(hosts[0], "pools", *access, "--replicas", str(servers))
        found = await _done(hosts[0], "keys", "create", *KEY, "--json", *access)
        key = msgspec.json.decode(found.strip().splitlines()[-1])["key"]
        made = Spread(folder, network, kept, [], access, key)
        stack.push_async_callback(made.stop)
        made.keep(hosts[0], "operator", "pools", "--watch")
        for number in range(workers):
            role, host = ("prefill", "decode")[number % 2], hosts[number % len(hosts)]
            made.keep(host, f"{role}-{number}", "engine", "--engine", "sim", "--role", role)
        if vllm:
            model = ("--model", str(tiny_model.ensure()))
            for role, host in (("prefill", hosts[0]), ("decode", hosts[-1])):
                place = ("--role", role, "--handoff-host", host.address)
                made.keep(host, f"{role}-vllm", "engine", *VLLM, *model, *place, imported="vllm")
        for host in hosts:
            if workers:
                made.route(host, f"router-{host.number}", SIM_POOL)
            listen = ("--host", host.address, "--port", str(EDGE_PORT), "--auth", "keys", *POLICIES)
            made.keep(host, f"edge-{host.number}", "edge", *listen, *edge)
        if vllm:
            pool = await made.engine_pool()
            for host in hosts[::2]:
                made.route(host, f"router-vllm-{host.number}", pool)
        if workers:
            await made.until_healthy(workers + 2 * vllm)
        yield made


async def _servers(stack: AsyncExitStack, folder: Path, hosts: list[Host]) -> tuple[list[KeptServer], Path]:
    """One server on each host, as `nats-config` configures them, and the folder of keys."""
    keys, count = folder / "keys", len(hosts)
    addresses = ",".join(host.address for host in hosts)
    words = ("--servers", str(count), "--hosts", addresses, "--store", str(folder / "js"), "--out", str(keys))
    code, output = await hosts[0].finish("nats-config", *words)
    assert code == 0, output
    files = ["nats.conf"] if count == 1 else [f"nats-{number + 1}.conf" for number in range(count)]
    kept = [KeptServer(host, keys / file) for host, file in zip(hosts, files, strict=True)]
    for server in kept:
        stack.push_async_callback(_ended, asyncio.create_task(server.keep()))
    return kept, keys


async def _done(host: Host, *words: str) -> str:
    """The output of a command that is repeated until it succeeds: a cluster elects its leaders first."""
    async with asyncio.timeout(READY_S):
        while True:
            code, output = await host.finish(*words)
            if not code:
                return output
            await asyncio.sleep(POLL_S)


async def _ended(task: "asyncio.Task[None]") -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
